"""The `triptych serve` command as a process, and the addresses that it prints."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TRIPTYCH = str(Path(sys.executable).with_name("triptych"))


@contextlib.contextmanager
def serving(
    repository: Path, *options: str, wrapper: Sequence[str] = (), program: str = TRIPTYCH
) -> Iterator[subprocess.Popen[str]]:
    """`triptych serve --json` on free ports; killed at the end if a test left it running.

    `wrapper` are the first words of the command, `program` is the `triptych` of an environment.
    """
    ports = [f"--{kind}-port=0" for kind in ("grpc", "http", "metrics")]
    with subprocess.Popen(
        [*wrapper, program, "serve", str(repository), "--json", *ports, *options],
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
    assert line, server.stderr and server.stderr.read()
    endpoints: dict[str, Any] = json.loads(line)
    assert "error" not in endpoints, line
    return endpoints


@contextlib.contextmanager
def gateway(*words: str) -> Iterator[str]:
    """The address of a `triptych gateway` on a free port, which ends without an error."""
    command = [TRIPTYCH, "gateway", *words, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address: str = endpoints_of(process)["http"]
            yield address
            process.terminate()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
