"""A run: every row of a file to a served pipeline that is never idle, parts kept on the way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from triptych.base.errors import UserError
from triptych.client import AsyncClient, InferenceError
from triptych.client.bulk.answers import Inferring
from triptych.client.bulk.asked import Asked
from triptych.client.bulk.formats import open_table
from triptych.client.bulk.generating import Generating
from triptych.client.bulk.pace import CHUNKS, Pace
from triptych.client.bulk.parts import Parts
from triptych.client.bulk.table import (
    ERROR,
    AnswerColumn,
    Answers,
    Chunk,
    Scan,
    Table,
    beside,
    check_columns,
    name_columns,
)
from triptych.client.infer import unanswered

_PART_ROWS = 5_000
_PART_S = 15.0
"""The most that a break costs: rows, or time, of one part."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        rows: of the file.
        done: answered or failed, by earlier runs too.
        earlier: by earlier runs.
        failed: of those done.
        seconds: since this run began to send.
    """

    rows: int
    done: int
    earlier: int
    failed: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Of this run."""
        return (self.done - self.earlier) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "rows_per_s": round(self.rows_per_s, 1)}


def run(asked: Asked, tell: Callable[[Progress], None]) -> Progress:
    """Send every row of a file and write them with their answers beside.

    What an earlier run of the same kind has done stays done. `tell` is called after each chunk.

    Raises:
        UserError: the file, its columns or `out` are not as they must be, or the server refused
            what is no single row's fault, or was not reached.
    """
    table = open_table(asked.file, asked.out)
    parts = Parts(asked.out)
    try:
        return asyncio.run(_Run(asked, table, parts, tell).run())
    except InferenceError as error:
        told = unanswered(asked.pipeline, asked.url, error)
        kept = parts.done().rows
        go_on = f"{kept} rows are kept: the same command goes on with the others"
        remedy = go_on if kept else told.remedy
        raise UserError(told.field, told.rule, given=error, remedy=remedy) from error


class Asks(Protocol):
    """What sends chunks."""

    async def ask(self, chunk: Chunk) -> Answers:
        """The answers of `chunk`, and why rows have none.

        Raises:
            InferenceError: no row is to blame, or none of many is answered.
        """


class Work(Protocol):
    """What a run does with rows, by the kind of its pipeline."""

    @property
    def inputs(self) -> Sequence[str]:
        """Columns that it may read."""

    @property
    def outputs(self) -> Sequence[AnswerColumn]:
        """Columns that it adds, the one of errors apart."""

    @property
    def pace(self) -> Pace: ...

    @property
    def chunk_rows(self) -> int: ...

    def wanted(self, scan: Scan, /) -> dict[str, str]:
        """What is read of a row -> its column."""

    async def asker(self, size: int, stack: AsyncExitStack, /) -> Asks:
        """For one of the sizes of `pace`; `stack` closes it."""


class _Run:
    def __init__(
        self, asked: Asked, table: Table, parts: Parts, tell: Callable[[Progress], None]
    ) -> None:
        self._asked = asked
        self._table = table
        self._parts = parts
        self._tell = tell
        self._encoded: list[Any] = []
        self._first = self._done = self._failed_before = self._failed = 0

    async def run(self) -> Progress:
        asked = self._asked
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(asked.pipeline, asked.url))
            config = await client.interface(timeout_s=asked.timeout_s)
            work: Work = (Generating if config.generates else Inferring)(asked, config)
            outputs = [*work.outputs, AnswerColumn(ERROR, ERROR)]
            names = [n for o in outputs for n in (o.name, beside(asked.pipeline, o.name))]
            scan = self._table.scan([*work.inputs, *names])
            wanted = work.wanted(scan)
            check_columns(wanted, scan, asked.file)
            columns = name_columns(asked.pipeline, outputs, scan.names)
            askers = {size: await work.asker(size, stack) for size in work.pace.sizes}
            with self._parts.held(asked.decides()):
                chunks = self._table.chunks(wanted, work.chunk_rows, self._parts.done().rows)
                progress = await self._send_all(askers, work.pace, chunks, columns, scan.rows)
                with self._parts.whole() as out:
                    self._table.join(self._parts.done().paths, columns, out)
            return progress

    async def _send_all(
        self,
        askers: Mapping[int, Asks],
        pace: Pace,
        chunks: Iterator[Chunk],
        columns: Sequence[AnswerColumn],
        rows: int,
    ) -> Progress:
        kept = self._parts.done()
        self._first = self._done = kept.rows
        self._failed_before = self._failed = kept.failed
        under_way: deque[tuple[Chunk, asyncio.Task[Answers]]] = deque()
        began = part_began = time.monotonic()
        progress = Progress(rows, kept.rows, kept.rows, kept.failed, 0.0)
        try:
            while True:
                while len(under_way) < CHUNKS and (size := pace.start(time.monotonic())):
                    if (chunk := next(chunks, None)) is None:
                        break
                    under_way.append((chunk, asyncio.create_task(askers[size].ask(chunk))))
                if not under_way:
                    break
                chunk, task = under_way[0]
                answers = await task
                pace.end(chunk.count, time.monotonic())
                encoded = await asyncio.to_thread(self._table.encode, chunk, columns, answers)
                under_way.popleft()
                self._encoded.append(encoded)
                self._done += chunk.count
                self._failed += sum(error is not None for error in answers[ERROR])
                now = time.monotonic()
                if self._done - self._first >= _PART_ROWS or now - part_began >= _PART_S:
                    self._keep()
                    part_began = now
                progress = Progress(rows, self._done, kept.rows, self._failed, now - began)
                self._tell(progress)
        finally:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)
            self._keep()
        return progress

    def _keep(self) -> None:
        if self._encoded:
            failed = self._failed - self._failed_before
            content = self._table.pack(self._encoded)
            self._parts.add(self._first, self._done - self._first, failed, content)
            self._encoded, self._first, self._failed_before = [], self._done, self._failed
