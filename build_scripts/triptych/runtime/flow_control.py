"""Flow control ``triptych``: the requests that preprocess rejects under overload.

**Core budget.** Preprocess forwards requests while the core holds less than `BUDGET_S` of work, or
less than two of its largest batches. The others wait in preprocess, first in, first out: Triton
never tells a first step that a client has left, and only the core's queue drops such requests. The
queue limits of Triton's dynamic batcher are not used. With any queue policy it loses wake-ups, and
a request then waits up to 500 ms beside an idle model.

**Rejections.** A request that waits is rejected with UNAVAILABLE and a time after which to retry if
the requests before it take longer than ``serving.queue.max_backlog_ms``, or longer than 70 % of the
time to its own deadline, or if they are ``serving.queue.max_in_flight`` or more. This is decided
once more rows have been answered during its wait than the core computes at once: such answers prove
that the core works and that clients still wait for it, and they give the rate. Without them a
request is rejected only when its own wait has reached the limit, or when more requests wait beyond
``max_in_flight`` than `MIN_REQUESTS`. A server that is stopping rejects all requests but probes.

**Probes.** Requests whose clients left are never answered, so the core seems full. Once nothing has
been answered for `SILENCE_S`, the newest request that waits is forwarded. Its answer proves that
the requests before it are lost, and they no longer count. If clients keep leaving, probes come
earlier, and the oldest requests go with them, as many as were lost within the last second: Triton
drops the canceled ones when they are forwarded. The rows that leave the core, lost or answered, are
the rate by which a wait is estimated. While a server is stopping, the next request that comes is
forwarded as a probe: the process that stops it sends some.

**Counts.** A ticket goes with each forwarded request past the core to postprocess, in any order. A
request sent to a step itself has no ticket: it is answered, not counted and not limited. All steps
count in a file in shared memory whose name has the version of its layout and the server, which is a
process in a PID namespace. A server removes only files of dead servers in its own namespace. To
stop a server, `InFlight.stop_admitting` is called, and then no request may be in flight.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .request_errors import Overloaded, Stopping

SHARED_MEMORY = Path("/dev/shm")
PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Variable with a prefix for the files in shared memory, so that they can be removed later."""
FORMAT = 5
"""Version of the layout of the file. While a pipeline is replaced, its old steps and its new ones
may have different versions, and then use different files."""
SLOTS = 64
"""Maximum number of processes of a pipeline that count."""
PLACES = 4096
SLOT_BITS = 48
"""Requests of a slot have numbers, and places for the last one answered: a ticket counts once."""
EPOCHS = 64
EPOCH_NS = 50_000_000
"""Requests are counted by epochs of at least this duration. Requests of an epoch count as lost once
one that was forwarded two epochs later is answered: Triton has kept no order between steps since
25.06, but the core takes requests from its queue in order."""

_KEY, _CLOSED_AT, _USED, _HEADER = slice(0, 2), 2, 3, 4
_HOLDER, _WAITING, _WAITING_ROWS, _ACKNOWLEDGED = range(4)
_SENT_EPOCH, _DONE_EPOCH, _DONE_ROWS, _DONE_AT, _NEWEST, _SENT_ROWS = range(4, 10)
_CELLS = 10  # of each epoch: its number, its requests, their rows
_SLOT = _CELLS + 3 * EPOCHS
_TICKET = struct.Struct("<3q")


class Load(NamedTuple):
    """Requests in flight and their rows: all of them, those in the core, and rows that left it."""

    requests: int
    rows: int
    core_requests: int
    core_rows: int
    left_rows: int


class InFlight:
    """Counts shared by all processes of one pipeline on one server.

    Each process writes words of its own slot only: preprocess adds requests to their epoch, and
    postprocess subtracts them. A count is the sum over the slots.

    Attributes:
        slot: Slot of this process.
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
            for slot in range(SLOTS):
                self.slot, self._own = slot, self._slots[slot * _SLOT :][:_SLOT]
                holder = self._own[_HOLDER]
                if not holder or not Path(f"/proc/{holder}").exists():
                    self._words[_USED] = max(self._words[_USED], slot + 1)
                    self._own[_WAITING] = self._own[_WAITING_ROWS] = self._own[_ACKNOWLEDGED] = 0
                    self._own[_HOLDER] = os.getpid()
                    break
            else:
                raise RuntimeError(f"a pipeline has at most {SLOTS} instances of its steps")
        self._key, self._epoch_at = bytes(self._words[_KEY]), 0

    @classmethod
    def of_server(cls, pid: int, prefix: str = "") -> list[InFlight]:
        """Return the counts of each pipeline of the server with this process id, to be read.

        `prefix` is the one in the server's environment, if it differs from this process.
        """
        name = f"{prefix or _prefix()}in_flight.{FORMAT}.{_identify(pid)}.*"
        found = []
        for path in sorted(SHARED_MEMORY.glob(name)):
            counts = cls.__new__(cls)
            counts._open(path)
            found.append(counts)
        return found

    def _open(self, path: Path) -> None:
        self.path = path
        path.touch(0o600)
        with path.open("r+b") as file:
            os.ftruncate(file.fileno(), 8 * (_HEADER + SLOTS * (_SLOT + PLACES)))
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._slots = self._words[_HEADER : _HEADER + SLOTS * _SLOT]
        self._places = self._words[_HEADER + SLOTS * _SLOT :]
        self._columns: list[Any] = []
        self._viewed = 0  # slots

    def _words_of_slots(self) -> list[Any]:
        """Return the same word of all slots in use, for each word of a slot."""
        used = self._words[_USED] or 1
        if self._viewed != used:
            slots = self._slots[: used * _SLOT]
            self._columns, self._viewed = [slots[word::_SLOT] for word in range(_SLOT)], used
        return self._columns

    def admit(self, rows: int, payload: bytes = b"") -> tuple[int, int, int, int]:
        """Count a request and its model rows as forwarded to the core.

        Returns:
            The ticket: epoch, rows, the slot and number of the request, and a message
            authentication code of these and the payload, which only this server makes.
        """
        is_newest = self._own[_SENT_EPOCH] == max(self._words_of_slots()[_SENT_EPOCH])
        if not is_newest or time.monotonic_ns() - self._epoch_at > EPOCH_NS:
            self.start_epoch(int(is_newest), EPOCHS // 2)
        epoch = self._own[_SENT_EPOCH]
        self._count(epoch, 1, rows)
        self._own[_NEWEST] += 1
        self._own[_SENT_ROWS] += rows
        numbers = epoch, rows, self.slot << SLOT_BITS | self._own[_NEWEST]
        return *numbers, self._make_mac(*numbers, payload)

    def start_epoch(self, later: int, limit: int = EPOCHS - 2) -> int:
        """Begin a later epoch, at most `limit` after that of the last answer, and return it."""
        columns = self._words_of_slots()
        newest, done = max(columns[_SENT_EPOCH]), max(columns[_DONE_EPOCH])
        self._own[_SENT_EPOCH] = newest + (later if newest + later - done <= limit else 0)
        self._epoch_at = time.monotonic_ns()
        return self._own[_SENT_EPOCH]

    def is_valid(self, ticket: Sequence[int], payload: bytes = b"") -> bool:
        """Whether this server made the ticket with this payload."""
        epoch, rows, name, mac = ticket
        return mac == self._make_mac(epoch, rows, name, payload)

    def is_awaited(self, ticket: Sequence[int], rows: int) -> bool:
        """Whether a valid ticket has this number of model rows, and is not answered yet."""
        return ticket[1] == rows and self._places[_find_place(ticket[2])] < ticket[2]

    def done(self, ticket: Sequence[int]) -> None:
        """Count a request with a valid ticket as answered."""
        epoch, rows, name, _ = ticket
        place = _find_place(name)
        if self._places[place] >= name:
            return
        self._places[place] = name
        self._count(epoch, -1, -rows)
        # In this order: who reads the rows must find their time and their epoch.
        self._own[_DONE_EPOCH] = max(self._own[_DONE_EPOCH], epoch)
        self._own[_DONE_AT] = time.monotonic_ns()
        self._own[_DONE_ROWS] += rows

    def wait(self, requests: int, rows: int) -> None:
        """Add to the requests and rows of this process that wait for the core."""
        self._own[_WAITING] += requests
        self._own[_WAITING_ROWS] += rows

    def acknowledge(self, slot: int, number: int) -> None:
        """Note that the chunks of a generation core have arrived up to `number`."""
        self._words_of_slots()[_ACKNOWLEDGED][slot] = number

    def acknowledged(self) -> int:
        """Return the number of the last chunk of this process that has arrived, or 0."""
        return self._own[_ACKNOWLEDGED]

    def load(self) -> Load:
        """Return what is in flight, without the requests that are known to be lost."""
        columns, requests, rows = self._words_of_slots(), 0, 0
        newest, done = max(columns[_SENT_EPOCH]), max(columns[_DONE_EPOCH])
        for epoch in range(max(done - 1, newest - EPOCHS + 1, 1), newest + 1):
            cell = _CELLS + 3 * (epoch % EPOCHS)
            for each, slot_requests, slot_rows in zip(*columns[cell : cell + 3], strict=True):
                if each == epoch:
                    requests, rows = requests + slot_requests, rows + slot_rows
        waiting, waiting_rows = sum(columns[_WAITING]), sum(columns[_WAITING_ROWS])
        left = sum(columns[_SENT_ROWS]) - rows
        return Load(requests + waiting, rows + waiting_rows, requests, rows, left)

    def answered(self) -> tuple[int, float, int]:
        """Return the rows answered so far, and the time and newest epoch of the answers."""
        columns = self._words_of_slots()
        return sum(columns[_DONE_ROWS]), max(columns[_DONE_AT]) / 1e9, max(columns[_DONE_EPOCH])

    def stop_admitting(self) -> None:
        """Make preprocess reject all further requests."""
        self._words[_CLOSED_AT] = time.monotonic_ns()

    @property
    def closed_at(self) -> float:
        """Time of `stop_admitting`, by `time.monotonic`; 0 before."""
        return self._words[_CLOSED_AT] / 1e9

    def _count(self, epoch: int, requests: int, rows: int) -> None:
        own, cell = self._own, _CELLS + 3 * (epoch % EPOCHS)
        if own[cell] < epoch:
            own[cell + 1] = own[cell + 2] = 0
            own[cell] = epoch
        if own[cell] == epoch:  # otherwise all of the epoch is forgotten
            own[cell + 1] += requests
            own[cell + 2] += rows

    def _make_mac(self, epoch: int, rows: int, name: int, payload: bytes) -> int:
        data = _TICKET.pack(epoch, rows, name) + payload
        digest = hashlib.blake2b(data, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _find_place(name: int) -> int:
    return (name >> SLOT_BITS) * PLACES + name % PLACES


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


BUDGET_S = 0.25
"""Seconds of work that the core holds at a time."""
SILENCE_S = 0.25
"""Seconds without an answer after which a request is forwarded as a probe."""
MIN_SILENCE_S = 0.02
"""Seconds without an answer after which probes are forwarded if nearly all requests are lost. Only
requests that have waited for longer go with a probe: those of clients that leave at once are known
to be canceled by then, and cost no computation."""
DEADLINE_SHARE = 0.7
"""Share of a request's time that it may wait. The measured rate may be a little too high, and a
result that comes too late wastes the work for all clients."""
MIN_REQUESTS = 8
"""Number of requests that may always be in flight: one call of the client sends this many."""
HALF_LIFE_S = 1.0
"""Seconds after which answers have half of their weight in the rate."""
SHUTDOWN_GRACE_S = 0.05
"""Seconds after the stop signal in which requests are still admitted: they were sent before it."""
MIN_RETRY_MS = 20
POLL_S = 0.002
"""Seconds between two looks at the counts while requests wait."""


class Queued(NamedTuple):
    """A request that waits; more than `proof` answered rows show that the core works."""

    job: Any
    since: float
    limit_s: float
    proof: int


class FlowControl:
    """Flow control of one preprocess instance, by the settings of its step.

    A job has the attributes `request`, `rows` (the estimated number of model rows), `left_s` (the
    seconds until the deadline, or None) and `sender`, which is set if the job waits.

    Args:
        settings: Settings of the step.
        make: Function that makes the responses of jobs for the core; it calls `admit` for each of
            them. It returns pairs of a job and its response or error, in the order in which to send
            them. Only one thread calls it at a time.
        send: Function that sends the response or error of a job that waited.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        make: Callable[[list[Any]], list[tuple[Any, Any]]],
        send: Callable[[Any, Any], None],
    ) -> None:
        self._counts, self._make, self._send = InFlight(settings["pipeline"]), make, send
        self.admit = self._counts.admit
        self._max_requests: int = settings["max_requests"]
        self._max_wait_s = settings["max_wait_ms"] / 1e3
        self._silence_s: float = min(SILENCE_S, self._max_wait_s / 2)
        self._core_rows: int = settings["core_rows"]
        self._began_at = self._ended_at = self._busy_since = 0.0
        self._forwarded_at = self._probed_at = 0.0
        # Rows that left the core while requests waited, those of them that were answered, and the
        # seconds of that. The others were lost, because their clients left.
        self._left_rows, self._answered_rows, self._measured_s = 0.0, 0.0, 0.0
        self._gap_s = self._gap_at = 0.0  # the longest time between two answers lately
        self._left, self._answered, self._measured_at, self._probed = 0, 0, 0.0, 0
        # Requests whose wait is known to be short enough, and those that came later.
        self._accepted: deque[Queued] = deque()
        self._undecided: deque[Queued] = deque()
        self._probes: deque[tuple[int, float]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, jobs: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return the jobs that need not wait, as `make` does. Others may be rejected for them."""
        began_at, self._began_at = self._began_at, time.monotonic()
        closed_at, grace_ends_at = self._counts.closed_at, self._began_at - SHUTDOWN_GRACE_S
        # Requests that waited while the previous ones were processed were sent before, too.
        if 0 < closed_at < grace_ends_at and not began_at <= closed_at < self._ended_at:
            return self._take_at_stop(jobs)
        with self._changed:
            now, load, forwarded = time.monotonic(), self._counts.load(), list[Any]()
            answered, answered_at, _ = self._counts.answered()
            if not load.requests or now - max(answered_at, self._forwarded_at) > self._silence_s:
                self._busy_since = now
            (places, room), core_rows = self._room(load), load.core_rows
            for job in jobs:
                if not self._accepted and not self._undecided:
                    if places > 0 and room > 0:
                        places, room = places - 1, room - job.rows
                        core_rows += job.rows
                        forwarded.append(job)
                        continue
                    self._left, self._answered = load.left_rows, answered
                    self._measured_at = max(answered_at, self._busy_since)
                    self._changed.notify()
                limit_s = min(self._max_wait_s, DEADLINE_SHARE * (job.left_s or math.inf))
                proof = answered + min(self._core_rows, core_rows)
                self._undecided.append(Queued(job, now, limit_s, proof))
                self._counts.wait(1, job.rows)
                job.sender = job.request.get_response_sender()
            results = self._forward(forwarded)
            beyond = load.requests + len(jobs) - self._max_requests - MIN_REQUESTS
            for _ in range(min(beyond, len(self._undecided) - MIN_REQUESTS)):
                queued = self._undecided[-MIN_REQUESTS - 1]
                del self._undecided[-MIN_REQUESTS - 1]
                results.append(self._reject(queued, queued.limit_s))
            self._ended_at = time.monotonic()
        return results

    def _take_at_stop(self, jobs: Sequence[Any]) -> list[tuple[Any, Any]]:
        with self._changed:
            now, answered_at = time.monotonic(), self._counts.answered()[1]
            # Not since the last forwarded request: clients of those that waited may have left, too.
            silent_s = now - max(answered_at, self._probed_at, self._counts.closed_at)
            probe = list[Any]()
            if self._counts.load().core_requests and silent_s > self._silence_s:
                self._probed_at = now
                self._probes.append((self._counts.start_epoch(2), now))
                probe = [jobs[0]]
            return self._forward(probe) + [(job, Stopping()) for job in jobs[len(probe) :]]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._accepted and not self._undecided:
                    self._changed.wait()
                results = self._look(time.monotonic())
            for job, result in results:
                # Triton may have dropped a request whose client has left; the others must continue.
                with contextlib.suppress(Exception):
                    self._send(job, result)
            time.sleep(POLL_S)

    def _look(self, now: float) -> list[tuple[Any, Any]]:
        """Return the jobs whose wait is over, as `make` does."""
        load, (answered, answered_at, epoch) = self._counts.load(), self._counts.answered()
        self._measure(load.left_rows, answered, answered_at, epoch)
        results, forwarded = list[tuple[Any, Any]](), list[Any]()
        requests = load.requests - len(self._undecided)
        rows = load.rows - sum(queued.job.rows for queued in self._undecided)
        while self._undecided and answered > self._undecided[0].proof:
            queued = self._undecided.popleft()
            wait_s = now - queued.since + rows * self._measured_s / self._left_rows
            is_late = requests >= MIN_REQUESTS and wait_s > queued.limit_s
            if is_late or requests >= self._max_requests:
                results.append(self._reject(queued, wait_s))
            else:
                self._accepted.append(queued)
                requests, rows = requests + 1, rows + queued.job.rows
        places, room = self._room(load)
        silent_s = now - max(answered_at, self._forwarded_at)
        waiting = self._undecided or self._accepted
        if waiting and (places <= 0 or room <= 0) and silent_s > self._max_silence_s():
            self._probes.append((self._counts.start_epoch(2), now))
            forwarded.append(waiting.pop().job)
            forwarded += self._take_oldest(now, now - answered_at)
            self._probed += 1
        for queue in (self._accepted, self._undecided):
            while queue:
                waited_s = now - queue[0].since
                if waited_s > queue[0].limit_s:
                    results.append(self._reject(queue.popleft(), waited_s))
                elif places > 0 and room > 0:
                    places, room = places - 1, room - queue[0].job.rows
                    forwarded.append(queue.popleft().job)
                else:
                    break
        for job in forwarded:
            self._counts.wait(-1, -job.rows)
        return results + self._forward(forwarded)

    def _max_silence_s(self) -> float:
        """Return the seconds without an answer after which the core gets a probe."""
        if self._left_rows - self._answered_rows < 1:
            return self._silence_s
        # The more of the rows are lost, the earlier a silence means that all of them are.
        share = self._answered_rows / self._left_rows
        first_s = max(self._silence_s * share, MIN_SILENCE_S)
        return min(self._silence_s, first_s * 2.0 ** min(self._probed, 8))

    def _take_oldest(self, now: float, silent_s: float) -> list[Any]:
        """Return the jobs to forward with a probe, if the core is silent for unusually long.

        After a silence that is longer than any between two answers lately, they are as many rows as
        were lost lately. After twice that time they are more with each probe without an answer.
        """
        rows, taken = 0.0, list[Any]()
        if silent_s > self._gap_s:
            rows = self._left_rows - self._answered_rows
        if silent_s > 2 * self._gap_s > 0:
            rows = max(rows, min(2**self._probed - 1, 2 * self._core_rows))
        for queue in (self._accepted, self._undecided):
            while queue and rows >= 1 and now - queue[0].since > MIN_SILENCE_S:
                rows -= queue[0].job.rows
                taken.append(queue.popleft().job)
        return taken

    def _measure(self, left: int, answered: int, answered_at: float, epoch: int) -> None:
        """Add the rows that left the core since the last call to the rates."""
        while self._probes and self._probes[0][0] <= epoch:  # the core was idle before the probe
            self._measured_at = max(self._measured_at, self._probes.popleft()[1])
        if answered > self._answered:
            taken_s = max(answered_at - self._measured_at, 0.0)
            weight = 0.5 ** (taken_s / HALF_LIFE_S)
            new = answered - self._answered
            self._left_rows = weight * self._left_rows + max(left - self._left, new)
            self._answered_rows = weight * self._answered_rows + new
            self._measured_s = weight * self._measured_s + taken_s
            age_s = max(answered_at - self._gap_at, 0.0)
            self._gap_s = max(0.5 ** (age_s / HALF_LIFE_S) * self._gap_s, taken_s)
            self._gap_at = answered_at
            self._left, self._answered, self._measured_at = left, answered, answered_at
            self._probed = 0

    def _room(self, load: Load) -> tuple[int, float]:
        """Return the numbers of requests and of rows that the core may get now."""
        rate = self._answered_rows / self._measured_s if self._measured_s else 0.0
        budget = max(BUDGET_S * rate, 2 * self._core_rows)
        return self._max_requests - load.core_requests, budget - load.core_rows

    def _forward(self, jobs: list[Any]) -> list[tuple[Any, Any]]:
        if not jobs:
            return []
        self._forwarded_at = time.monotonic()
        try:
            return self._make(jobs)
        except Exception as error:
            return [(job, error) for job in jobs]

    def _reject(self, queued: Queued, wait_s: float) -> tuple[Any, Overloaded]:
        """Return a job that must not wait as long as `wait_s`, with its error."""
        self._counts.wait(-1, -queued.job.rows)
        why, field = f"The limit of {self._max_requests} requests in flight is reached", "in_flight"
        if wait_s > (limit_s := queued.limit_s):
            by = "" if limit_s == self._max_wait_s else ", by the deadline of the request"
            waits = f"The request would wait for {1e3 * wait_s:.0f} ms"
            why, field = f"{waits}; the limit is {1e3 * limit_s:.0f} ms{by}", "backlog_ms"
        again_ms = max(1e3 * (wait_s - limit_s / 2), MIN_RETRY_MS)
        remedy = f"Try again in {again_ms:.0f} ms, or raise serving.queue.max_{field}"
        return queued.job, Overloaded(f"{why}. {remedy} in the pipeline.", again_ms)
