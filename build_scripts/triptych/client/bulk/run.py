"""A run: every row of a file to a served pipeline that is never idle, parts kept on the way.

Which format a file of rows has, by its suffix.

The folder beside a file that is being written: its finished parts, and what made them.
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
from triptych.base.files import sync, told_to_user, write_files
from triptych.client import AsyncClient, InferenceError
from triptych.client.bulk.answers import Inferring
from triptych.client.bulk.asked import Asked
from triptych.client.bulk.formats import (
    ERROR,
    AnswerColumn,
    Answers,
    Chunk,
    Delimited,
    JsonLines,
    PlainText,
    Scan,
    Table,
    beside,
    check_columns,
    name_columns,
)
from triptych.client.bulk.generating import Generating
from triptych.client.bulk.pace import CHUNKS, Pace
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
    """The rows of `path`, whose answers go to `out`; texts, one a line, where no format fits.

    Raises:
        UserError: it cannot be read, or `out` is not named as its format.
    """
    suffix = path.suffix.lower()
    wanted = suffix if suffix in _FORMATS else ".jsonl"
    if out.suffix.lower() != wanted:
        raise UserError(
            "--out",
            f"must end with {wanted}: answers are written as rows are read, texts as .jsonl",
            given=out,
            remedy=f"Name it {out.with_suffix(wanted).name}",
        )
    try:
        return _FORMATS.get(suffix, PlainText)(path)
    except OSError as error:
        raise UserError("--file", "must be a readable file", given=f"{path}: {error}") from error


_RUN = "run.json"
_PART = re.compile(r"(\d{12})-(\d+)-(\d+)\.part")


class Done(NamedTuple):
    """What the parts hold.

    Attributes:
        rows: from the file's first on.
        failed: of these.
        paths: of the parts, in order.
    """

    rows: int
    failed: int
    paths: list[Path]


class Parts:
    """Parts of `out`, each written whole or not at all; no row is in two of them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f"{out.name}.parts")

    @contextmanager
    def held(self, asked: Mapping[str, object]) -> Iterator[None]:
        """Make the folder, or go on with it, and let no other run write there meanwhile.

        Args:
            asked: plain data that decides what the parts hold.

        Raises:
            UserError: `out` exists, other things were asked for in the run that made the folder,
                another run writes there, or nothing can be written.
        """
        if self._out.exists():
            raise UserError(
                "--out",
                "must not exist: nothing is overwritten",
                given=self._out,
                remedy="Name another file, or remove it",
            )
        with told_to_user(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                self._lock(lock)
                self._check(json.loads(json.dumps(asked)))
                yield

    def add(self, first: int, rows: int, failed: int, content: bytes) -> None:
        """Keep the answers of `rows` rows from `first` on, `failed` of which have none."""
        write_files(self.folder, {f"{first:012}-{rows}-{failed}.part": content})

    def done(self) -> Done:
        """What is kept so far."""
        rows, failed, paths = 0, 0, []
        for path in sorted(self.folder.glob("*.part")):
            name = _PART.fullmatch(path.name)
            if name and int(name[1]) == rows:
                rows, failed = rows + int(name[2]), failed + int(name[3])
                paths.append(path)
        return Done(rows, failed, paths)

    @contextmanager
    def whole(self) -> Iterator[IO[bytes]]:
        """Write `out`, whole or not at all, and remove the folder."""
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
                "must be written by one run at a time",
                given=f"another run writes into {self.folder}",
                remedy="Wait for it, or name another file",
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
                "has parts of a run that asked for something else",
                given=f"other {', '.join(other)} than in {path}",
                remedy=f"Ask as before to go on, or remove {self.folder} to begin anew",
            )


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
