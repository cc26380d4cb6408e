"""Marks that identify the processes and shared-memory regions of a test, and a bounded wait."""

import time
from collections.abc import Callable
from pathlib import Path

from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, SHM


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
