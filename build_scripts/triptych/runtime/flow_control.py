"""Flow control ``triptych``: which requests preprocess hands over to the core, and when.

Under overload a queue in order of arrival holds requests whose clients have given up, and the core
computes for nobody. Preprocess does not know the deadlines of most clients, and Triton tells a
first step of no client that has left. It sees only which of the requests that it handed over were
answered (`in_flight`). The rule needs no more:

**One batch ahead.** Requests are handed over while the core holds less than one batch for each of
its instances and one more. The others wait in preprocess, because nothing leaves the core's queue.
One of `TURNS` requests handed over is the newest. If it is lost, the core holds too much for the
deadlines, and gets less; if it and most others are answered, the core gets more again. If it is
answered within `AHEAD_S`, the core is fast and gets several batches.

**Learned age.** Of the requests that wait, those younger than a learned age go first, the oldest of
them before the others. The age is the one that best separates the answered from the lost requests
of the last `LEARNED_BATCHES`. This is the limit on the time in a queue of CoDel (Nichols and
Jacobson, ACM Queue 2012), learned from the clients in place of a constant. Without lost requests
there is no such age, and the order is that of arrival. The age keeps a distance to the youngest
lost request above it, because an answer takes time on its way to the client. If only older requests
wait, the core gets half of what it may hold, so that a new one finds room.

**Patient clients.** One of `TURNS` requests is the oldest, once it has waited for much longer than
the age, so that clients without a deadline are answered among others that give up early. If its
client has left, the core has no work with it, because Triton drops it between two steps.

**Silence.** If the core has not answered for as long as a request usually takes, the requests in it
may be lost, or the core stands still. Then the newest request is handed over, and some of those
that come later. As long as nothing is answered, this is repeated, at first each time after twice as
long, and with one request more each time, up to a batch, so that a patient client does not wait
behind hundreds whose clients have left. A core that has answered nothing yet gets one each time. A
stopping server hands over all that waits.

**Rejections.** A request is rejected with UNAVAILABLE and a time after which to retry if it cannot
be answered within its Triton timeout, has waited for ``serving.queue.max_backlog_ms``, or if more
than ``serving.queue.max_in_flight`` requests are in flight. The last is the oldest one above the
learned age, else the newest. All others wait, because a client that is refused at once
asks again at once. A server that is stopping rejects all requests but probes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .in_flight import MARKS, REORDER_S, InFlight, Ticket
from .learned_age import find_separating_age
from .rejections import Overloaded, Stopping

AHEAD_S = 0.05
"""Seconds of work that a fast core holds: much longer than preprocess takes to hand over more."""
DEADLINE_SHARE = 0.9
"""Share of a Triton timeout in which postprocess has to answer; the rest is for the way back."""
TURNS = 8
LESS, MORE = 0.8, 1.01
"""Change of what the core holds with each of the newest requests that is lost, or answered."""
MAX_LOST_SHARE = 0.2
"""Share of lost rows up to which the core gets more."""
LEARNED_BATCHES = 8
RETURN_SHARE = 0.25
"""Share of the time between a request and its answer that is left for the way to the client."""
PATIENT = 2.0
"""Age of patient requests, as a multiple of the learned age and the time in the core."""
SILENCE_S = 0.25
"""Minimum seconds without an answer after which requests may be lost."""
MAX_DOUBLINGS = 2
"""Number of times that the time between two probes is doubled."""
PROBE_MARKS = 32
"""Number of marks of a process that are kept for the probes of a stopping server."""
SHUTDOWN_GRACE_S = 0.05
"""Seconds after the stop signal in which requests are still admitted: they were sent before it."""
MIN_RETRY_MS, MAX_RETRY_MS = 20.0, 10_000.0
POLL_S = 0.005
"""Seconds between two looks at the marks while requests wait."""
EXPIRY_S = 0.02
"""Seconds between two looks for requests that wait and cannot be answered in time any more."""


class Queued(NamedTuple):
    """A request that waits; times are by `time.monotonic`.

    Attributes:
        until: Time at which its Triton timeout ends.
    """

    job: Any
    since: float
    until: float


class HandedOver(NamedTuple):
    """A request in the core.

    Attributes:
        at: Time of its hand-over, by `time.monotonic`.
        age_s: Its age then.
        was_chosen: Whether other requests had to wait.
        is_newest: Whether it was chosen as the newest one.
    """

    ticket: Ticket
    at: float
    rows: int
    age_s: float
    was_chosen: bool
    is_newest: bool

    @property
    def since(self) -> float:
        """Time of its arrival, by `time.monotonic`."""
        return self.at - self.age_s


class FlowControl:
    """Flow control of one preprocess instance, by the settings of its step.

    A job has the attributes `request`, `rows` (the estimated number of model rows), `left_s` (the
    seconds until the deadline, or None), and some that are set here: `sender` if the job waits,
    `since`, the time of its arrival, and `is_newest` (see `HandedOver`).

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
        self._marks = InFlight(settings["pipeline"], settings["core_instances"])
        self._make, self._send = make, send
        self._max_requests: int = settings["max_requests"]
        self._max_wait_s: float = (settings.get("max_wait_ms") or math.inf) / 1e3
        self._batch_rows: int = settings["core_rows"] // settings["core_instances"]
        self._is_parallel: bool = settings["core_instances"] > 1
        # Rows that the core may hold.
        self._full_rows = self._max_rows = float(settings["core_rows"] + self._batch_rows)
        self._began_at = self._ended_at = self._checked_at = 0.0
        self._waiting: list[Queued] = []  # in order of arrival
        self._handed_over: list[HandedOver] = []
        self._is_full = False  # requests had to wait at the last hand-over
        self._turn = 0
        # Ages of the last requests, each with its rows, which are negative if it was lost.
        self._outcomes: deque[tuple[float, int]] = deque()
        self._lost_share = 0.0  # of their rows
        self._limit_s = math.inf  # the learned age
        self._core_s = 0.0  # time of a request in the core
        self._answered_at = self._probed_at = 0.0
        self._probes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def admit(self, rows: int, job: Any) -> Ticket:
        """Set the mark of a job that `make` gets, and return its ticket."""
        ticket, now = self._marks.admit(rows), time.monotonic()
        if ticket.number:
            age_s = now - job.since
            handed_over = HandedOver(ticket, now, rows, age_s, self._is_full, job.is_newest)
            self._handed_over.append(handed_over)
        return ticket

    def take(self, jobs: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return the jobs that need not wait, as `make` does, and those that are rejected."""
        began_at, self._began_at = self._began_at, time.monotonic()
        closed_at, grace_ends_at = self._marks.closed_at, self._began_at - SHUTDOWN_GRACE_S
        # Requests that waited while the previous ones were processed were sent before, too.
        is_closed = 0 < closed_at < grace_ends_at and not began_at <= closed_at < self._ended_at
        with self._changed:
            now = time.monotonic()
            for job in jobs:
                job.since, job.is_newest = now, False
            if is_closed:
                self._learn()
                # Its answer proves that the others are lost, and the server need not wait for them.
                probe = list(jobs[:1]) if self._marks.requests() and self._is_silent(now) else []
                self._probed_at = now if probe else self._probed_at
                return self._forward(probe) + [(job, Stopping()) for job in jobs[len(probe) :]]
            for job in jobs:
                self._waiting.append(
                    Queued(job, now, now + DEADLINE_SHARE * (job.left_s or math.inf))
                )
                if job.left_s is not None:
                    self._checked_at = 0.0
            self._marks.wait(len(jobs), sum(job.rows for job in jobs))
            results = self._look(now)
            for queued in reversed(self._waiting):
                if queued.job.sender is not None:
                    break
                queued.job.sender = queued.job.request.get_response_sender()
            if self._waiting:  # else the thread would take the interpreter's lock for nothing
                self._changed.notify()
            self._ended_at = time.monotonic()
        return results

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                results = self._look(time.monotonic())
            for job, result in results:
                # Triton may have dropped a request whose client has left; the others must continue.
                with contextlib.suppress(Exception):
                    self._send(job, result)
            time.sleep(POLL_S)

    def _look(self, now: float) -> list[tuple[Any, Any]]:
        """Return the jobs whose wait is over, as `make` does."""
        self._learn()
        requests, rows = self._marks.in_core(self._slack_s)
        results = self._reject_late(now, rows)
        if self._marks.closed_at:
            # No more requests come, and Triton drops those whose clients have left.
            chosen = self._choose(now, math.inf)
        elif self._waiting and requests and self._is_silent(now):
            self._probes, self._probed_at = self._probes + 1, now
            chosen = self._choose_probes()
        elif self._probed_at > self._answered_at:
            chosen = self._choose_new(now)
        else:
            chosen = self._choose(now, self._max_rows - rows)
        self._is_full = bool(self._waiting)
        self._marks.wait(-len(chosen), -sum(job.rows for job in chosen))
        beyond = 0
        if self._waiting:
            beyond = requests + len(chosen) + self._marks.waiting()[0] - self._max_requests
        for _ in range(min(beyond, len(self._waiting))):
            # The client of the oldest one has most likely left, if it is above the learned age.
            queued = self._waiting.pop(0 if self._first_younger(now, self._limit_s) else -1)
            why = f"The limit of {self._max_requests} requests in flight is reached"
            results.append(self._reject(queued, why, "raise serving.queue.max_in_flight"))
        return results + self._forward(chosen)

    @property
    def _slack_s(self) -> float:
        """Seconds by which a batch may overtake another one in the core."""
        return self._core_s if self._is_parallel else 0.0

    @property
    def _free_marks(self) -> int:
        """Number of requests that may be handed over beside those that are in the core."""
        return MARKS - PROBE_MARKS - len(self._handed_over)

    def _first_younger(self, now: float, age_s: float) -> int:
        """Return the index of the oldest request that waits for at most this time."""
        return bisect_left(self._waiting, now - age_s, key=lambda queued: queued.since)

    def _choose(self, now: float, room: float) -> list[Any]:
        """Take the jobs that the core gets now, about `room` rows, out of the queue."""
        waiting, chosen = self._waiting, list[Any]()
        first = self._first_younger(now, self._limit_s)
        patient_s = PATIENT * (self._limit_s + self._core_s)
        free = self._free_marks
        while room > 0 and waiting and len(chosen) < free:
            if first >= len(waiting) and room <= self._max_rows / 2:
                break  # the others have most likely left; a new request must find room
            self._turn = (self._turn + 1) % TURNS
            index = min(first, len(waiting) - 1)
            if self._turn == 0:
                index = len(waiting) - 1
            elif self._turn == TURNS // 2 and now - waiting[0].since > patient_s:
                index = 0
            job = waiting.pop(index).job
            job.is_newest = self._turn == 0
            first -= index < first
            room -= job.rows
            chosen.append(job)
        return chosen

    def _choose_probes(self) -> list[Any]:
        """Take the newest jobs, one more each time since the last answer, up to a batch."""
        rows, chosen = 0, list[Any]()
        most = min(self._probes if self._core_s else 1, self._free_marks)
        while self._waiting and len(chosen) < most and rows < self._batch_rows:
            chosen.append(self._waiting.pop().job)
            rows += chosen[-1].rows
        return chosen

    def _choose_new(self, now: float) -> list[Any]:
        """Take jobs that came since the core was found silent, as few as it computes at once."""
        rows = sum(each.rows for each in self._handed_over if each.since >= self._probed_at)
        first, chosen = self._first_younger(now, now - self._probed_at), list[Any]()
        while len(self._waiting) > first and rows < self._batch_rows / 4:
            chosen.append(self._waiting.pop(first).job)
            rows += chosen[-1].rows
        return chosen

    def _learn(self) -> None:
        """Learn from the requests that were answered or lost since the last call."""
        answered, has_learned = self._marks.answered(), False
        if answered.at > self._answered_at:
            self._answered_at, self._probes = answered.at, 0
        lost_before = answered.newest - self._slack_s - REORDER_S
        undecided = list[HandedOver]()
        for each in self._handed_over:
            is_lost = self._marks.is_set(each.ticket)
            if is_lost and each.at >= lost_before:
                undecided.append(each)
                continue
            share = min(each.rows / self._batch_rows, 1.0)
            if not is_lost:
                core_s = self._marks.answered_at(each.ticket) - each.at
                self._core_s += (share / 2 if self._core_s else 1.0) * (core_s - self._core_s)
            if each.was_chosen:
                has_learned = True
                self._outcomes.append((each.age_s, -each.rows if is_lost else each.rows))
                if each.is_newest and each.age_s <= self._core_s / 4:
                    self._set_max_rows(None if is_lost else core_s)
        self._handed_over = undecided  # all others are decided before their marks are used again
        if has_learned:
            self._set_limit()

    def _set_max_rows(self, core_s: float | None) -> None:
        """Set how many rows the core may hold, after a new request was in it for `core_s` seconds.

        None means that the request was lost.
        """
        if core_s is None:
            self._max_rows = max(LESS * self._max_rows, self._batch_rows / 2)
        elif self._lost_share > MAX_LOST_SHARE:
            return
        elif self._max_rows < self._full_rows or core_s < AHEAD_S:
            self._max_rows *= MORE
        elif core_s > 2 * AHEAD_S:
            self._max_rows = max(LESS * self._max_rows, self._full_rows)

    def _set_limit(self) -> None:
        """Set the age that best separates the answered from the lost ones of the last requests."""
        total = sum(abs(rows) for _, rows in self._outcomes)
        while total > LEARNED_BATCHES * self._batch_rows and len(self._outcomes) > 1:
            total -= abs(self._outcomes.popleft()[1])
        lost_rows = sum(-rows for _, rows in self._outcomes if rows < 0)
        self._lost_share = lost_rows / total
        self._limit_s = find_separating_age(self._outcomes)
        lost_ages = (age_s for age_s, rows in self._outcomes if rows < 0)
        lost_s = min((age_s for age_s in lost_ages if age_s > self._limit_s), default=math.inf)
        return_s = min(RETURN_SHARE * (lost_s + self._core_s), lost_s / 2)
        self._limit_s = min(self._limit_s, lost_s - return_s)

    def _is_silent(self, now: float) -> bool:
        """Whether the core has not answered for longer than it takes for a request."""
        last = max(self._answered_at, self._probed_at, self._marks.closed_at)
        if self._handed_over:
            last = max(last, self._handed_over[0].at)
        silence_s = max(SILENCE_S, self._core_s)
        return now - last > silence_s * 2.0 ** min(self._probes, MAX_DOUBLINGS)

    def _reject_late(self, now: float, core_rows: int) -> list[tuple[Any, Any]]:
        """Reject the requests that cannot be answered in time, or have waited too long."""
        if now - self._checked_at < EXPIRY_S:
            return []
        self._checked_at, waiting, results = now, list[Queued](), list[tuple[Any, Any]]()
        for queued in self._waiting:
            wait_ms, left_ms = 1e3 * (now - queued.since), 1e3 * max(queued.until - now, 0)
            takes_ms = 1e3 * self._compute_s(core_rows + queued.job.rows)
            if left_ms <= takes_ms:
                why = f"The deadline is in {left_ms:.0f} ms, and the core needs {takes_ms:.0f} ms"
                results.append(self._reject(queued, why))
            elif wait_ms > 1e3 * self._max_wait_s:
                why = f"The request waited for {wait_ms:.0f} ms, the limit of the pipeline"
                results.append(self._reject(queued, why, "raise serving.queue.max_backlog_ms"))
            else:
                waiting.append(queued)
        self._waiting = waiting
        return results

    def _compute_s(self, rows: int) -> float:
        """Return the seconds in which the core computes rows: `_core_s` for as many as it holds."""
        return self._core_s * rows / self._max_rows

    def _forward(self, jobs: list[Any]) -> list[tuple[Any, Any]]:
        if not jobs:
            return []
        try:
            return self._make(jobs)
        except Exception as error:
            return [(job, error) for job in jobs]

    def _reject(self, queued: Queued, why: str, remedy: str = "") -> tuple[Any, Overloaded]:
        self._marks.wait(-1, -queued.job.rows)
        waiting_ms = 1e3 * self._compute_s(self._marks.waiting()[1])
        again_ms = min(max(waiting_ms, MIN_RETRY_MS), MAX_RETRY_MS)
        remedies = " or ".join(filter(None, [f"Try again in {again_ms:.0f} ms", remedy]))
        return queued.job, Overloaded(f"{why}. {remedies}.", again_ms)
