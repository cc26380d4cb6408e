"""Lock and batch sizes for the requests of a bulk run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import ceil

CHUNKS = 3
"""Number of chunks in flight: while the last requests of one chunk end, the others keep the server
busy. Also the number of chunks in a trial.
"""
REQUESTS = 4
"""Number of requests of a chunk in flight."""
_SHARES = (16, 8, 4)
"""Fractions of the batch limit that are tried as request sizes: with `REQUESTS` of each of the
`CHUNKS` in flight, between one batch and three.
"""
_TURNS = 2
"""Number of trials of each size; the best one counts, because others use the server too."""


class BatchSizeTuner:
    """Finds the number of rows per request by trials on the server.

    Measured with packed MiniLM on 2 busy cores, in rows per second: 12 requests of 8 rows in flight
    44; 2 of 8 53; 6 of 4 70; 8 of 2 77; 16 of 1 73. On a GPU large batches win.

    Args:
        max_batch_size: Batch limit of the pipeline.

    Attributes:
        sizes: Request sizes that are tried.
        chosen: Best size after the trials; None before.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.sizes = list(dict.fromkeys(ceil(max_batch_size / share) for share in _SHARES))
        self.chosen = self.sizes[0] if len(self.sizes) == 1 else None
        self._rates = dict.fromkeys(self.sizes, 0.0)
        self._trials = [size for _ in range(_TURNS) for size in self.sizes]
        self._started = self._ended = self._rows = 0
        self._began_at = 0.0

    def start(self, now: float) -> int | None:
        """Return the request size for the next chunk; None while a trial has to end first."""
        if self.chosen is not None:
            return self.chosen
        if self._started == CHUNKS:
            return None
        if not self._started:
            self._began_at = now
        self._started += 1
        return self._trials[0]

    def end(self, rows: int, now: float) -> None:
        """Record that a chunk of `rows` rows is complete."""
        if self.chosen is not None:
            return
        self._ended, self._rows = self._ended + 1, self._rows + rows
        if self._ended == CHUNKS:
            size = self._trials.pop(0)
            rate = self._rows / max(now - self._began_at, 1e-9)
            self._rates[size] = max(self._rates[size], rate)
            self._started = self._ended = self._rows = 0
            if not self._trials:
                self.chosen = max(self._rates, key=self._rates.__getitem__)


class BatchLock:
    """Read-write lock: `shared` requests run concurrently, an `exclusive` one alone."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._entrance = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock together with other requests."""
        async with self._entrance:
            self._in_flight += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        async with self._entrance:
            await self._idle.wait()
            yield
