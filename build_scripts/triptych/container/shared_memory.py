"""Shared-memory regions of a server's Python steps: named after the server, removed with it.

A server that is killed leaves its regions, also in a pod, where the volume at ``/dev/shm`` outlives
a container. The next server removes them. A lock shows whether their server lives, because
servers that share ``/dev/shm`` may not see each other's processes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
_LOCK = "lock"


def new_prefix() -> str:
    """Return an unguessable prefix for the names of a server's regions."""
    return f"triptych_{secrets.token_hex(16)}_"


class SharedRegions:
    """Regions of one server, whose names begin with `prefix`, for the life of this object."""

    def __init__(self, prefix: str) -> None:
        _remove_abandoned()
        self._prefix = prefix
        name = f"{prefix}{_LOCK}"
        # Another server would remove a lock of the final name that is not held yet.
        unfinished = SHM / f".{name}"
        self._lock = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unfinished.rename(SHM / name)

    def remove(self) -> None:
        """Remove the regions and the lock."""
        _remove(self._prefix)
        os.close(self._lock)


def _remove_abandoned() -> None:
    """Remove the regions of this user's servers that have ended without doing so."""
    for path in SHM.glob(f"triptych_*_{_LOCK}"):
        with suppress(OSError), path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path.name.removesuffix(_LOCK))


def _remove(prefix: str) -> None:
    for region in SHM.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
