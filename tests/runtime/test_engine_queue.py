"""The order of requests in front of an engine of generated text, with clients that give up."""

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.runtime import engine_queue
from triptych.runtime.engine_queue import EngineQueue

PAUSE_S, CHECK_S, NOTICE_S, BACK_S, QUIET_S = 0.05, 0.01, 0.02, 0.01, 0.6
"""Seconds before a client asks again, of a check of a client, until the server notices that one has
left, of a token on its way, and between two checks of a request that waits."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all wait."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    loop = Clock()
    monkeypatch.setattr(engine_queue, "time", SimpleNamespace(monotonic=loop.time))
    return loop


def run(clock: Clock, work: Coroutine[Any, Any, None]) -> None:
    """Run until the work ends, and cancel the rest."""

    async def run_and_cancel() -> None:
        await work
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    try:
        clock.run_until_complete(run_and_cancel())
    finally:
        clock.close()


@dataclass
class Request:
    left_at: float = math.inf
    token: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)


class Simulation:
    """Clients in a closed loop, each with its deadline for the first token, and an engine."""

    def __init__(
        self, clock: Clock, deadlines: list[float], *, places: int, token_s: float, tokens: int
    ) -> None:
        self._clock, self._deadlines = clock, deadlines
        self._token_s, self._tokens = token_s, tokens
        self._capacity = places / (token_s * tokens)
        self._places = asyncio.Semaphore(places)
        self.queue = EngineQueue(places)
        self.answered: list[tuple[int, float, float]] = []  # client, time and wait

    async def load(self, seconds: float) -> None:
        began = self._clock.time()
        clients = [self._clock.create_task(self._ask(n)) for n in range(len(self._deadlines))]
        await asyncio.sleep(seconds)
        self.answered = [one for one in self.answered if one[1] > began + 4]
        self.goodput = len(self.answered) / (seconds - 4) / self._capacity
        for client in clients:
            client.cancel()

    async def _ask(self, client: int) -> None:
        while True:
            request, sent_at = Request(), self._clock.time()
            deadline_s = self._deadlines[client]
            core = self._clock.create_task(self._generate(request))
            try:
                limit_s = None if math.isinf(deadline_s) else deadline_s
                await asyncio.wait_for(request.token.wait(), limit_s)
            except asyncio.TimeoutError:
                request.left_at = self._clock.time()
                self._clock.call_later(QUIET_S, core.cancel)
                await asyncio.sleep(PAUSE_S)
                continue
            now = self._clock.time()
            self.answered.append((client, now, now - sent_at))
            await request.end.wait()

    def _has_left(self, request: Request) -> bool:
        return self._clock.time() > request.left_at + NOTICE_S

    async def _generate(self, request: Request) -> None:
        async with self.queue.place(0) as age_s:
            is_lost = False
            if age_s is not None:
                await asyncio.sleep(CHECK_S)
                is_lost = self._has_left(request)
            if not is_lost:
                async with self._places:
                    await asyncio.sleep(self._token_s)
                    is_lost = self._has_left(request)
                    if not is_lost:
                        self._clock.call_later(BACK_S, request.token.set)
                        await asyncio.sleep(self._token_s * (self._tokens - 1))
            if age_s is not None:
                self.queue.learn(age_s, is_lost=is_lost or self._has_left(request))
            request.end.set()


SHORT: dict[str, Any] = {"places": 4, "token_s": 0.08, "tokens": 1}
LONG: dict[str, Any] = {"places": 8, "token_s": 0.016, "tokens": 10}


@pytest.mark.parametrize("engine", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("clients", [64, 256])
def test_the_engine_works_for_clients_that_still_wait(
    clock: Clock, engine: dict[str, Any], clients: int
) -> None:
    simulation = Simulation(clock, [1.0] * clients, **engine)
    run(clock, simulation.load(14.0))
    assert simulation.goodput > 0.9  # in order of arrival: 0.0 to 0.7


def test_clients_without_a_deadline_are_answered_in_order_of_arrival(clock: Clock) -> None:
    simulation = Simulation(clock, [math.inf] * 200, **LONG)
    run(clock, simulation.load(20.0))
    assert simulation.goodput > 0.98
    waits = [wait_s for _, _, wait_s in simulation.answered]
    assert max(waits) < 200 / 50 * 1.1
    shares = Counter(client for client, _, _ in simulation.answered)
    assert max(shares.values()) - min(shares[client] for client in range(200)) <= 1


def test_clients_without_a_deadline_are_answered_among_others(clock: Clock) -> None:
    simulation = Simulation(clock, [1.0] * 192 + [math.inf] * 16, **LONG)
    run(clock, simulation.load(30.0))
    assert simulation.goodput > 0.9
    assert {client for client, _, _ in simulation.answered} >= set(range(192, 208))


def test_the_order_is_by_priority_and_a_canceled_request_keeps_no_place(clock: Clock) -> None:
    order: list[str] = []
    queue = EngineQueue(1)  # and one ahead

    async def hold(name: str, priority: int = 0, seconds: float = 1.0) -> None:
        async with queue.place(priority):
            order.append(name)
            await asyncio.sleep(seconds)

    async def work() -> None:
        first = [clock.create_task(hold(name)) for name in ("a", "b")]
        await asyncio.sleep(0.1)
        late = [clock.create_task(hold(name, level)) for name, level in (("c", 2), ("d", 1))]
        gone = clock.create_task(hold("e"))
        await asyncio.sleep(0.1)
        assert (order, len(queue)) == (["a", "b"], 3)
        gone.cancel()  # in the queue
        first[0].cancel()  # in its place
        await asyncio.sleep(0.1)
        assert (order, len(queue)) == (["a", "b", "d"], 1)
        # Canceled between the end of its wait and its next step.
        first[1].cancel()
        while len(queue):
            await asyncio.sleep(0)
        late[0].cancel()
        await asyncio.gather(*first, *late, gone, return_exceptions=True)
        await asyncio.gather(hold("f"), hold("g"))

    run(clock, work())
    assert order[2:] in (["d", "f", "g"], ["d", "c", "f", "g"])
    assert len(queue) == 0


def test_a_request_that_ends_while_another_one_is_canceled_has_no_error(clock: Clock) -> None:
    queue = EngineQueue(1)  # and one ahead
    ends = [asyncio.Event() for _ in range(2)]
    order: list[str] = []

    async def hold(name: str, end: asyncio.Event) -> None:
        async with queue.place(0):
            order.append(name)
            await end.wait()

    async def work() -> None:
        held = [clock.create_task(hold(*each)) for each in zip("ab", ends, strict=True)]
        await asyncio.sleep(0.1)
        gone = clock.create_task(hold("gone", ends[0]))
        last = clock.create_task(hold("last", ends[0]))
        await asyncio.sleep(0.1)
        ends[0].set()
        gone.cancel()
        await asyncio.gather(held[0], last)
        assert gone.cancelled()
        ends[1].set()
        await held[1]

    run(clock, work())
    assert (order, len(queue)) == (["a", "b", "last"], 0)
