"""Shared-memory counters of the requests in flight in one pipeline on one server.

A ticket goes with every forwarded request past the core to postprocess, in any order. The file has
a place for each ticket, which preprocess fills and postprocess clears. Requests whose clients left
never arrive in postprocess. They are forgotten once a request that was forwarded `REORDERED`
requests later is answered, or once no request has been answered for `SILENT_BATCHES` times the
measured time of a batch.

The name of the file has the version of its layout and the server, which is a process in a PID
namespace. A server removes only files of dead servers in its own namespace. The file also holds the
rate at which rows are answered, and whether the server is stopping: the process that stops the
server calls `InFlight.stop_admitting` and waits until no request is in flight.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 64
"""Maximum number of preprocess instances of a pipeline."""

PLACES = 4096
"""Maximum number of requests of a preprocess instance that are counted in the core."""

PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Variable with a prefix for the files in shared memory, so that they can be removed later."""

FORMAT = 3
"""Version of the layout of the file, which is in its name. Steps of different versions that run
while a pipeline is replaced use different files."""

SLOT_BITS = 48
REORDERED = 64
"""Number of later requests of the same preprocess instance that may be answered before a request.
Triton has kept no order between steps since 25.06."""
SILENT_BATCHES = 3
"""Batch times without an answer after which the requests in the core count as abandoned."""
MIN_PATIENCE_S = 0.1
FIRST_PATIENCE_S = 1.0
"""Minimum seconds without an answer for that, and the seconds while the batch time is unknown."""
MAX_DOUBLINGS = 6
"""Each silence that follows another without an answer must last twice as long: the core may also be
slow or have no CPU."""

RATE_WINDOW_S = 0.1
"""Minimum busy seconds in one sample of the rate."""
BATCH_GAP_S = 0.005
BATCH_ROWS = 64
"""Gap in seconds, and number of rows, either of which ends a sample. The requests of a batch are
answered one right after the other, so a sample must end with the last of them."""
NEWEST = 0.3
"""Weight of the newest sample in the rate."""
BATCH_DECAY = 0.1
"""Weight of the newest batch in the batch time if it took less time than the ones before."""
COMPARABLE = 0.5
"""Minimum ratio of rows in flight at which two rates are comparable: a core that computes batches
takes longer per row when there are fewer rows."""

_HEADER = 13
_FIELDS = 12
_KEY = slice(0, 2)
_CLOSED_AT, _DEPARTED_AT, _ROW_S, _DEPTH, _FIRST_S, _BATCH_S, _PASSED_AT = range(2, 9)
_WINDOW_S, _WINDOW_WAIT_S, _WINDOW_ROWS, _WINDOW_ANSWERED = range(9, 13)
_SIGNED = struct.Struct("<3q")


class Ticket(NamedTuple):
    """Proof that a request was admitted, returned by postprocess.

    A ticket of zeros stands for none.

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


class Load(NamedTuple):
    """Requests that are admitted and not finished.

    Attributes:
        requests: Number of the requests, over all preprocess instances.
        rows: Number of their model rows.
        rows_in_core: Number of those rows that have a ticket.
    """

    requests: int
    rows: int
    rows_in_core: int


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

    The preprocess instance that holds a slot writes the numbers of the slot, and the rows of its
    places. Postprocess writes the number of a request into its place. Each word of a slot therefore
    has one writer. The rate is an estimate, for which all postprocess instances write the newest
    answer of each slot.
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
        sizes = [_HEADER, *[SLOTS] * _FIELDS, *[SLOTS * PLACES] * 2]
        with path.open("r+b") as file:
            os.ftruncate(file.fileno(), 8 * sum(sizes))
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        words, times, start, fields = memory.cast("q"), memory.cast("d"), 0, []
        for size in sizes:
            fields.append((words[start : start + size], times[start : start + size]))
            start += size
        (self._words, self._times), *slots = fields
        integers = [field for field, _ in slots]
        # The holder; the last ticket, the rows of all tickets; the last ticket that is forgotten or
        # answered with all before it; what waits for a ticket; the last chunk of a generation that
        # postprocess has taken; silences in a row; the newest request that is answered and the rows
        # up to it; times; the rows and the last answer of each place.
        self._holders, self._newest, self._rows, self._floor = integers[:4]
        self._waiting, self._waiting_rows, self._acknowledged, self._silences = integers[4:8]
        self._settled, self._settled_rows = integers[8:10]
        self._forwarded_at, self._forgot_at = (field for _, field in slots[10:12])
        self._place_rows, self._answered = integers[12:]

    def take_slot(self) -> int:
        """Reserve a slot for the calling process; the slot of a dead process is reused.

        Raises:
            RuntimeError: Every slot is held by a living process.
        """
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for slot, holder in enumerate(self._holders):
                if not holder or not Path(f"/proc/{holder}").exists():
                    self.forget(slot)
                    self._settled[slot] = self._newest[slot]
                    self._settled_rows[slot] = self._rows[slot]
                    self._waiting[slot] = self._waiting_rows[slot] = self._acknowledged[slot] = 0
                    self._holders[slot] = os.getpid()
                    return slot
        raise RuntimeError(f"a pipeline has at most {SLOTS} preprocess instances")

    def admit(self, slot: int, rows: int, payload: bytes = b"") -> Ticket:
        """Count a request and its model rows, and return its ticket, which covers the payload."""
        now_ns = time.monotonic_ns()
        now = now_ns / 1e9
        if self._is_silent(slot, now) and self._in_core(slot):
            again = self._forgot_at[slot] > self.departed_at
            self._silences[slot] = self._silences[slot] + 1 if again else 1
            self._forgot_at[slot] = now
            self.forget(slot)
        number = self._newest[slot] + 1
        self._place_rows[slot * PLACES + number % PLACES] = rows
        self._rows[slot] += rows
        self._forwarded_at[slot] = now
        self._newest[slot] = number
        floor = self._floor[slot]
        while self._answered[slot * PLACES + (floor + 1) % PLACES] == floor + 1:
            floor += 1
        self._floor[slot] = floor
        fields = slot << SLOT_BITS | number, self._rows[slot], now_ns
        return Ticket(*fields, self._make_mac(*fields, payload))

    def forget(self, slot: int) -> None:
        """Count the requests in the core as lost."""
        self._floor[slot] = self._newest[slot]

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

    def is_valid(self, ticket: Sequence[int], payload: bytes = b"") -> bool:
        """Whether this server made the ticket with this payload; it is given by its numbers."""
        number, rows, admitted_ns, mac = ticket
        return mac == self._make_mac(number, rows, admitted_ns, payload)

    def is_awaited(self, ticket: Sequence[int], rows: int) -> bool:
        """Whether a valid ticket has this number of model rows, and is not answered yet."""
        slot, number = ticket[0] >> SLOT_BITS, ticket[0] & ((1 << SLOT_BITS) - 1)
        place = slot * PLACES + number % PLACES
        return number > self._answered[place] and rows == self._place_rows[place]

    def mark_finished(
        self, ticket: Sequence[int], came_at: float | None = None, payload: bytes = b""
    ) -> bool:
        """Count a request as answered.

        Args:
            ticket: Numbers of the ticket.
            came_at: Arrival in postprocess, by `time.monotonic`; None for now.
            payload: Payload of the ticket.

        Returns:
            False if this server did not make the ticket.
        """
        if not self.is_valid(ticket, payload):
            return False
        name, rows, admitted_ns, _ = ticket
        slot, number = name >> SLOT_BITS, name & ((1 << SLOT_BITS) - 1)
        place = slot * PLACES + number % PLACES
        if number > self._answered[place]:  # a ticket counts once
            self._answered[place] = number
            settled = 0
            if number > self._settled[slot]:
                settled = rows - self._settled_rows[slot]
                self._settled[slot], self._settled_rows[slot] = number, rows
            came_at = time.monotonic() if came_at is None else came_at
            self._measure(settled, self._place_rows[place], admitted_ns / 1e9, came_at)
        return True

    def admitted(self) -> int:
        """Return the number of requests with a ticket so far, over all slots."""
        return sum(self._newest)

    def load(self, now: float | None = None) -> Load:
        """Return what is in flight, over all slots.

        `now` is the time by `time.monotonic` if requests that seem abandoned do not count.
        """
        rows = [
            self._place_rows[slot * PLACES + number % PLACES]
            for slot in self._used()
            for number in self._in_core(slot, now)
        ]
        in_core = sum(rows)
        return Load(len(rows) + sum(self._waiting), in_core + sum(self._waiting_rows), in_core)

    def rows_settled(self) -> int:
        """Return the number of rows that were answered, or came before others that were."""
        return sum(self._settled_rows)

    def is_silent(self, now: float) -> bool:
        """Whether requests are in the core, and all of them seem abandoned."""
        slots = [slot for slot in self._used() if self._in_core(slot)]
        return bool(slots) and all(self._is_silent(slot, now) for slot in slots)

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

    def _used(self) -> Iterator[int]:
        """Yield the slots that have a holder; they are taken in their order."""
        for slot, holder in enumerate(self._holders):
            if not holder:
                return
            yield slot

    def _in_core(self, slot: int, now: float | None = None) -> set[int]:
        """Return the numbers of a slot's requests that are neither answered nor lost."""
        newest = self._newest[slot]
        first = max(self._floor[slot], newest - PLACES) + 1
        if first > newest or (now is not None and self._is_silent(slot, now)):
            return set()
        start, low, high = slot * PLACES, first % PLACES, newest % PLACES + 1
        answered = self._answered[start + low : start + (high if low < high else PLACES)].tolist()
        if low >= high:
            answered += self._answered[start : start + high].tolist()
        first = max(first, max(answered) - REORDERED + 1)
        return set(range(first, newest + 1)).difference(answered)

    def _is_silent(self, slot: int, now: float) -> bool:
        """Whether a slot's requests were forwarded long ago, and later ones or none answered."""
        times, departed_at = self._times, self._times[_DEPARTED_AT]
        patience_s = FIRST_PATIENCE_S
        if times[_BATCH_S]:
            patience_s = max(SILENT_BATCHES * times[_BATCH_S], MIN_PATIENCE_S)
        if self._forgot_at[slot] > departed_at:
            patience_s *= 2 ** min(self._silences[slot], MAX_DOUBLINGS)
        until = self._forwarded_at[slot] + patience_s
        return times[_PASSED_AT] > until or now > max(until, departed_at + patience_s)

    def _make_mac(self, number: int, rows: int, admitted_ns: int, payload: bytes) -> int:
        data = _SIGNED.pack(number, rows, admitted_ns)
        digest = hashlib.blake2b(data + payload, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _measure(self, settled: int, answered: int, admitted_at: float, now: float) -> None:
        """Add an answer to the current sample of the rate; `gap_s` leaves idle time out."""
        times, words = self._times, self._words
        gap_s = max(now - max(times[_DEPARTED_AT], admitted_at), 0.0)
        times[_DEPARTED_AT] = max(times[_DEPARTED_AT], now)
        times[_PASSED_AT] = max(times[_PASSED_AT], admitted_at)
        if gap_s > BATCH_GAP_S:
            slower_s = gap_s - times[_BATCH_S]
            times[_BATCH_S] += slower_s if slower_s > 0 else BATCH_DECAY * slower_s
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
