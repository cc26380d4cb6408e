"""What a server may leave behind: processes that carry its mark, and its shared-memory regions.

Run as a script, ``python orphan_cleanup.py PARENT_PID MARK PATH...`` is the guard of one server: it
sleeps until the process that started it dies, then removes what that process no longer can. The
server's stubs need it: killed while they start, they wait for their dead server for ever.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# Set in the server's environment; its stubs and whatever they start inherit it.
PROCESS_TAG_VARIABLE = "TRIPTYCH_SERVER_MARK"  # `runtime.flow_control` reads it
SHM = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


def new_process_tag() -> str:
    """A name that nobody can guess, fit as the prefix of a server's shared-memory regions."""
    return f"triptych_{os.getpid()}_{secrets.token_hex(16)}_"


def tagged_processes(mark: str) -> list[psutil.Process]:
    """This user's living processes whose environment carries the mark, but for this one."""
    return [
        process
        for process in psutil.process_iter(["environ"])  # None of a process of somebody else
        if (process.info["environ"] or {}).get(PROCESS_TAG_VARIABLE) == mark
        and process.pid != os.getpid()
    ]


def remove_orphans(mark: str, paths: Sequence[Path] = (), *, timeout_s: float = 5.0) -> None:
    """Kills every process that carries the mark, then removes its regions and the paths.

    Args:
        mark: the server's mark; see `new_process_tag`.
        paths: files and folders that were made for this server; they need not exist.
        timeout_s: how long to wait for the processes to be gone.
    """
    if not mark:
        raise ValueError("an empty mark would match every region of this machine")
    deadline = time.monotonic() + timeout_s
    quiet_looks = 0
    # Two looks: a process that is being replaced by another program shows no environment just then.
    while quiet_looks < 2 and time.monotonic() < deadline:
        processes = tagged_processes(mark)
        quiet_looks = 0 if processes else quiet_looks + 1
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_S)
    for region in SHM.glob(f"{mark}*"):
        region.unlink(missing_ok=True)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def guard(parent_pid: int, mark: str, paths: Sequence[Path]) -> None:
    """Sleeps until the parent dies; a parent that cleans up by itself kills this process."""
    # Blocked, so that a signal that comes before the wait is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the kernel was asked. And one signal comes for every thread of
    # a dying parent that this process is handed to: only the last tells that the parent is gone.
    while os.getppid() == parent_pid:
        signal.sigwait({signal.SIGTERM})
    remove_orphans(mark, paths)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2], [Path(path) for path in sys.argv[3:]])
