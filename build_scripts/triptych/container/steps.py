"""The Python steps of a running server, seen from outside: which have died, what is under way.

Triton 24.10 never starts a step again whose process has died, and goes on saying that it is ready.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from triptych.runtime.in_flight import InFlight

STUB = "triton_python_backend_stub"
"""The program that runs a Python step."""

STARVED = (
    "Triton does so where a step gets no CPU for a second, when it loads most of all before 25.08: "
    "give the steps the CPUs that they take"
)
"""Said of a server that ended, or loads for ever, for that."""

_POLL_S = 0.02
# After the last answer was made it still has to be written, by processes that may have to wait for
# the CPU: much longer than it takes, where there was one.
_QUIET_S = 0.2
_LAST_WRITE_S = 2.0
_LOOK_S = 1.0
# A step that was told to end does so within this time, also on a busy machine.
_MAX_END_S = 15.0
_WAIT4 = {"x86_64": "61", "aarch64": "260"}


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


class EndlessLoad:
    """Tells of a server that waits for ever for the end of a step while models load.

    Triton takes a step that loads for dead where it got no CPU for a second, and waits for the end
    of its process without having asked for it (`StubLauncher::WaitForStubProcess`, seen in 24.10).
    Where the system does not show what threads wait for, this never tells of any.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, float] = {}
        self._looked_at = -_LOOK_S

    def steps(self, server: int) -> dict[int, str]:
        """Process id -> model of the steps that the server with this process id waits for so.

        To be called again and again while models load; it looks once a second.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return {}
        self._looked_at = now
        awaited = _awaited_children(server)
        self._awaited = {pid: self._awaited.get(pid, now) for pid in awaited}
        endless = {pid for pid, since in self._awaited.items() if now - since > _MAX_END_S}
        living = step_processes(server) if endless else {}
        return {pid: model for pid, model in living.items() if pid in endless}

    def told(self, server: int) -> str:
        """What is said of a server with such steps, else an empty text; likewise."""
        models = list(self.steps(server).values())
        return f"{models[0]} would load for ever ({STARVED})" if models else ""


def _awaited_children(pid: int) -> set[int]:
    """The children for whose end threads of a process wait, as their system calls say."""
    wanted = _WAIT4.get(platform.machine())
    found = set()
    with suppress(OSError):  # gone meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # ended meanwhile, or not to be seen
                number, *arguments = (thread / "syscall").read_text().split()
                if number == wanted:
                    found.add(int(arguments[0], 16))
    return found


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
    quiet_until = time.monotonic() + _QUIET_S
    while time.monotonic() < quiet_until:
        if any(pipeline.under_way() > 0 for pipeline in pipelines):
            quiet_until = time.monotonic() + _LAST_WRITE_S
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
