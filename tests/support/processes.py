"""Servers of tests, the marks of their processes and shared memory, and a bounded wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, SHM
from triptych.serving.server import Server


@contextmanager
def running(server: Server, on_progress: Callable[[str], None] | None = None) -> Iterator[Server]:
    """Run a server, and end it without the seconds that Triton takes to unload its models."""
    try:
        server.start()
        server.wait_ready(on_progress=on_progress)
        yield server
    finally:
        server.stop(grace_s=0.0)


def mark_of(pid: int) -> str:
    """The server's mark, as everybody on the machine can see it."""
    environ = Path(f"/proc/{pid}/environ")
    wanted = f"\0{PROCESS_TAG_VARIABLE}="
    assert eventually(lambda: wanted in environ.read_text())  # empty while a program is replaced
    return environ.read_text().partition(wanted)[2].partition("\0")[0]


def regions(mark: str) -> list[str]:
    return [path.name for path in SHM.glob(f"{mark}*")]


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
