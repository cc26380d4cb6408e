"""Bulk run: send every row of a file to a served pipeline and write the results, resumably.

Finished parts are stored in a folder beside the file that is written.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors, sync, write_files
from triptych.client import AsyncClient, InferenceError
from triptych.client.bulk.answers import TensorJob
from triptych.client.bulk.batching import CHUNKS, BatchSizeTuner
from triptych.client.bulk.formats import (
    ERROR,
    AnswerColumn,
    Answers,
    Delimited,
    JsonLines,
    PlainText,
    RowChunk,
    Scan,
    Table,
    beside,
    check_columns,
    name_columns,
)
from triptych.client.bulk.options import BulkOptions
from triptych.client.bulk.text_job import TextJob
from triptych.client.questions import unanswered


def _parquet(path: Path) -> Table:
    from triptych.client.bulk.parquet import Parquet

    return Parquet(path)


_FORMATS: dict[str, Callable[[Path], Table]] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".jsonl": JsonLines,
    ".parquet": _parquet,
}


def open_table(path: Path, out: Path) -> Table:
    """Return the rows of `path`, whose results go to `out`; unknown formats are lines of text.

    Raises:
        UserError: The file cannot be read, or `out` has another format.
    """
    suffix = path.suffix.lower()
    wanted = suffix if suffix in _FORMATS else ".jsonl"
    if out.suffix.lower() != wanted:
        raise UserError(
            "--out",
            f"must end with {wanted}, the format of the rows (.jsonl for texts)",
            given=out,
            remedy=f"Name it {out.with_suffix(wanted).name}",
        )
    try:
        return _FORMATS.get(suffix, PlainText)(path)
    except OSError as error:
        raise UserError(
            "--file",
            "is not a readable file",
            given=f"{path}: {error}",
            remedy="Check the path and its permissions",
        ) from error


_RUN = "run.json"
_PART = re.compile(r"(\d{12})-(\d+)-(\d+)\.part")


class Done(NamedTuple):
    """Content of the finished parts.

    Attributes:
        rows: Number of rows, from the first of the file.
        failed: Number of rows without a result.
        paths: Paths of the parts, in order.
    """

    rows: int
    failed: int
    paths: list[Path]


class Parts:
    """Parts of `out`, each written atomically; no row is in two parts."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f"{out.name}.parts")

    @contextmanager
    def held(self, asked: Mapping[str, object]) -> Iterator[None]:
        """Create or resume the folder and lock it while the block runs.

        Args:
            asked: Plain data that determines the content of the parts.

        Raises:
            UserError: `out` exists, the folder belongs to a run with other options, another run
                uses it, or it is not writable.
        """
        if self._out.exists():
            raise UserError(
                "--out",
                "already exists, and existing files are never overwritten",
                given=self._out,
                remedy="Give another file, or remove it",
            )
        with os_errors_as_user_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                self._lock(lock)
                self._check(json.loads(json.dumps(asked)))
                yield

    def add(self, first: int, rows: int, failed: int, content: bytes) -> None:
        """Store the results of `rows` rows from `first` on, `failed` of which have none."""
        write_files(self.folder, {f"{first:012}-{rows}-{failed}.part": content})

    def done(self) -> Done:
        """Return the finished parts."""
        rows, failed, paths = 0, 0, []
        for path in sorted(self.folder.glob("*.part")):
            name = _PART.fullmatch(path.name)
            if name and int(name[1]) == rows:
                rows, failed = rows + int(name[2]), failed + int(name[3])
                paths.append(path)
        return Done(rows, failed, paths)

    @contextmanager
    def whole(self) -> Iterator[IO[bytes]]:
        """Write `out` atomically and remove the folder."""
        partial = self.folder / "whole"
        with partial.open("wb") as file:
            yield file
        sync(partial)
        partial.replace(self._out)
        shutil.rmtree(self.folder)

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "--out",
                "is being written by another run",
                given=f"a lock on {self.folder}",
                remedy="Wait for it, or give another file",
            ) from error

    def _check(self, asked: Mapping[str, object]) -> None:
        path = self.folder / _RUN
        if not path.exists():
            write_files(self.folder, {_RUN: json.dumps(asked, indent=2) + os.linesep})
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if other := [key for key in asked if before.get(key) != asked[key]]:
            raise UserError(
                "--out",
                "has parts of a run with other options",
                given=f"other {', '.join(other)} than in {path}",
                remedy=f"Use the same options to resume, or remove {self.folder} to start again",
            )


_PART_ROWS = 5_000
_PART_S = 15.0
"""Maximum loss by an interruption: the rows, or seconds, of one part."""


@dataclass(frozen=True)
class BulkProgress:
    """Progress of a bulk run.

    Attributes:
        rows: Number of rows in the file.
        done: Number of rows completed or failed, by earlier runs too.
        earlier: Number of rows completed by earlier runs.
        failed: Number of rows that failed.
        seconds: Time since this run began to send.
    """

    rows: int
    done: int
    earlier: int
    failed: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Rows per second of this run."""
        return (self.done - self.earlier) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for ``--json``."""
        return {**asdict(self), "rows_per_s": round(self.rows_per_s, 1)}


def run(asked: BulkOptions, tell: Callable[[BulkProgress], None]) -> BulkProgress:
    """Send every row of a file and write the rows with their results.

    An interrupted run is resumed. `tell` is called after each chunk.

    Raises:
        UserError: The file, its columns or `out` are invalid, the server rejected a request for
            which no single row is to blame, or it was not reached.
    """
    table = open_table(asked.file, asked.out)
    parts = Parts(asked.out)
    try:
        return asyncio.run(_Run(asked, table, parts, tell).run())
    except InferenceError as error:
        told = unanswered(asked.pipeline, asked.url, error)
        kept = parts.done().rows
        go_on = f"{kept} rows are stored: run the same command to resume"
        remedy = go_on if kept else told.remedy
        raise UserError(told.field, told.rule, given=error, remedy=remedy) from error


class Sender(Protocol):
    """Sender of chunks."""

    async def ask(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one.

        Raises:
            InferenceError: No single row is to blame, or none of many rows has a result.
        """


class BulkJob(Protocol):
    """Part of a run that depends on the kind of pipeline."""

    @property
    def inputs(self) -> Sequence[str]:
        """Columns that may be read."""

    @property
    def outputs(self) -> Sequence[AnswerColumn]:
        """Columns that are added, except that of errors."""

    @property
    def batch_sizes(self) -> BatchSizeTuner: ...

    @property
    def chunk_rows(self) -> int: ...

    def wanted(self, scan: Scan, /) -> dict[str, str]:
        """Return the column by value that is read of a row."""

    async def asker(self, size: int, stack: AsyncExitStack, /) -> Sender:
        """Return a sender for one of the request sizes; `stack` closes it."""


class _Run:
    def __init__(
        self, asked: BulkOptions, table: Table, parts: Parts, tell: Callable[[BulkProgress], None]
    ) -> None:
        self._asked = asked
        self._table = table
        self._parts = parts
        self._tell = tell
        self._encoded: list[Any] = []
        self._first = self._done = self._failed_before = self._failed = 0

    async def run(self) -> BulkProgress:
        asked = self._asked
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(asked.pipeline, asked.url))
            config = await client.interface(timeout_s=asked.timeout_s)
            work: BulkJob = (TextJob if config.generates else TensorJob)(asked, config)
            outputs = [*work.outputs, AnswerColumn(ERROR, ERROR)]
            names = [n for o in outputs for n in (o.name, beside(asked.pipeline, o.name))]
            scan = self._table.scan([*work.inputs, *names])
            wanted = work.wanted(scan)
            check_columns(wanted, scan, asked.file)
            columns = name_columns(asked.pipeline, outputs, scan.names)
            askers = {size: await work.asker(size, stack) for size in work.batch_sizes.sizes}
            with self._parts.held(asked.decides()):
                chunks = self._table.chunks(wanted, work.chunk_rows, self._parts.done().rows)
                progress = await self._send_all(
                    askers, work.batch_sizes, chunks, columns, scan.rows
                )
                with self._parts.whole() as out:
                    self._table.join(self._parts.done().paths, columns, out)
            return progress

    async def _send_all(
        self,
        askers: Mapping[int, Sender],
        batch_sizes: BatchSizeTuner,
        chunks: Iterator[RowChunk],
        columns: Sequence[AnswerColumn],
        rows: int,
    ) -> BulkProgress:
        kept = self._parts.done()
        self._first = self._done = kept.rows
        self._failed_before = self._failed = kept.failed
        under_way: deque[tuple[RowChunk, asyncio.Task[Answers]]] = deque()
        began = part_began = time.monotonic()
        progress = BulkProgress(rows, kept.rows, kept.rows, kept.failed, 0.0)
        try:
            while True:
                while len(under_way) < CHUNKS and (size := batch_sizes.start(time.monotonic())):
                    if (chunk := next(chunks, None)) is None:
                        break
                    under_way.append((chunk, asyncio.create_task(askers[size].ask(chunk))))
                if not under_way:
                    break
                chunk, task = under_way[0]
                answers = await task
                batch_sizes.end(chunk.count, time.monotonic())
                encoded = await asyncio.to_thread(self._table.encode, chunk, columns, answers)
                under_way.popleft()
                self._encoded.append(encoded)
                self._done += chunk.count
                self._failed += sum(error is not None for error in answers[ERROR])
                now = time.monotonic()
                if self._done - self._first >= _PART_ROWS or now - part_began >= _PART_S:
                    self._keep()
                    part_began = now
                progress = BulkProgress(rows, self._done, kept.rows, self._failed, now - began)
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
