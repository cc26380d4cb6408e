"""Requests side by side, or one with none beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Of one run: who asks `alone` waits until nothing is under way, and holds up what comes."""

    def __init__(self) -> None:
        self._under_way = 0
        self._door = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Others may be under way."""
        async with self._door:
            self._under_way += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nothing else of the run is under way."""
        async with self._door:
            await self._idle.wait()
            yield
