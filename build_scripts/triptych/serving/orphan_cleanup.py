"""Remove a server's orphans: processes with its tag, its shared-memory regions, its folders.

As a script, ``python orphan_cleanup.py PARENT_PID TAG PATH...`` guards one server. It sleeps until
its parent process dies, then cleans up in place of the parent. Triton's stubs require a guard: if
their server is killed while they start, they wait for it forever.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

# Variable of the server's environment, which its stubs and their child processes inherit.
PROCESS_TAG_VARIABLE = "TRIPTYCH_SERVER_MARK"  # `runtime.in_flight` reads it
SHM = Path("/dev/shm")
ENVIRONMENTS = Path("/tmp")
"""Folder in which each Python backend of a server creates a folder at its start."""
SERVER = "tritonserver"
_PR_SET_PDEATHSIG = 1
_POLL_S, _TIMEOUT_S = 0.02, 5.0
T = TypeVar("T")


def new_process_tag() -> str:
    """Return an unguessable tag, which is also the prefix of the server's shared-memory regions."""
    return f"triptych_{os.getpid()}_{secrets.token_hex(16)}_"


def tagged_processes(tag: str) -> list[psutil.Process]:
    """Return this user's other living processes whose environment has the tag."""
    return [
        process
        for process, environment in read_processes(lambda process: process.environ())
        if environment.get(PROCESS_TAG_VARIABLE) == tag and process.pid != os.getpid()
    ]


def read_processes(read: Callable[[psutil.Process], T]) -> Iterator[tuple[psutil.Process, T]]:
    """Yield each process of which this user may `read` something.

    Attributes of `psutil.process_iter` are not used: another thread's call replaces them.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield process, read(process)


def remove_orphans(tag: str, paths: Sequence[Path] = ()) -> None:
    """Kill every process with the tag, then remove its shared-memory regions and the paths.

    Args:
        tag: Tag of the server; see `new_process_tag`.
        paths: Files and folders of this server; they need not exist.
    """
    if not tag:
        raise ValueError("an empty tag would match every region of this machine")
    deadline = time.monotonic() + _TIMEOUT_S
    clean_checks = 0
    # Two checks, because a process has no environment while exec replaces its program.
    while clean_checks < 2 and time.monotonic() < deadline:
        processes = tagged_processes(tag)
        clean_checks = 0 if processes else clean_checks + 1
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_S)
    for region in SHM.glob(f"{tag}*"):
        region.unlink(missing_ok=True)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    remove_environment_folders()


def remove_environment_folders() -> None:
    """Remove the empty folders that the Python backends of ended servers left.

    A backend removes its folder only if its server ends by itself. Folders that are younger than a
    server that runs may belong to that server.
    """
    found = read_processes(lambda process: (process.name(), process.create_time()))
    oldest = min((began for _, (name, began) in found if name == SERVER), default=math.inf)
    for folder in ENVIRONMENTS.glob("python_env_??????"):
        with suppress(OSError):  # it is not empty, or belongs to another user
            if folder.stat().st_mtime < oldest:
                folder.rmdir()


def guard(parent_pid: int, tag: str, paths: Sequence[Path]) -> None:
    """Sleep until the parent dies, then clean up. A normal exit of the parent kills the guard."""
    # The signal is blocked, so that one that arrives before the wait is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before prctl was called. A dying parent also sends one signal per
    # thread: only the parent process id shows that it has ended.
    while os.getppid() == parent_pid:
        signal.sigwait({signal.SIGTERM})
    remove_orphans(tag, paths)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2], [Path(path) for path in sys.argv[3:]])
