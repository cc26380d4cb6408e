"""Chunks on their way to a server: how many, and with how many rows per request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from math import ceil
from typing import Protocol

from triptych.client import AsyncClient
from triptych.interface.bulk.files import Answers, RowChunk

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

    def interrupt(self) -> None:
        """Discard a trial that is not complete, because there are no more rows for now."""
        self._started = self._ended = self._rows = 0


class ChunkSender(Protocol):
    """Sends chunks of rows in requests of one size."""

    @property
    def client(self) -> AsyncClient:
        """Client of the pipeline."""

    async def send(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one."""


async def send_chunks(
    senders: Mapping[int, ChunkSender], batch_sizes: BatchSizeTuner, chunks: Iterator[RowChunk]
) -> AsyncGenerator[tuple[RowChunk, Answers], None]:
    """Yield each chunk with its results, in order; the next `CHUNKS` are in flight meanwhile.

    Args:
        senders: Sender by number of rows per request, for each of `batch_sizes.sizes`.
        batch_sizes: Choice of the size.
        chunks: Rows to send.

    Raises:
        InferenceError: No single row is to blame.
    """
    in_flight: deque[tuple[RowChunk, asyncio.Task[Answers]]] = deque()
    try:
        while True:
            while len(in_flight) < CHUNKS and (size := batch_sizes.start(time.monotonic())):
                if (chunk := next(chunks, None)) is None:
                    break
                in_flight.append((chunk, asyncio.create_task(senders[size].send(chunk))))
            if not in_flight:
                break
            chunk, task = in_flight[0]
            answers = await task
            batch_sizes.end(chunk.count, time.monotonic())
            yield chunk, answers
            in_flight.popleft()
    finally:
        batch_sizes.interrupt()
        for _, task in in_flight:
            task.cancel()
        await asyncio.gather(*(task for _, task in in_flight), return_exceptions=True)
