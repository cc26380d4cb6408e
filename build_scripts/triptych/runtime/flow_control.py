"""Flow control of preprocess: which requests are admitted, and how much work the core gets at once.

**Admission.** A request is rejected with UNAVAILABLE and a retry hint if

- ``serving.queue.max_in_flight`` requests are in flight,
- the requests in flight take longer than ``serving.queue.max_backlog_ms``, or longer than 70 % of
  the time that the request's own deadline leaves, at the measured rate, or
- the server is stopping.

At least `MIN_REQUESTS` requests are admitted whatever the rate. The queue limits of Triton's
dynamic batcher are not used: with any queue policy it loses wake-ups, and a request then waits up
to 500 ms beside an idle model.

**Backlog.** Triton cannot cancel a request once it is in the core's queue. Preprocess therefore
forwards about 250 ms of work at a time (`WINDOW_S`; at least two batches for each core instance).
The other requests wait in preprocess, where those that were canceled or have expired are dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .in_flight import InFlight, Ticket
from .request_errors import Overloaded, Stopping
from .triton_io import error_response, send

MIN_REQUESTS = 8
"""So many may be under way however slow the pipeline is: what one call of the client sends."""

KNOWN_DEPTHS = 2.0
"""The rate holds for up to so many times the rows that it was measured with. More of them may make
larger batches, which take less time a row: they count as no time more until that is measured."""

DEADLINE_SHARE = 0.7
"""Of the time until its sender gives up a request may spend so much behind others: the rate that
was measured may be a little too high, and work that nobody waits for is lost to everybody."""

PATIENCE_S = 1.0
"""A full pipeline without any progress for so long has lost what it counts: let one pass."""

LAST_CALL_S = 0.05
"""What reaches preprocess so soon after the server was told to stop had been sent before."""

MIN_HINT_MS = 20


class Admission:
    """Decides on requests, and counts those it lets in.

    Args:
        in_flight: counts of the pipeline.
        most_requests: that may be under way.
        longest_wait_s: that the requests under way may take, at the rate measured.

    Attributes:
        slot: of `in_flight` that this instance counts in.
    """

    def __init__(self, in_flight: InFlight, most_requests: int, longest_wait_s: float) -> None:
        self._in_flight = in_flight
        self.slot = in_flight.take_slot()
        self._most = most_requests
        self._longest_s = longest_wait_s
        self._progress_at = time.monotonic()
        self._began_at = self._ended_at = 0.0
        self._requests = 0
        self._rows = self._rows_in_core = self._rows_a_request = 0.0
        self._row_s = self._known_rows = 0.0

    def begin(self) -> None:
        """Look at the counts once for all requests that are decided on together."""
        self._began_at, before, ended_at = time.monotonic(), self._began_at, self._ended_at
        counts = self._in_flight
        self._closed = False
        if closed_at := counts.closed_at:
            # What waited while the requests before were being worked on had been sent before, too.
            waited = before <= closed_at < ended_at
            self._closed = not waited and self._began_at > closed_at + LAST_CALL_S
        self._requests = counts.under_way()
        self._rows, self._rows_in_core = counts.rows_under_way(), counts.rows_in_core()
        self._rows_a_request = counts.rows_a_request()
        self._row_s, self._known_rows = counts.row_s, KNOWN_DEPTHS * counts.depth
        idle = self._requests <= 0
        self._progress_at = self._began_at if idle else max(self._progress_at, counts.departed_at)

    def check(self, left_s: float | None) -> None:
        """Let the next request in.

        Args:
            left_s: until its sender gives up; None where that is not known.

        Raises:
            Overloaded: there is no room for it.
            Stopping: the server is about to stop.
        """
        if self._closed:
            raise Stopping
        own_s = None if left_s is None else DEADLINE_SHARE * left_s
        limit_s = self._longest_s if own_s is None else min(self._longest_s, own_s)
        wait_s = self._wait_s()
        late = self._requests >= MIN_REQUESTS and wait_s > self._longest_s
        late = late or (self._requests > 0 and own_s is not None and wait_s > own_s)
        if (late or self._requests >= self._most) and not self._lost_count():
            hint_ms = max(1e3 * (wait_s - 0.5 * limit_s), MIN_HINT_MS)
            again = f"Try again in {hint_ms:.0f} ms"
            if late:
                whose = ", by the deadline of the request" if limit_s == own_s else ""
                raise Overloaded(
                    f"The requests under way take {1e3 * wait_s:.0f} ms; the limit is "
                    f"{1e3 * limit_s:.0f} ms{whose}. {again}, or raise "
                    "serving.queue.max_backlog_ms in the pipeline.",
                    hint_ms,
                )
            raise Overloaded(
                f"The pipeline takes at most {self._most} requests at a time. {again}, or raise "
                "serving.queue.max_in_flight in the pipeline.",
                hint_ms,
            )
        self._requests += 1
        self._rows += self._rows_a_request
        self._rows_in_core += self._rows_a_request

    def admit(self, rows: int) -> Ticket:
        """The ticket of a request that was let in, with so many rows of the core."""
        return self._in_flight.admit(self.slot, rows)

    def end(self) -> None:
        """All requests that were decided on together are on their way."""
        self._ended_at = time.monotonic()

    def _wait_s(self) -> float:
        """How long all rows under way take: those beyond what is known make batches larger."""
        known = min(self._known_rows / max(self._rows_in_core, 1.0), 1.0)
        return max(self._rows, 0.0) * self._row_s * known

    def _lost_count(self) -> bool:
        """Whether nothing has moved for so long that one may pass to find out."""
        patience_s = max(PATIENCE_S, 3 * self._row_s * self._rows_a_request)
        lost = self._began_at - self._progress_at > patience_s
        if lost:
            self._progress_at = self._began_at
        return lost


WINDOW_S = 0.25
"""Work that the core is given at a time, at the rate measured."""
WINDOW_BATCHES = 2
"""And at least so many of its largest batches for each instance: one computed, one queued."""
SEEN_S = 0.05
"""Before the rate is measured, that of so many seconds stands for it."""
MAX_WINDOWS = 8
"""Who lost a window after another has left in numbers: each time twice as much is given next, up to
so many windows. But a core that only has no CPU for a while looks the same at first."""
POLL_S = 0.002
"""How often the thread looks for room, while something waits."""
MIN_PATIENCE_S = 0.25
"""When nothing was answered for so long, nor for the time that the window takes, what the core was
given is lost: its senders have left, and Triton drops a request between two steps."""


class Ready(NamedTuple):
    """A request whose core rows are made.

    Attributes:
        request: Triton's.
        rows: of the core.
        left_s: seconds until its sender gives up; None where that is not known.
        respond: makes the response that goes to the core, with a ticket.
    """

    request: Any
    rows: int
    left_s: float | None
    respond: Callable[[], Any]


class Waiting(NamedTuple):
    """One that waits.

    Attributes:
        sender: Triton's, of its one response.
        ready: the request.
        since: when it began to wait, on the clock of `time.monotonic`.
        until: when its sender gives up, likewise; infinite where that is not known.
    """

    sender: Any
    ready: Ready
    since: float
    until: float


class Backlog:
    """The waiting requests of one preprocess instance, first in, first out.

    Args:
        in_flight: counts of the pipeline.
        slot: this instance's, in `in_flight`.
        batch_rows: rows that the core's instances compute at once.
        longest_wait_s: a request that has waited for so long is refused.
    """

    def __init__(
        self,
        in_flight: InFlight,
        slot: int,
        *,
        batch_rows: int,
        longest_wait_s: float,
    ) -> None:
        self._in_flight = in_flight
        self._slot = slot
        self._least_rows = WINDOW_BATCHES * batch_rows
        self._longest_s = longest_wait_s
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._given_at = self._departed_at = 0.0
        self._lost_rows, self._windows = 0, 1
        self._seen_at, self._seen_rows, self._seen_rate = 0.0, 0, 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, requests: Sequence[Ready]) -> list[Any]:
        """The response of each request that goes to the core at once; None for one that waits.

        Responses are made by one thread at a time.
        """
        responses: list[Any] = []
        now = time.monotonic()
        with self._changed:
            room = 0.0 if self._waiting else self._room(now)
            for ready in requests:
                if room > 0 and not self._waiting:
                    room -= ready.rows
                    responses.append(self._give(ready))
                    continue
                until = now + (float("inf") if ready.left_s is None else ready.left_s)
                sender = ready.request.get_response_sender()
                self._waiting.append(Waiting(sender, ready, now, until))
                self._in_flight.wait(self._slot, 1, ready.rows)
                responses.append(None)
            if self._waiting:
                self._changed.notify()
        return responses

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                responses = list(self._release())
            for sender, response in responses:
                # Triton may have let go of a request whose sender has left: the others must go on.
                with contextlib.suppress(Exception):
                    send(sender, response)
            time.sleep(POLL_S)

    def _release(self) -> Iterator[tuple[Any, Any]]:
        """Sender and response of each request that need not wait any longer."""
        now = time.monotonic()
        room = self._room(now)
        while self._waiting:
            one = self._waiting[0]
            if _has_left(one.sender) or now > one.until:
                response = self._refusal(one, now)
            elif room <= 0:
                return
            elif now - one.since > self._longest_s:
                response = self._refusal(one, now)
            else:
                room -= one.ready.rows
                response = self._give(one.ready)
            self._waiting.popleft()
            self._in_flight.wait(self._slot, -1, -one.ready.rows)
            yield one.sender, response

    def _room(self, now: float) -> float:
        """Rows that the core may still be given; a request goes to it whole while this is > 0."""
        counts = self._in_flight
        row_s = counts.row_s
        rows_per_s = 1 / row_s if row_s else self._seen_per_s(now)
        window_rows = max(WINDOW_S * rows_per_s, self._least_rows)
        read_forwarded = counts.rows_in_core()
        if counts.departed_at > self._departed_at:
            self._departed_at, self._lost_rows, self._windows = counts.departed_at, 0, 1
        idle_s = now - max(self._departed_at, self._given_at)
        if read_forwarded > self._lost_rows and idle_s > max(MIN_PATIENCE_S, window_rows * row_s):
            if self._lost_rows:
                self._windows = min(2 * self._windows, MAX_WINDOWS)
            self._lost_rows = read_forwarded
        return self._windows * window_rows - (read_forwarded - self._lost_rows)

    def _seen_per_s(self, now: float) -> float:
        """Rows answered a second of late: what the pipeline can do at least, before it is busy."""
        settled = self._in_flight.rows_settled()
        if now - self._seen_at >= SEEN_S:
            self._seen_rate = (settled - self._seen_rows) / (now - self._seen_at)
            self._seen_at, self._seen_rows = now, settled
        return self._seen_rate

    def _give(self, ready: Ready) -> Any:
        self._given_at = time.monotonic()
        try:
            return ready.respond()
        except Exception as error:
            return error_response(error)

    def _refusal(self, one: Waiting, now: float) -> Any:
        again_ms = 500 * self._longest_s
        return error_response(
            Overloaded(
                f"The request waited for {1e3 * (now - one.since):.0f} ms; the limit is "
                f"{1e3 * self._longest_s:.0f} ms, or the time that its sender waits. Try again in "
                f"{again_ms:.0f} ms, or raise serving.queue.max_backlog_ms in the pipeline.",
                again_ms,
            )
        )


def _has_left(sender: Any) -> bool:
    """Whether nobody waits for the answer, as far as Triton tells a step of an ensemble."""
    try:
        return bool(sender.is_cancelled())
    except Exception:
        return True
