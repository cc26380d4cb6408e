"""Order in which requests for text get a place in the engine.

An engine answers in order of arrival. Under overload that is the order of clients who have given
up, so the core gives the engine little more than it computes at once. The rule for the others is
that of `flow_control`: those younger than a learned age go first, the oldest of them before the
others, and one of `TURNS` is the oldest of all, once it is much older. The age is the one that best
separates the requests whose first token reached a client from those whose client had left.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .learned_age import find_separating_age

AHEAD_SHARE = 0.125
"""Requests that wait in the engine, as a share of those that it computes at once."""
TURNS = 8
LEARNED_BATCHES, MIN_LEARNED, MAX_LEARNED = 8, 128, 256
RETURN_S, RETURN_SHARE = 0.1, 0.1
"""Time of a token on its way to the client: seconds, and at most this share of the age."""
PATIENT = 2.0
"""Age of patient requests, as a multiple of the learned age."""


@dataclass(eq=False)
class _Waiting:
    """A request that waits; `place` gets its age once it has a place, None if it was the last."""

    priority: int
    since: float
    place: asyncio.Future[float | None] = field(default_factory=asyncio.Future)


class EngineQueue:
    """Places in the engine, and the requests that wait for one.

    Args:
        sequences: Number of requests that the engine computes at once.
    """

    def __init__(self, sequences: int) -> None:
        self._free = sequences + math.ceil(AHEAD_SHARE * sequences)
        learned = min(max(LEARNED_BATCHES * sequences, MIN_LEARNED), MAX_LEARNED)
        # Ages of the last requests, each with 1, or -1 if it was lost.
        self._outcomes: deque[tuple[float, int]] = deque(maxlen=learned)
        self._limit_s = math.inf  # the learned age
        self._waiting: list[_Waiting] = []  # in order of arrival
        self._turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[float | None]:
        """Wait for a place, and keep it while the block runs; a lower `priority` goes first.

        Yields the age for `learn`, or None if no other request waits.
        """
        waiting = _Waiting(priority, time.monotonic())
        self._waiting.append(waiting)
        self._hand_over()
        try:
            yield await waiting.place
        finally:
            if waiting in self._waiting:  # canceled
                self._waiting.remove(waiting)
            else:
                self._free += 1
                self._hand_over()

    def learn(self, age_s: float, *, is_lost: bool) -> None:
        """Learn whether a client still waited for the first token of a request of this age."""
        self._outcomes.append((age_s, -1 if is_lost else 1))
        self._limit_s = find_separating_age(self._outcomes)

    def _hand_over(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            now = time.monotonic()
            chosen = self._waiting.pop(self._choose(now))
            if not chosen.place.done():  # else it was just canceled, and frees its place at once
                chosen.place.set_result(now - chosen.since if self._waiting else None)

    def _choose(self, now: float) -> int:
        """Return the index of the request that gets the next place."""
        first = min(each.priority for each in self._waiting)
        own = [index for index, each in enumerate(self._waiting) if each.priority == first]
        self._turn = (self._turn + 1) % TURNS
        if self._turn == 0 and now - self._waiting[own[0]].since > PATIENT * self._limit_s:
            return own[0]
        max_s = self._limit_s - min(RETURN_S, RETURN_SHARE * self._limit_s)
        return next((index for index in own if now - self._waiting[index].since <= max_s), own[0])
