"""Which requests one preprocess instance lets into the pipeline, and why it refuses the others.

Triton's own queue limits are not used: in its dynamic batcher any queue policy (a size or a
timeout) loses wake-ups, and a request then waits up to 500 ms beside an idle model.
"""

from __future__ import annotations

import time

from .faults import Overloaded, Stopping
from .in_flight import InFlight, Ticket

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
