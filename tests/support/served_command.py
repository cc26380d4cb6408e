"""The `triptych serve` command as a process, and the addresses that it prints."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRIPTYCH = str(Path(sys.executable).with_name("triptych"))


@contextlib.contextmanager
def serving(repository: Path) -> Iterator[subprocess.Popen[str]]:
    """`triptych serve --json` on free ports; killed at the end if a test left it running."""
    ports = [f"--{kind}-port=0" for kind in ("grpc", "http", "metrics")]
    with subprocess.Popen(
        [TRIPTYCH, "serve", str(repository), "--json", *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def endpoints_of(server: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed when it was ready."""
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, server.communicate()[1]
    endpoints: dict[str, Any] = json.loads(line)
    return endpoints
