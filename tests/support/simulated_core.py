"""Simulation of clients, preprocess instances with the real flow control, and a core."""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.runtime.flow_control import FlowControl
from triptych.runtime.in_flight import SHARED_MEMORY, InFlight, Ticket

PIPELINE = f"test-{os.getpid()}"
BATCH_ROWS = 32
HAND_OVER_S, ANSWER_S, LOOK_S = 0.002, 0.001, 0.003


class Clock:
    """Stands for the monotonic clock."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


class Job:
    """A request of one or more rows, with what becomes of it."""

    def __init__(self, rows: int = 1, left_s: float | None = None) -> None:
        self.rows, self.left_s = rows, left_s
        self.sender: Any = None
        self.request = SimpleNamespace(get_response_sender=lambda: "sender")
        self.since, self.is_newest = 0.0, False
        self.sent_at = self.ended_at = 0.0
        self.is_answered = self.has_left = False
        self.error: Exception | None = None
        self.on_end: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        return not (self.is_answered or self.has_left or self.error)


@dataclass(frozen=True)
class Setup:
    """A pipeline: its instances, and the seconds of a batch, which are a constant and per row."""

    instances: int = 1
    cores: int = 1
    batch_s: tuple[float, float] = (0.012, 0.0054)  # MiniLM on two processor cores
    max_requests: int = 1024
    max_wait_ms: float | None = None

    @property
    def capacity(self) -> float:
        """Rows per second of full batches."""
        return self.cores * BATCH_ROWS / (self.batch_s[0] + BATCH_ROWS * self.batch_s[1])


@dataclass(frozen=True)
class Load:
    """Clients: `clients` of a closed load, or an open one of `rate` requests per second.

    Attributes:
        deadlines_s: Seconds after which clients leave, given to them in turn; None for never.
        pause_s: Seconds until a client whose request failed sends again.
        tells: Whether the server knows the deadlines.
        back_s: Seconds of an answer on its way to the client.
    """

    clients: int = 0
    rate: float = 0.0
    deadlines_s: Sequence[float | None] = (1.0,)
    pause_s: float = 0.05
    rows: int = 1
    tells: bool = False
    back_s: float = 0.0


@dataclass
class Simulation:
    """Events in order of time. Triton drops a request whose client has left between two steps.

    Attributes:
        core: Requests in the queue of the core.
        answers: Time since the start, and rows, of each answer in time.
        computed: Requests that the core has computed.
    """

    patch: pytest.MonkeyPatch
    setup: Setup = Setup()
    clock: Clock = field(default_factory=Clock)
    core: deque[tuple[Job, Ticket]] = field(default_factory=deque)
    answers: list[tuple[float, int]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    by_client: Counter[int] = field(default_factory=Counter)
    computed: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.patch.setattr("time.monotonic", self.clock.monotonic)
        self.patch.setattr("time.monotonic_ns", self.clock.monotonic_ns)
        self.patch.setattr("threading.Thread", lambda **_: SimpleNamespace(start=int))
        self._random = random.Random(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._load: Load | None = None
        self._busy = [False] * self.setup.cores
        self.start_s = self.clock.now
        settings = {
            "pipeline": PIPELINE,
            "max_requests": self.setup.max_requests,
            "max_wait_ms": self.setup.max_wait_ms,
            "core_rows": BATCH_ROWS * self.setup.cores,
            "core_instances": self.setup.cores,
        }
        self.postprocess = InFlight(PIPELINE)
        self.flows: list[FlowControl] = []
        for index in range(self.setup.instances):
            self.flows.append(FlowControl(settings, self._maker(index), lambda *_: None))
            self._at(self.clock.now, partial(self._look, self.flows[-1]))

    def close(self) -> None:
        for path in SHARED_MEMORY.glob(f"*.{PIPELINE}"):
            path.unlink()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.clock.now + seconds
        while self._events and self._events[0][0] <= end:
            self.clock.now, _, act = heapq.heappop(self._events)
            act()
        self.clock.now = end

    def send(self, *jobs: Job, instance: int | None = None) -> list[Job]:
        """Send requests at once, and return them."""
        flow = self._random.choice(self.flows) if instance is None else self.flows[instance]
        for job in jobs:
            job.sent_at = self.clock.now
        self.jobs += jobs
        self._take(flow.take(jobs))
        return list(jobs)

    def leave(self, *jobs: Job) -> None:
        for job in jobs:
            if job.is_open:
                job.has_left = True
                job.on_end()

    def start(self, load: Load) -> None:
        """Start a load that lasts until `stop`."""
        self._load = load
        for client in range(load.clients):
            self._at(self.clock.now + 0.2 * self._random.random(), self._sender(client))
        if load.rate:
            self._arrive()

    def stop(self) -> None:
        """End the load: all clients leave."""
        self._load = None
        self.leave(*self.jobs)

    def goodput(self, first_s: float) -> float:
        """Return the rows answered in time per second since `first_s`, by the capacity."""
        now_s = self.clock.now - self.start_s
        rows = sum(rows for at, rows in self.answers if at > first_s)
        return rows / (now_s - first_s) / self.setup.capacity

    @property
    def errors(self) -> list[Exception]:
        return [job.error for job in self.jobs if job.error is not None]

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, act))

    def _maker(self, index: int) -> Callable[[list[Any]], list[tuple[Any, Any]]]:
        def make(jobs: list[Any]) -> list[tuple[Any, Any]]:
            for job in jobs:
                ticket = self.flows[index].admit(job.rows, job)
                self._at(self.clock.now + HAND_OVER_S, partial(self._enter, job, ticket))
            return [(job, "handed over") for job in jobs]

        return make

    def _look(self, flow: FlowControl) -> None:
        if flow._waiting:
            self._take(flow._look(self.clock.now))
        self._at(self.clock.now + LOOK_S, partial(self._look, flow))

    def _take(self, results: list[tuple[Any, Any]]) -> None:
        for job, result in results:
            if result != "handed over" and job.is_open:
                job.error, job.ended_at = result, self.clock.now
                job.on_end()

    def _enter(self, job: Job, ticket: Ticket) -> None:
        if not job.has_left:
            self.core.append((job, ticket))
            self._compute()

    def _compute(self) -> None:
        for number, is_busy in enumerate(self._busy):
            batch: list[tuple[Job, Ticket]] = []
            rows = 0
            while not is_busy and self.core and rows + self.core[0][0].rows <= BATCH_ROWS:
                batch.append(self.core.popleft())
                rows += batch[-1][0].rows
            if batch:
                self._busy[number] = True
                self.computed += [job for job, _ in batch]
                took_s = self.setup.batch_s[0] + rows * self.setup.batch_s[1]
                done = partial(self._finish, number, batch)
                self._at(self.clock.now + took_s, done)

    def _finish(self, number: int, batch: list[tuple[Job, Ticket]]) -> None:
        self._busy[number] = False
        for job, ticket in batch:
            if not job.has_left:
                self._at(self.clock.now + ANSWER_S, partial(self._answer, job, ticket))
        self._compute()

    def _answer(self, job: Job, ticket: Ticket) -> None:
        self.postprocess.done(ticket)
        back_s = self._load.back_s if self._load else 0.0
        self._at(self.clock.now + back_s, partial(self._arrive_at_client, job))

    def _arrive_at_client(self, job: Job) -> None:
        if job.is_open:
            job.is_answered, job.ended_at = True, self.clock.now
            self.answers.append((self.clock.now - self.start_s, job.rows))
            job.on_end()

    def _arrive(self) -> None:
        load = self._load
        if load is not None:
            self._client_sends(self._random.randrange(len(load.deadlines_s)))
            self._at(self.clock.now + self._random.expovariate(load.rate), self._arrive)

    def _sender(self, client: int) -> Callable[[], None]:
        """Return what a client of a closed load does: it sends, and sends again after the end."""

        def send() -> None:
            if self._load is not None:
                job = self._client_sends(client)
                job.on_end = lambda: end(job)
                if not job.is_open:  # rejected at once
                    end(job)

        def end(job: Job) -> None:
            if self._load is not None:
                self.by_client[client] += job.is_answered
                pause_s = ANSWER_S if job.is_answered else self._load.pause_s + ANSWER_S
                self._at(self.clock.now + pause_s, send)

        return send

    def _client_sends(self, client: int) -> Job:
        load = self._load or Load()
        deadline_s = load.deadlines_s[client % len(load.deadlines_s)]
        (job,) = self.send(Job(load.rows, deadline_s if load.tells else None))
        if deadline_s is not None:
            spread = 1.0 if load.tells else 0.95 + 0.1 * self._random.random()
            self._at(self.clock.now + spread * deadline_s, lambda: self.leave(job))
        return job
