"""What is under way in one pipeline on one server: counts that its steps share in a small file.

Every request carries a ticket from preprocess past the core to postprocess. The core's queue is
first in, first out, so a ticket that arrives there tells that all earlier ones are answered, or
lost to an error or a client that left: nothing that gets lost is counted for long.

The file also holds how fast requests are answered, and whether the server is about to stop: who
stops it says so here (`close`) and waits until nothing is under way.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 64
"""Most preprocess instances of a pipeline."""

PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Who starts a server may set it, and then remove what in shared memory begins with its value."""

SLOT_BITS = 48
RATE_WINDOW_S = 0.1
"""Busy seconds that one sample of the rate is taken over, at least."""
BATCH_GAP_S = 0.005
BATCH_ROWS = 64
"""Requests of a batch are answered one right after the other: a sample ends with the last of them,
which is told by a gap, or by so many rows."""
NEWEST = 0.3
"""Weight of the newest sample in the rate."""
COMPARABLE = 0.5
"""A rate measured with fewer than this share of the rows under way tells nothing about the other:
a core that computes batches takes longer for one row the fewer there are."""

_HEADER = 10
_FIELDS = 8
_KEY = slice(0, 2)
_CLOSED_AT, _DEPARTED_AT, _ROW_S, _DEPTH = range(2, 6)
_WINDOW_S, _WINDOW_ROWS, _WINDOW_ANSWERED, _WINDOW_WAIT_S = range(6, 10)
_SIGNED = struct.Struct("<3q")


class Ticket(NamedTuple):
    """What postprocess gives back of an admitted request.

    Attributes:
        number: of the request, counted by slot, with the slot above `SLOT_BITS`.
        rows: of the core that the slot has admitted up to and with this request.
        admitted_ns: on the clock of `time.monotonic_ns`.
        seal: tells that this server made the ticket.
    """

    number: int
    rows: int
    admitted_ns: int
    seal: int


class InFlight:
    """Counts shared by all processes of one pipeline on one server.

    Eight numbers a slot: the process that holds it, requests and rows of the core that it gave
    tickets to, those of the last ticket seen of it, those that still wait for a ticket in it, the
    last chunk of a generation that was taken from it.
    """

    def __init__(self, pipeline: str) -> None:
        server = _identify(os.getppid())
        for other in SHARED_MEMORY.glob(f"triptych_*in_flight.*.{pipeline}"):
            owner = other.name.split(".")[1]
            if _identify(int(owner.partition("-")[0])) != owner:  # its server is dead
                other.unlink(missing_ok=True)
        self._open(SHARED_MEMORY / f"{_prefix()}in_flight.{server}.{pipeline}")
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not any(self._words[_KEY]):
                self._words[_KEY] = memoryview(os.urandom(16)).cast("q")
        self._key = bytes(self._words[_KEY])

    @classmethod
    def of_server(cls, pid: int, prefix: str = "") -> list[InFlight]:
        """The counts of each pipeline of the server with this process id.

        `prefix` is that of the server's environment, where it is not that of this process.
        """
        found = []
        for path in sorted(
            SHARED_MEMORY.glob(f"{prefix or _prefix()}in_flight.{_identify(pid)}.*")
        ):
            counts = cls.__new__(cls)
            counts._open(path)
            found.append(counts)
        return found

    def _open(self, path: Path) -> None:
        self.path = path
        path.touch(0o600)
        with path.open("r+b") as file:
            os.ftruncate(file.fileno(), 8 * (_HEADER + _FIELDS * SLOTS))
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        self._words, self._times = memory.cast("q")[:_HEADER], memory.cast("d")[:_HEADER]
        fields = [memory.cast("q")[_HEADER + i * SLOTS :][:SLOTS] for i in range(_FIELDS)]
        self._holders, self._requests, self._settled, self._rows, self._settled_rows = fields[:5]
        self._waiting, self._waiting_rows, self._taken = fields[5:]

    def take_slot(self) -> int:
        """A slot of the calling process's own, for `admit`; that of a dead one is used again.

        Raises:
            RuntimeError: every slot is held by a living process.
        """
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for slot, holder in enumerate(self._holders):
                if not holder or not Path(f"/proc/{holder}").exists():
                    self._settled[slot] = self._requests[slot]
                    self._settled_rows[slot] = self._rows[slot]
                    self._waiting[slot] = self._waiting_rows[slot] = self._taken[slot] = 0
                    self._holders[slot] = os.getpid()
                    return slot
        raise RuntimeError(f"a pipeline has at most {SLOTS} preprocess instances")

    def admit(self, slot: int, rows: int) -> Ticket:
        """Count a request with its rows of the core."""
        number = self._requests[slot] + 1
        self._requests[slot] = number
        self._rows[slot] += rows
        facts = slot << SLOT_BITS | number, self._rows[slot], time.monotonic_ns()
        return Ticket(*facts, self._seal(*facts))

    def wait(self, slot: int, requests: int, rows: int) -> None:
        """So many more requests wait in a slot for a ticket; fewer where the numbers are < 0."""
        self._waiting[slot] += requests
        self._waiting_rows[slot] += rows

    def take(self, slot: int, number: int) -> None:
        """Chunks that a core of generated text sent from its slot have arrived, up to `number`."""
        self._taken[slot] = number

    def taken(self, slot: int) -> int:
        """The number of the last chunk that has arrived from a slot; 0 before."""
        return self._taken[slot]

    def gave(self, ticket: Ticket) -> bool:
        """Whether the ticket is one of this server's."""
        return ticket.seal == self._seal(*ticket[:3])

    def settle(self, ticket: Ticket, rows: int, came_at: float | None = None) -> bool:
        """Count a request as answered, and those of its slot before it as answered or lost.

        Args:
            ticket: the request's.
            rows: of the core that it has.
            came_at: when postprocess got it, on the clock of `time.monotonic`; None for now.

        Returns:
            False where the ticket is none of this server's.
        """
        if not self.gave(ticket):
            return False
        slot, number = ticket.number >> SLOT_BITS, ticket.number & ((1 << SLOT_BITS) - 1)
        settled = 0
        if number > self._settled[slot]:
            settled = ticket.rows - self._settled_rows[slot]
            self._settled[slot] = number
            self._settled_rows[slot] = ticket.rows
        came_at = time.monotonic() if came_at is None else came_at
        self._measure(settled, rows, ticket.admitted_ns / 1e9, came_at)
        return True

    def admitted(self) -> int:
        """Requests admitted so far, over all slots."""
        return sum(self._requests)

    def under_way(self) -> int:
        """Requests let in and not settled, over all slots."""
        return self.admitted() - sum(self._settled) + sum(self._waiting)

    def rows_under_way(self) -> int:
        """Rows of the core, likewise."""
        return self.rows_in_core() + sum(self._waiting_rows)

    def rows_in_core(self) -> int:
        """Rows with a ticket that are not settled, over all slots."""
        return sum(self._rows) - self.rows_settled()

    def rows_settled(self) -> int:
        """Rows of all requests that are answered, or known to be lost."""
        return sum(self._settled_rows)

    def rows_a_request(self) -> float:
        """Rows of the core that an admitted request had, on average; 1 before the first."""
        return sum(self._rows) / (self.admitted() or 1) or 1.0

    @property
    def row_s(self) -> float:
        """Seconds that the pipeline takes for a row with `depth` of them; 0 while not known."""
        return max(self._times[_ROW_S], 0.0)

    @property
    def depth(self) -> float:
        """Rows with a ticket that were under way, on average, while `row_s` was measured."""
        return self._times[_DEPTH]

    @property
    def departed_at(self) -> float:
        """When the last request was answered, on the clock of `time.monotonic`; 0 before."""
        return self._times[_DEPARTED_AT]

    def close(self) -> None:
        """Let preprocess refuse what comes from now on."""
        self._times[_CLOSED_AT] = time.monotonic()

    @property
    def closed_at(self) -> float:
        """When `close` was called, on the clock of `time.monotonic`; 0 before."""
        return self._times[_CLOSED_AT]

    def _seal(self, number: int, rows: int, admitted_ns: int) -> int:
        data = _SIGNED.pack(number, rows, admitted_ns)
        digest = hashlib.blake2b(data, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _measure(self, settled: int, answered: int, admitted_at: float, now: float) -> None:
        """Take a departure into the rate: the time since the one before, idle time left out.

        A pipeline that has little to do answers slower than it could. So each sample comes with the
        rows that were under way (Little's law: their waits together by the time taken), and one of
        fewer rows than the rate known is of counts only where it is faster.

        Rows that got lost may have been computed or not, which nobody tells: a sample lies between
        that of all rows settled and that of those answered.
        """
        times, words = self._times, self._words
        gap_s = max(now - max(times[_DEPARTED_AT], admitted_at), 0.0)
        times[_DEPARTED_AT] = max(times[_DEPARTED_AT], now)
        taken_s, rows = times[_WINDOW_S], words[_WINDOW_ROWS]
        if taken_s >= RATE_WINDOW_S and (gap_s > BATCH_GAP_S or rows >= BATCH_ROWS):
            # Another process may have begun a new sample meanwhile: no row is left then.
            kept = max(words[_WINDOW_ANSWERED], 1)
            self._learn(taken_s, max(rows, kept), kept, times[_WINDOW_WAIT_S])
            times[_WINDOW_S] = times[_WINDOW_WAIT_S] = 0.0
            words[_WINDOW_ROWS] = words[_WINDOW_ANSWERED] = 0
        times[_WINDOW_S] += gap_s
        times[_WINDOW_WAIT_S] += settled * (now - admitted_at)
        words[_WINDOW_ROWS] += settled
        words[_WINDOW_ANSWERED] += answered

    def _learn(self, taken_s: float, settled: int, answered: int, wait_s: float) -> None:
        """Believe of what a sample leaves open what moves the rate known the least."""
        known_s, depth = self._times[_ROW_S], wait_s / taken_s
        shortest_s, longest_s = taken_s / settled, taken_s / answered
        if known_s <= 0:
            self._believe(math.sqrt(shortest_s * longest_s), depth)
        elif known_s > longest_s:
            self._believe(longest_s, depth * answered / settled)
        else:
            self._believe(max(known_s, shortest_s), depth)

    def _believe(self, sample_s: float, depth: float) -> None:
        times = self._times
        known_s = times[_ROW_S]
        if not known_s:
            # Not believed yet: the first requests of a server may be slower than all others.
            times[_ROW_S] = -sample_s
        elif known_s < 0 or sample_s < known_s:
            times[_ROW_S] = sample_s
        elif depth >= COMPARABLE * times[_DEPTH]:
            times[_ROW_S] = known_s + NEWEST * (sample_s - known_s)
        else:
            return
        times[_DEPTH] = depth


def _prefix() -> str:
    return os.environ.get(PREFIX_VARIABLE, "triptych_")


def _identify(pid: int) -> str:
    """A process's id with its start time, so that a later process with the id is another one."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "dead"
    return f"{pid}-{started}"
