"""Requests that wait in preprocess while the core has enough to do, so that they can still leave.

Once a request is in the core's queue it is computed, whether or not anybody waits for the answer.
So the core is given work for a short while only, and the rest waits here: a request whose sender
has left, or whose time is over, goes out unanswered by the core.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .faults import Overloaded
from .in_flight import InFlight
from .stub_io import error_response, send

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
        given_rows = counts.rows_in_core()
        if counts.departed_at > self._departed_at:
            self._departed_at, self._lost_rows, self._windows = counts.departed_at, 0, 1
        idle_s = now - max(self._departed_at, self._given_at)
        if given_rows > self._lost_rows and idle_s > max(MIN_PATIENCE_S, window_rows * row_s):
            if self._lost_rows:
                self._windows = min(2 * self._windows, MAX_WINDOWS)
            self._lost_rows = given_rows
        return self._windows * window_rows - (given_rows - self._lost_rows)

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
