"""The Python steps of a running server, seen from outside: which have died, what is under way.

Triton 24.10 never starts a step again whose process has died, and goes on saying that it is ready.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from triptych.runtime.in_flight import InFlight

STUB = "triton_python_backend_stub"
"""The program that runs a Python step."""

_POLL_S = 0.02
# After the last answer was made it still has to be written.
_LAST_WRITE_S = 0.2


def step_processes(server: int) -> dict[int, str]:
    """Process id -> model of each living step of the server with this process id."""
    found = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        if not _is_child(pid, server):
            continue
        with suppress(OSError):  # gone meanwhile
            words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
            if Path(words[0]).name == STUB:
                found[pid] = Path(words[1]).parts[-3]  # MODEL/VERSION/FILE
    return found


def dead_steps(server: int, steps: Mapping[int, str]) -> dict[int, str]:
    """Those of the server's steps, as `step_processes` found them, that live no more."""
    return {pid: model for pid, model in steps.items() if not _is_child(pid, server)}


def _is_child(pid: int, parent: int) -> bool:
    """Whether the process lives and the other one is its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[1]) == parent


def drain(server: int, grace_s: float, prefix: str = "") -> bool:
    """Let the pipelines of a server refuse what comes, and wait until all they have is answered.

    Triton itself refuses the next step of what is under way as soon as it is told to stop.

    Args:
        server: its process id.
        grace_s: how long to wait at most.
        prefix: of what the server has in shared memory, if not as the environment says.

    Returns:
        Whether nothing is under way any more in any pipeline.
    """
    deadline = time.monotonic() + grace_s
    pipelines = InFlight.of_server(server, prefix)
    for pipeline in pipelines:
        pipeline.close()
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + _LAST_WRITE_S:
        if any(pipeline.under_way() > 0 for pipeline in pipelines):
            quiet_since = time.monotonic()
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
