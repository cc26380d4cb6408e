"""A simulated core behind the flow control of a pipeline, and clients that ask it."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.runtime.flow_control import FlowControl, InFlight

PIPELINE = f"test-{os.getpid()}"
CORE_ROWS = 32


class Clock:
    """Stands for the monotonic clock."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


class Job(SimpleNamespace):
    """A request of one or more rows."""

    def __init__(self, rows: int = 1, left_s: float | None = None) -> None:
        super().__init__(rows=rows, left_s=left_s, sender=None)
        self.request = SimpleNamespace(get_response_sender=lambda: "sender")

    __hash__ = object.__hash__  # type: ignore[assignment]


class Pipeline:
    """A preprocess instance and a core that computes batches; time passes when it is told to.

    Attributes:
        core: Requests in the core, with their tickets.
        ended: Results of the requests that were answered or rejected, with the time.
        drops: Whether Triton drops a request that comes to the core.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        counts: InFlight,
        clock: Clock,
        max_requests: int = 1000,
        max_wait_s: float = 2.0,
    ) -> None:
        self.counts, self.clock = counts, clock
        self.core: deque[tuple[Any, Any]] = deque()
        self.ended: dict[Any, tuple[Any, float]] = {}
        self.drops: Callable[[Any], bool] = lambda _: False
        monkeypatch.setattr("threading.Thread", lambda **_: SimpleNamespace(start=int))
        settings = {
            "pipeline": PIPELINE,
            "max_requests": max_requests,
            "max_wait_ms": 1e3 * max_wait_s,
            "core_rows": CORE_ROWS,
        }
        self.flow = FlowControl(settings, self._make, lambda *_: None)

    def _make(self, jobs: list[Any]) -> list[tuple[Any, Any]]:
        tickets = [(job, self.flow.admit(job.rows)) for job in jobs]
        self.core.extend(each for each in tickets if not self.drops(each[0]))
        return [(job, "forwarded") for job in jobs]

    def send(self, *jobs: Any) -> list[Any]:
        """Send requests at once, and return them."""
        self._take(self.flow.take(jobs))
        return list(jobs)

    def send_many(self, count: int) -> list[Any]:
        return self.send(*(Job() for _ in range(count)))

    def look(self) -> None:
        """Let the thread of flow control look once, as it does while requests wait."""
        if self.flow._accepted or self.flow._undecided:
            self._take(self.flow._look(self.clock.now))

    def _take(self, results: list[tuple[Any, Any]]) -> None:
        for job, result in results:
            if result != "forwarded":
                assert job not in self.ended
                self.ended[job] = result, self.clock.now

    def rejected(self, jobs: list[Any]) -> list[Any]:
        return [self.ended[job][0] for job in jobs if job in self.ended and self.ended[job][0]]

    def compute(self, seconds: float, requests: int = CORE_ROWS) -> list[Any]:
        """Compute a batch, and return the requests that are answered."""
        batch = [self.core.popleft() for _ in range(min(requests, len(self.core)))]
        self.clock.now += seconds
        for job, ticket in batch:
            self.counts.done(ticket)
            self.ended[job] = None, self.clock.now
        self.look()
        return [job for job, _ in batch]

    def leave(self) -> None:
        """Drop the requests in the core, as Triton does when their clients have left."""
        self.core.clear()


class Storm:
    """Clients that cancel each request after 5 ms, and 4 clients that wait for answers.

    Triton drops a canceled request when it comes to the next step. A batch takes 10 ms and 5 ms a
    row.

    Attributes:
        canceled_at: Time by request of the former.
        latencies: Seconds to each answer of the latter.
        waiting: Requests of the latter without an answer, with their times.
    """

    def __init__(self, served: Pipeline) -> None:
        self.served, self.clock = served, served.clock
        self.canceled_at: dict[Any, float] = {}
        self.latencies: list[float] = []
        self.waiting: dict[Any, float] = {}
        self._batch: list[tuple[Any, Any]] = []
        self._done_at = math.inf
        served.drops = self._is_canceled

    def run(self, seconds: float, canceled_per_s: float) -> None:
        end_s = self.clock.now + seconds
        next_at = {self._cancel: self.clock.now, self.served.look: self.clock.now}
        while self.clock.now < end_s:
            next_at[self._end_batch] = self._done_at
            event = min(next_at, key=lambda each: next_at[each])
            self.clock.now = next_at[event]
            event()
            next_at[event] += 0.004 if event == self.served.look else 1 / canceled_per_s
            self._ask()
            if not self._batch:
                self._start_batch()

    def _is_canceled(self, job: Any) -> bool:
        return self.canceled_at.get(job, math.inf) < self.clock.now

    def _cancel(self) -> None:
        (job,) = self.served.send(Job())
        self.canceled_at[job] = self.clock.now + 0.005

    def _ask(self) -> None:
        ended = self.served.ended
        for job in [job for job in self.waiting if job in ended]:
            assert ended[job][0] is None
            self.latencies.append(self.clock.now - self.waiting.pop(job))
        while len(self.waiting) < 4:
            (job,) = self.served.send(Job())
            self.waiting[job] = self.clock.now

    def _batch_s(self) -> float:
        return 0.01 + 0.005 * len(self._batch)

    def _start_batch(self) -> None:
        core = self.served.core
        while core and len(self._batch) < CORE_ROWS:
            self._batch.append(core.popleft())
        self._done_at = math.inf
        if self._batch:
            self._done_at = self.clock.now + self._batch_s()

    def _end_batch(self) -> None:
        for job, ticket in self._batch:
            if not self._is_canceled(job):
                self.served.counts.done(ticket)
                self.served.ended[job] = None, self.clock.now
        self._batch.clear()


class Deadlines(Storm):
    """Clients that wait for 2 s, which they tell, at a core that computes 45 rows a second."""

    def _batch_s(self) -> float:
        return 0.05 + 0.02 * len(self._batch)

    def _cancel(self) -> None:
        (job,) = self.served.send(Job(left_s=2.0))
        self.canceled_at[job] = self.clock.now + 2.0

    def _ask(self) -> None:
        pass
