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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors, sync, write_files
from triptych.client import InferenceError
from triptych.client.server_info import request_failure
from triptych.interface.bulk.files import (
    ERROR,
    UTF_8,
    AnswerColumn,
    Answers,
    Table,
    name_columns,
    open_rows,
)
from triptych.interface.bulk.jobs import BulkOptions, open_job, prepare, wanted_columns
from triptych.interface.bulk.sending import send_chunks
from triptych.interface.bulk.writers import OUTPUTS, Writer, open_writer


def open_table(path: Path, out: Path, *, encoding: str = UTF_8, suffix: str | None = None) -> Table:
    """Return the rows of `path`, whose results go to `out`; unknown formats are lines of text.

    Raises:
        UserError: The file cannot be read, or `out` has an unknown format.
    """
    if out.suffix.lower() not in OUTPUTS:
        raise UserError(
            "--out",
            f"must end with {', '.join(OUTPUTS[:-1])} or {OUTPUTS[-1]}",
            given=out,
            remedy=f"Name it {out.with_suffix('.jsonl').name}",
        )
    return open_rows(path, encoding, suffix)


_RUN = "run.json"
_PART = re.compile(r"(\d{12})-(\d+)-(\d+)\.part")


class Done(NamedTuple):
    """Content of the finished parts."""

    rows: int  # Number of rows, from the first of the file
    failed: int  # Number of rows without a result
    paths: list[Path]  # Paths of the parts, in order


class Parts:
    """Parts of `out`, each written atomically; no row is in two parts."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f"{out.name}.parts")

    @contextmanager
    def locked(self, options: Mapping[str, object]) -> Iterator[None]:
        """Create or resume the folder and lock it while the block runs.

        Args:
            options: Plain data that determines the content of the parts.

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
        if self.folder.is_symlink():
            raise UserError(
                "--out",
                "has a folder of parts that is a symbolic link, so that parts would be elsewhere",
                given=self.folder,
                remedy="Remove the link, or give another file",
            )
        with os_errors_as_user_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                self._lock(lock)
                self._check(json.loads(json.dumps(options)))
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
    def output(self) -> Iterator[IO[bytes]]:
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

    def _check(self, options: Mapping[str, object]) -> None:
        path = self.folder / _RUN
        if not path.exists():
            write_files(self.folder, {_RUN: json.dumps(options, indent=2) + os.linesep})
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if other := [key for key in options if before.get(key) != options[key]]:
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
    """Progress of a bulk run."""

    rows: int  # Number of rows in the file
    done: int  # Number of rows completed or failed, by earlier runs too
    earlier: int  # Number of rows completed by earlier runs
    failed: int  # Number of rows that failed
    seconds: float  # Time since this run began to send

    @property
    def rows_per_s(self) -> float:
        """Rows per second of this run."""
        return (self.done - self.earlier) / self.seconds if self.seconds else 0.0

    def describe(self) -> str:
        """Return the rate of this run as a text."""
        return f"{self.rows_per_s:,.0f} rows/s"


def run(options: BulkOptions, report: Callable[[BulkProgress], None]) -> BulkProgress:
    """Send every row of a file and write the rows with their results.

    An interrupted run is resumed. `report` is called after each chunk.

    Raises:
        UserError: The file, its columns or `out` are invalid, the server rejected a request for
            which no single row is to blame, or it was not reached.
    """
    table = open_table(options.file, options.out, encoding=options.encoding, suffix=options.suffix)
    parts = Parts(options.out)
    try:
        return asyncio.run(_run(options, table, parts, report))
    except InferenceError as error:
        remedy = describe_stored(options.out)
        raise request_failure(options.pipeline, options.url, error, remedy) from error


def describe_stored(out: Path) -> str:
    """Return how an interrupted run that writes `out` is continued; empty if it has stored nothing.

    The text is one sentence without its end.
    """
    parts = Parts(out)
    stored = parts.done().rows
    return (
        f"{stored:,} rows are stored in {parts.folder}: run the same command to resume"
        if stored
        else ""
    )


async def _run(
    options: BulkOptions, table: Table, parts: Parts, report: Callable[[BulkProgress], None]
) -> BulkProgress:
    async with AsyncExitStack() as stack:
        job = await open_job(options, stack)
        scan = table.scan()
        wanted = wanted_columns(job, options, scan, options.file)
        writer = open_writer(table, scan, options.out, job.outputs, json_cells=options.json_cells)
        outputs = [*job.outputs, AnswerColumn(ERROR, ERROR)]
        columns = name_columns(options.pipeline, outputs, scan.columns)
        senders = {size: await job.open_sender(size, stack) for size in job.batch_sizes.sizes}
        with parts.locked(options.identity()):
            stored = parts.done()
            progress = BulkProgress(scan.rows, stored.rows, stored.rows, stored.failed, 0.0)
            read = table.chunks(wanted, job.chunk_rows, stored.rows)
            chunks = (prepare(chunk, options) for chunk in read)
            waiting = _Unstored(parts, writer, stored)
            began = time.monotonic()
            try:
                async with aclosing(send_chunks(senders, job.batch_sizes, chunks)) as answered:
                    async for chunk, answers in answered:
                        encoded = await asyncio.to_thread(writer.encode, chunk, columns, answers)
                        waiting.add(encoded, chunk.count, answers)
                        now_s = time.monotonic() - began
                        progress = replace(
                            progress, done=waiting.done, failed=waiting.failed, seconds=now_s
                        )
                        report(progress)
            finally:
                waiting.store()
            kept = columns if progress.failed else columns[:-1]  # no column of errors
            with parts.output() as out:
                writer.join(parts.done().paths, kept, out)
        return progress


class _Unstored:
    """Rows with results that are not yet stored as a part."""

    def __init__(self, parts: Parts, writer: Writer, stored: Done) -> None:
        self._parts, self._writer, self._stored = parts, writer, stored
        self._encoded: list[Any] = []
        self._began = time.monotonic()
        self.done, self.failed = stored.rows, stored.failed

    def add(self, encoded: object, rows: int, answers: Answers) -> None:
        self._encoded.append(encoded)
        self.done += rows
        self.failed += sum(error is not None for error in answers[ERROR])
        is_old = time.monotonic() - self._began >= _PART_S
        if self.done - self._stored.rows >= _PART_ROWS or is_old:
            self.store()

    def store(self) -> None:
        if self._encoded:
            before, content = self._stored, self._writer.pack(self._encoded)
            rows, failed = self.done - before.rows, self.failed - before.failed
            self._parts.add(before.rows, rows, failed, content)
            self._encoded, self._stored = [], Done(self.done, self.failed, [])
            self._began = time.monotonic()
