"""How many requests are under way between preprocess and postprocess, and the limit on them.

Triton's own queue limits are not used: in its dynamic batcher any queue policy (a size or a
timeout) loses wake-ups, and a request then waits up to 500 ms beside an idle model.

Every request carries a ticket from preprocess past the core to postprocess. The core's queue is
first in, first out, so a ticket that arrives there tells that all earlier ones are answered, or
lost to an error or a client that left: nothing that gets lost is counted for long.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 64
"""Most preprocess instances of a pipeline."""

PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Who starts a server may set it, and then remove what in shared memory begins with its value."""

SLOT_BITS = 48
PATIENCE_S = 1.0
"""A full pipeline without any progress for so long has lost what it counts: let one pass."""


class InFlight:
    """Counts shared by all processes of one pipeline on one server, in a small file.

    Three numbers a slot: the process that holds it, what it admitted, the last ticket seen of it.
    """

    def __init__(self, pipeline: str) -> None:
        prefix = os.environ.get(PREFIX_VARIABLE, "triptych_")
        server = _identify(os.getppid())
        for other in SHARED_MEMORY.glob(f"triptych_*in_flight.*.{pipeline}"):
            owner = other.name.split(".")[1]
            if _identify(int(owner.partition("-")[0])) != owner:  # its server is dead
                other.unlink(missing_ok=True)
        self.path = SHARED_MEMORY / f"{prefix}in_flight.{server}.{pipeline}"
        with self.path.open("ab") as file:
            os.ftruncate(file.fileno(), 8 * 3 * SLOTS)
        with self.path.open("r+b") as file:
            counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._holders = counts[:SLOTS]
        self._admitted = counts[SLOTS : 2 * SLOTS]
        self._settled = counts[2 * SLOTS :]

    def take_slot(self) -> int:
        """A slot of the calling process's own, for `admit`; that of a dead one is used again.

        Raises:
            RuntimeError: every slot is held by a living process.
        """
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for slot, holder in enumerate(self._holders):
                if not holder or not Path(f"/proc/{holder}").exists():
                    self._settled[slot] = self._admitted[slot]
                    self._holders[slot] = os.getpid()
                    return slot
        raise RuntimeError(f"a pipeline has at most {SLOTS} preprocess instances")

    def admit(self, slot: int) -> int:
        number = self._admitted[slot] + 1
        self._admitted[slot] = number
        return slot << SLOT_BITS | number

    def settle(self, ticket: int) -> None:
        slot, number = ticket >> SLOT_BITS, ticket & ((1 << SLOT_BITS) - 1)
        if number > self._settled[slot]:
            self._settled[slot] = number

    def under_way(self) -> int:
        """Requests admitted and not settled, over all slots."""
        return sum(self._admitted) - sum(self._settled)


class Admission:
    """Lets requests of one preprocess instance into the pipeline while there is room."""

    def __init__(self, in_flight: InFlight, limit: int) -> None:
        self._in_flight = in_flight
        self._slot = in_flight.take_slot()
        self._limit = limit
        self._last_seen = 0
        self._progress_at = time.monotonic()

    def room(self) -> int:
        under_way = self._in_flight.under_way()
        now = time.monotonic()
        if under_way < self._last_seen or under_way < self._limit:
            self._progress_at = now
        self._last_seen = under_way
        if under_way >= self._limit and now - self._progress_at > PATIENCE_S:
            self._progress_at = now
            return 1
        return self._limit - under_way

    def admit(self) -> int:
        return self._in_flight.admit(self._slot)


def _identify(pid: int) -> str:
    """A process's id with its start time, so that a later process with the id is another one."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "dead"
    return f"{pid}-{started}"
