"""Shared-memory counters of the requests in flight in one pipeline on one server.

A ticket goes with every request from preprocess past the core to postprocess. The core's queue is
first in, first out. When a ticket arrives in postprocess, all earlier requests have been answered,
or were lost to an error or to a client that left. Lost requests are not counted for long.

The name of the file has the version of its layout and the server, which is a process in a PID
namespace. A server removes only files of dead servers in its own namespace.

The file also holds the rate at which rows are answered, and whether the server is stopping. The
process that stops the server calls `stop_admitting` and waits until no request is in flight.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 64
"""Maximum number of preprocess instances of a pipeline."""

PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Variable with a prefix for the files in shared memory, so that they can be removed later."""

FORMAT = 2
"""Version of the layout of the file, which is in its name. Steps of different versions that run
while a pipeline is replaced use different files."""

SLOT_BITS = 48
RATE_WINDOW_S = 0.1
"""Minimum busy seconds in one sample of the rate."""
BATCH_GAP_S = 0.005
BATCH_ROWS = 64
"""Gap in seconds, and number of rows, either of which ends a sample. The requests of a batch are
answered one right after the other, so a sample must end with the last of them."""
NEWEST = 0.3
"""Weight of the newest sample in the rate."""
COMPARABLE = 0.5
"""Minimum ratio of rows in flight at which two rates are comparable: a core that computes batches
takes longer per row when there are fewer rows."""

_HEADER = 11
_FIELDS = 8
_KEY = slice(0, 2)
_CLOSED_AT, _DEPARTED_AT, _ROW_S, _DEPTH = range(2, 6)
_WINDOW_S, _WINDOW_ROWS, _WINDOW_ANSWERED, _WINDOW_WAIT_S = range(6, 10)
_FIRST_S = 10
_SIGNED = struct.Struct("<3q")


class Ticket(NamedTuple):
    """Proof that a request was admitted, returned by postprocess.

    Attributes:
        number: Number of the request within its slot, with the slot above `SLOT_BITS`.
        rows: Model rows that the slot has admitted up to and including this request.
        admitted_ns: Time of the admission, by `time.monotonic_ns`.
        mac: Message authentication code; only this server can make it.
    """

    number: int
    rows: int
    admitted_ns: int
    mac: int


@dataclass
class RowTime:
    """Estimate of the seconds that a busy pipeline takes per row.

    A pipeline with little to do takes longer per row than it could. A sample with far fewer rows in
    flight than the last one therefore counts only if it is faster. Lost rows may have been computed
    or not, so a sample is a range, and the value in it that changes the estimate least is used.

    Attributes:
        seconds: Seconds per row; 0 until two samples are known.
        depth: Rows in flight while `seconds` was measured.
        first_s: First sample. It is not used alone: a server's first requests may be slower.
    """

    seconds: float = 0.0
    depth: float = 0.0
    first_s: float = 0.0

    def learn(self, taken_s: float, settled: int, answered: int, wait_s: float) -> None:
        """Add a sample.

        Args:
            taken_s: Busy seconds of the sample.
            settled: Rows that were answered or lost.
            answered: Rows that were answered.
            wait_s: Sum of the seconds that all settled rows took.
        """
        fastest_s, slowest_s = taken_s / settled, taken_s / answered
        depth = wait_s / taken_s  # Little's law
        if not self.seconds:
            sample_s = math.sqrt(fastest_s * slowest_s)
        elif self.seconds > slowest_s:
            sample_s, depth = slowest_s, depth * answered / settled
        else:
            sample_s = max(self.seconds, fastest_s)
        if not self.first_s:
            self.first_s, self.depth = sample_s, depth
        elif not self.seconds or sample_s < self.seconds:
            self.seconds, self.depth = sample_s, depth
        elif depth >= COMPARABLE * self.depth:
            self.seconds += NEWEST * (sample_s - self.seconds)
            self.depth = depth


class InFlight:
    """Counts shared by all processes of one pipeline on one server.

    A slot has eight numbers: the process that holds it; requests and rows with a ticket; requests
    and rows up to the last ticket that came back; requests and rows that wait for a ticket; and the
    last chunk of a generation that postprocess has taken.
    """

    def __init__(self, pipeline: str) -> None:
        server = _identify(os.getppid())
        for other in SHARED_MEMORY.glob(f"triptych_*in_flight.*.{_namespace()}-*.{pipeline}"):
            owner = other.name.split(".")[2]
            if _identify(int(owner.split("-")[1])) != owner:  # its server is dead
                other.unlink(missing_ok=True)
        self._open(SHARED_MEMORY / f"{_prefix()}in_flight.{FORMAT}.{server}.{pipeline}")
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not any(self._words[_KEY]):
                self._words[_KEY] = memoryview(os.urandom(16)).cast("q")
        self._key = bytes(self._words[_KEY])

    @classmethod
    def of_server(cls, pid: int, prefix: str = "") -> list[InFlight]:
        """Return the counts of each pipeline of the server with this process id.

        `prefix` is the one in the server's environment, if it differs from this process.
        """
        found = []
        for path in sorted(
            SHARED_MEMORY.glob(f"{prefix or _prefix()}in_flight.{FORMAT}.{_identify(pid)}.*")
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
        self._waiting, self._waiting_rows, self._acknowledged = fields[5:]

    def take_slot(self) -> int:
        """Reserve a slot for the calling process; the slot of a dead process is reused.

        Raises:
            RuntimeError: Every slot is held by a living process.
        """
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for slot, holder in enumerate(self._holders):
                if not holder or not Path(f"/proc/{holder}").exists():
                    self._settled[slot] = self._requests[slot]
                    self._settled_rows[slot] = self._rows[slot]
                    self._waiting[slot] = self._waiting_rows[slot] = self._acknowledged[slot] = 0
                    self._holders[slot] = os.getpid()
                    return slot
        raise RuntimeError(f"a pipeline has at most {SLOTS} preprocess instances")

    def admit(self, slot: int, rows: int) -> Ticket:
        """Count a request and its model rows, and return its ticket."""
        number = self._requests[slot] + 1
        self._requests[slot] = number
        self._rows[slot] += rows
        fields = slot << SLOT_BITS | number, self._rows[slot], time.monotonic_ns()
        return Ticket(*fields, self._make_mac(*fields))

    def wait(self, slot: int, requests: int, rows: int) -> None:
        """Add to the requests and rows that wait in a slot for a ticket."""
        self._waiting[slot] += requests
        self._waiting_rows[slot] += rows

    def acknowledge(self, slot: int, number: int) -> None:
        """Note that the chunks of a generation core have arrived up to `number`."""
        self._acknowledged[slot] = number

    def acknowledged(self, slot: int) -> int:
        """Return the number of the last chunk that has arrived from a slot; 0 before the first."""
        return self._acknowledged[slot]

    def is_valid(self, ticket: Ticket) -> bool:
        """Whether this server made the ticket."""
        return ticket.mac == self._make_mac(*ticket[:3])

    def mark_finished(self, ticket: Ticket, rows: int, came_at: float | None = None) -> bool:
        """Count a request as answered, and earlier ones of its slot as answered or lost.

        Args:
            rows: Number of its model rows.
            came_at: Arrival in postprocess, by `time.monotonic`; None for now.

        Returns:
            False if this server did not make the ticket.
        """
        if not self.is_valid(ticket):
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
        """Return the number of requests with a ticket so far, over all slots."""
        return sum(self._requests)

    def requests_in_flight(self) -> int:
        """Return the number of requests admitted and not finished, over all slots."""
        return self.admitted() - sum(self._settled) + sum(self._waiting)

    def rows_in_flight(self) -> int:
        """Return the number of model rows of the requests in flight."""
        return self.rows_in_core() + sum(self._waiting_rows)

    def rows_in_core(self) -> int:
        """Return the number of rows with a ticket that are not finished, over all slots."""
        return sum(self._rows) - self.rows_settled()

    def rows_settled(self) -> int:
        """Return the number of rows that were answered or are known to be lost."""
        return sum(self._settled_rows)

    def rows_per_request(self) -> float:
        """Return the mean number of model rows per admitted request; 1 before the first."""
        return sum(self._rows) / (self.admitted() or 1) or 1.0

    @property
    def row_s(self) -> float:
        """Seconds per row while `depth` rows are in flight; 0 until measured."""
        return self._times[_ROW_S]

    @property
    def depth(self) -> float:
        """Mean number of rows in the core while `row_s` was measured."""
        return self._times[_DEPTH]

    @property
    def departed_at(self) -> float:
        """Time of the last answer, by `time.monotonic`; 0 before the first."""
        return self._times[_DEPARTED_AT]

    def stop_admitting(self) -> None:
        """Make preprocess reject all further requests."""
        self._times[_CLOSED_AT] = time.monotonic()

    @property
    def closed_at(self) -> float:
        """Time of `stop_admitting`, by `time.monotonic`; 0 before."""
        return self._times[_CLOSED_AT]

    def _make_mac(self, number: int, rows: int, admitted_ns: int) -> int:
        data = _SIGNED.pack(number, rows, admitted_ns)
        digest = hashlib.blake2b(data, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _measure(self, settled: int, answered: int, admitted_at: float, now: float) -> None:
        """Add an answer to the current sample of the rate; `gap_s` leaves idle time out."""
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
        times = self._times
        rate = RowTime(times[_ROW_S], times[_DEPTH], times[_FIRST_S])
        rate.learn(taken_s, settled, answered, wait_s)
        times[_ROW_S], times[_DEPTH], times[_FIRST_S] = rate.seconds, rate.depth, rate.first_s


def _prefix() -> str:
    return os.environ.get(PREFIX_VARIABLE, "triptych_")


def _namespace() -> int:
    """Return the number of the PID namespace: containers may share /dev/shm but not process ids."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _identify(pid: int) -> str:
    """Return the namespace of a process id, the id and its start time, because ids are reused."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "dead"
    return f"{_namespace()}-{pid}-{started}"
