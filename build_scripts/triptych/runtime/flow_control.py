"""Flow control ``triptych``: which requests are admitted, and how much work the core gets at once.

**Admission.** Preprocess rejects a request with UNAVAILABLE and a retry hint if

- ``serving.queue.max_in_flight`` requests are in flight,
- the requests in flight take longer than ``serving.queue.max_backlog_ms``, or longer than 70 % of
  the time that the request's own deadline leaves, at the measured rate, or
- the server is stopping.

At least `MIN_REQUESTS` requests are admitted whatever the rate. The queue limits of Triton's
dynamic batcher are not used: with any queue policy it loses wake-ups, and a request then waits up
to 500 ms beside an idle model.

**Backlog.** Triton does not tell a first step that a client has left. It checks that only when it
schedules the next step, and the core's queue then drops the request. Preprocess therefore forwards
about 250 ms of work at a time (`WINDOW_S`; at least two batches for each core instance). The other
requests wait in preprocess, where those that have expired are dropped.

**Counts.** `in_flight` counts the forwarded requests in shared memory, and forgets those whose
clients left. A request that is sent to a step itself has no ticket: it is answered, not counted
and not limited.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .in_flight import InFlight, Ticket
from .request_errors import Overloaded, Stopping
from .triton_io import error_response, send

MIN_REQUESTS = 8
"""Number of requests that may always be in flight: one call of the client sends this many."""

RATE_VALID_UP_TO = 2.0
"""Multiple of the measured number of rows up to which the rate is valid. Additional rows may form
larger batches, which take less time per row, so they add no time until that is measured."""

DEADLINE_SHARE = 0.7
"""Share of a request's remaining time that it may wait behind other requests. The measured rate may
be a little too high, and a result that comes too late wastes the work for all clients."""

SHUTDOWN_GRACE_S = 0.05
"""Seconds after the stop signal in which requests are still admitted: they were sent before it."""

MIN_HINT_MS = 20


class Admission:
    """Admission of requests, and the count of those admitted.

    Args:
        in_flight: Counts of the pipeline.
        max_requests: Maximum number of requests in flight.
        max_wait_s: Maximum time that the requests in flight may take at the measured rate.
        window_rows: Minimum number of rows that the core holds while requests wait.

    Attributes:
        slot: Slot of `in_flight` that belongs to this instance.
    """

    def __init__(
        self, in_flight: InFlight, max_requests: int, max_wait_s: float, window_rows: int = 0
    ) -> None:
        self._in_flight = in_flight
        self._window_rows = window_rows
        self.slot = in_flight.take_slot()
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._began_at = self._ended_at = 0.0
        self._requests = 0
        self._rows = self._rows_in_core = self._rows_per_request = 0.0
        self._row_s = self._known_rows = 0.0

    def begin(self) -> None:
        """Read the counts once for all requests that are checked together."""
        self._began_at, before, ended_at = time.monotonic(), self._began_at, self._ended_at
        counts = self._in_flight
        self._closed = False
        if closed_at := counts.closed_at:
            # Requests that waited while the previous ones were processed were also sent before.
            waited = before <= closed_at < ended_at
            self._closed = not waited and self._began_at > closed_at + SHUTDOWN_GRACE_S
        self._requests, self._rows, self._rows_in_core = counts.load(self._began_at)
        self._rows_per_request = counts.rows_per_request()
        self._row_s, self._known_rows = counts.row_s, RATE_VALID_UP_TO * counts.depth

    def check(self, left_s: float | None) -> None:
        """Admit the next request.

        Args:
            left_s: Seconds until the deadline of the request; None if it has none.

        Raises:
            Overloaded: A limit is reached.
            Stopping: The server is stopping.
        """
        if self._closed:
            raise Stopping
        own_s = None if left_s is None else DEADLINE_SHARE * left_s
        limit_s = self._max_wait_s if own_s is None else min(self._max_wait_s, own_s)
        wait_s = self._wait_s()
        late = self._requests >= MIN_REQUESTS and wait_s > self._max_wait_s
        late = late or (self._requests > 0 and own_s is not None and wait_s > own_s)
        if late or self._requests >= self._max_requests:
            hint_ms = max(1e3 * (wait_s - 0.5 * limit_s), MIN_HINT_MS)
            again = f"Try again in {hint_ms:.0f} ms"
            if late:
                whose = ", by the deadline of the request" if limit_s == own_s else ""
                raise Overloaded(
                    f"The requests in flight take {1e3 * wait_s:.0f} ms; the limit is "
                    f"{1e3 * limit_s:.0f} ms{whose}. {again}, or raise "
                    "serving.queue.max_backlog_ms in the pipeline.",
                    hint_ms,
                )
            raise Overloaded(
                f"The limit of {self._max_requests} requests in flight is reached. {again}, or "
                "raise serving.queue.max_in_flight in the pipeline.",
                hint_ms,
            )
        self._requests += 1
        self._rows += self._rows_per_request
        self._rows_in_core += self._rows_per_request

    def admit(self, rows: int, payload: bytes = b"") -> Ticket:
        """Return the ticket of an admitted request with this number of model rows."""
        return self._in_flight.admit(self.slot, rows, payload)

    def end(self) -> None:
        """Note that the requests that were checked together have been forwarded."""
        self._ended_at = time.monotonic()

    def _wait_s(self) -> float:
        """Return the seconds that all rows in flight take; rows beyond the known depth add none."""
        depth = max(self._rows_in_core, min(self._rows, self._window_rows), 1.0)
        known = min(self._known_rows / depth, 1.0)
        return max(self._rows, 0.0) * self._row_s * known


WINDOW_S = 0.25
"""Seconds of work that the core holds at a time, at the measured rate."""
WINDOW_BATCHES = 2
"""Minimum number of largest batches per core instance: one is computed, one is queued."""
RATE_S = 0.05
"""Seconds over which the rate is estimated until it has been measured."""
MAX_WINDOWS = 8
"""Number of windows to forward once the core is silent. The clients of all waiting requests may
have left, and Triton then drops the requests; a core without CPU for a while looks the same."""
POLL_S = 0.002
"""Seconds between two checks for free capacity while requests wait."""


class Ready(NamedTuple):
    """A request whose model rows are ready.

    Attributes:
        request: Triton's request.
        rows: Number of model rows.
        left_s: Seconds until the deadline; None if there is none.
        respond: Function that makes the response for the core, with a ticket.
    """

    request: Any
    rows: int
    left_s: float | None
    respond: Callable[[], Any]


class QueuedRequest(NamedTuple):
    """A request that waits in preprocess.

    Attributes:
        sender: Triton's sender of its one response.
        since: Start of the wait, by `time.monotonic`.
        until: Deadline, by `time.monotonic`; infinite if there is none.
    """

    sender: Any
    ready: Ready
    since: float
    until: float


class Backlog:
    """The waiting requests of one preprocess instance, first in, first out.

    Args:
        in_flight: Counts of the pipeline.
        slot: Slot of this instance in `in_flight`.
        batch_rows: Number of rows that the core's instances compute at once.
        max_wait_s: Maximum wait; afterwards a request is rejected.
    """

    def __init__(
        self,
        in_flight: InFlight,
        slot: int,
        *,
        batch_rows: int,
        max_wait_s: float,
    ) -> None:
        self._in_flight = in_flight
        self._slot = slot
        self._min_rows = WINDOW_BATCHES * batch_rows
        self._max_wait_s = max_wait_s
        self._waiting: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._rate_at, self._rate_rows, self._rate = 0.0, 0, 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def take(
        self, requests: Sequence[tuple[Any, int, float | None, Callable[[], Any]]]
    ) -> list[Any]:
        """Return the response of each request for the core at once; None for one that waits.

        Each request has the fields of `Ready`.

        Only one thread makes responses at a time.
        """
        responses: list[Any] = []
        now = time.monotonic()
        with self._changed:
            room = 0.0
            if not self._waiting:
                room = self._window_rows(now) - self._in_flight.load(now).rows_in_core
            for ready in map(Ready._make, requests):
                if room > 0 and not self._waiting:
                    room -= ready.rows
                    responses.append(self._respond(ready))
                    continue
                until = now + (float("inf") if ready.left_s is None else ready.left_s)
                sender = ready.request.get_response_sender()
                self._waiting.append(QueuedRequest(sender, ready, now, until))
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
                # Triton may have dropped a request whose client has left; the others must continue.
                with contextlib.suppress(Exception):
                    send(sender, response)
            time.sleep(POLL_S)

    def _release(self) -> Iterator[tuple[Any, Any]]:
        """Yield sender and response of each request whose wait is over."""
        now, counts = time.monotonic(), self._in_flight
        is_silent = counts.is_silent(now)
        windows = MAX_WINDOWS if is_silent else 1
        room = windows * self._window_rows(now) - counts.load(now).rows_in_core
        while self._waiting:
            queued = self._waiting[0]
            if now > queued.until or (room > 0 and now - queued.since > self._max_wait_s):
                response = self._make_rejection(queued, now)
            elif room <= 0:
                return
            else:
                room -= queued.ready.rows
                response = self._respond(queued.ready)
            self._waiting.popleft()
            counts.wait(self._slot, -1, -queued.ready.rows)
            yield queued.sender, response
        if is_silent:  # their clients have probably left as well
            counts.forget(self._slot)

    def _window_rows(self, now: float) -> float:
        """Return the rows that the core may hold; requests are forwarded while it holds fewer."""
        row_s = self._in_flight.row_s
        rows_per_s = 1 / row_s if row_s else self._recent_rows_per_s(now)
        return max(WINDOW_S * rows_per_s, self._min_rows)

    def _recent_rows_per_s(self, now: float) -> float:
        """Return the recent rows per second, a lower bound before the pipeline is busy."""
        settled = self._in_flight.rows_settled()
        if now - self._rate_at >= RATE_S:
            self._rate = (settled - self._rate_rows) / (now - self._rate_at)
            self._rate_at, self._rate_rows = now, settled
        return self._rate

    def _respond(self, ready: Ready) -> Any:
        try:
            return ready.respond()
        except Exception as error:
            return error_response(error)

    def _make_rejection(self, queued: QueuedRequest, now: float) -> Any:
        again_ms = 500 * self._max_wait_s
        return error_response(
            Overloaded(
                f"The request waited for {1e3 * (now - queued.since):.0f} ms; the limit is "
                f"{1e3 * self._max_wait_s:.0f} ms, or the deadline of the request. Try again in "
                f"{again_ms:.0f} ms, or raise serving.queue.max_backlog_ms in the pipeline.",
                again_ms,
            )
        )


class FlowControl:
    """Admission and backlog of one preprocess instance, by the settings of its step."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        in_flight, max_wait_s = InFlight(settings["pipeline"]), settings["max_wait_ms"] / 1e3
        batch_rows = settings["core_rows"]
        self.admission = Admission(
            in_flight, settings["max_requests"], max_wait_s, WINDOW_BATCHES * batch_rows
        )
        self.backlog = Backlog(
            in_flight, self.admission.slot, batch_rows=batch_rows, max_wait_s=max_wait_s
        )
