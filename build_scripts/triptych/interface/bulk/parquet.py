"""Rows in parquet files, with columns of any type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.interface.bulk.files import AnswerColumn, Answers, RowChunk, Scan, Table
from triptych.interface.bulk.writers import rows_of

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem
except ImportError as error:
    raise UserError(
        "--file, --out",
        "must be .csv, .tsv or .jsonl where pyarrow is not installed",
        given=error,
        remedy=f"Run `{install_command('parquet')}`",
    ) from error

_GROUP_ROWS = 10_000
"""Minimum number of rows of a written row group, because parts may be small."""


class Parquet:
    """A parquet file, read a row group's batches at a time.

    Args:
        path: File.
        store: File system of the path; None for that of this machine.
        groups: First row group and the one after the last; None for all.

    Attributes:
        schema: Its columns with their types, and its metadata.
    """

    suffix = ".parquet"

    def __init__(
        self, path: Path, store: FileSystem | None = None, groups: tuple[int, int] | None = None
    ) -> None:
        self.path = path
        self._store = store
        try:
            with pq.ParquetFile(str(path), filesystem=store) as file:
                self.schema = file.schema_arrow
                self._groups = range(*(groups or (0, file.num_row_groups)))
                self._count = sum(file.metadata.row_group(at).num_rows for at in self._groups)
        except pa.ArrowException as error:
            raise _not_parquet(path, error) from error

    def scan(self) -> Scan:
        return Scan(self._count, self.schema.names)

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        first = 0
        for batch in self._batches(size):
            before, first = first, first + batch.num_rows
            if first > skip:
                rows = batch.slice(max(0, skip - before))
                columns = {name: rows.column(column).to_pylist() for name, column in wanted.items()}
                yield RowChunk(first - rows.num_rows, rows.num_rows, columns, rows)

    def _batches(self, size: int) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(str(self.path), filesystem=self._store) as file:
                yield from file.iter_batches(size, self._groups)
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(self.path, error) from error


class ParquetWriter:
    """Parquet files; columns of a text are text, with lists and objects as JSON."""

    def __init__(self, table: Table, names: Sequence[str]) -> None:
        text = pa.schema([pa.field(name, pa.string()) for name in names])
        self._schema = table.schema if isinstance(table, Parquet) else text

    def encode(
        self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers
    ) -> pa.RecordBatch:
        own = _original(chunk, self._schema.names).columns
        schema = self._extended(columns)
        added = []
        for column in columns:
            values = answers[column.output]
            kind = schema.field(column.name).type
            added.append(_texts(values) if kind == pa.string() else pa.array(values, kind))
        return pa.RecordBatch.from_arrays([*own, *added], schema=schema)

    def pack(self, encoded: Sequence[pa.RecordBatch]) -> bytes:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, encoded[0].schema) as writer:
            writer.write_table(pa.Table.from_batches(encoded))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        waiting: list[pa.Table] = []
        schema = self._extended(columns)
        with pq.ParquetWriter(out, schema) as writer:
            for path in parts:
                with pq.ParquetFile(path) as part:
                    waiting.append(part.read().select(schema.names))
                if sum(table.num_rows for table in waiting) >= _GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
            if waiting:
                writer.write_table(pa.concat_tables(waiting))

    def _extended(self, columns: Sequence[AnswerColumn]) -> pa.Schema:
        added = [pa.field(column.name, _type(column)) for column in columns]
        return pa.schema([*self._schema, *added], self._schema.metadata)


class PartWriter:
    """One parquet file of rows, whose columns of results have any type.

    Args:
        table: Rows that are read.
        names: Names of its columns.
        out: File that is written.
    """

    def __init__(self, table: Table, names: Sequence[str], out: Path) -> None:
        text = pa.schema([pa.field(name, pa.string()) for name in names])
        self._schema = table.schema if isinstance(table, Parquet) else text
        self._names, self._out = names, out
        self._waiting: list[pa.Table] = []
        self._file: pq.ParquetWriter | None = None

    def original(self, chunk: RowChunk) -> pa.Table:
        """Return the rows of a chunk without results."""
        return pa.Table.from_batches([_original(chunk, self._names)])

    def add(self, rows: pa.Table) -> None:
        """Write rows, some of them later."""
        self._waiting.append(rows)
        if sum(table.num_rows for table in self._waiting) >= _GROUP_ROWS:
            self._write()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (self._waiting or self._file is None):
            self._write()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        tables = self._waiting or [self._schema.empty_table()]
        rows = pa.concat_tables(tables)
        self._waiting = []
        if self._file is None:
            self._file = pq.ParquetWriter(self._out, rows.schema)
        self._file.write_table(rows)


def _original(chunk: RowChunk, names: Sequence[str]) -> pa.RecordBatch:
    """Return the rows of a chunk: those of Arrow with their types, others as text."""
    if isinstance(chunk.original, pa.RecordBatch):
        return chunk.original
    rows = rows_of(chunk)
    texts = [_texts([row.values.get(name) for row in rows]) for name in names]
    return pa.RecordBatch.from_arrays(texts, names=list(names))


def _not_parquet(path: Path, error: Exception) -> UserError:
    remedy = "Give a parquet file, or change the file's extension"
    return UserError(str(path), "must be a parquet file", given=error, remedy=remedy)


def _texts(values: Sequence[object]) -> pa.Array:
    """Return a column of text: other values as JSON, and bytes that were no text escaped."""
    texts = [
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]
    return pa.array(
        [text and text.encode("utf-8", "backslashreplace").decode() for text in texts], pa.string()
    )


def _type(column: AnswerColumn) -> pa.DataType:
    kind = pa.string() if column.dtype is np.object_ else pa.from_numpy_dtype(column.dtype)
    for _ in column.dims if column.dims != (1,) else ():
        kind = pa.list_(kind)
    return kind
