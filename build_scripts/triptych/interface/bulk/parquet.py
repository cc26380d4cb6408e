"""Rows in parquet files, with columns of any type; the only module that imports pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.interface.bulk.formats import AnswerColumn, Answers, RowChunk, Scan, Table

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise UserError(
        "--file",
        "must be .csv, .tsv or .jsonl where pyarrow is not installed",
        given=error,
        remedy=f"Run `{install_command('parquet')}`",
    ) from error

_GROUP_ROWS = 10_000
"""Minimum number of rows of a written row group, because parts may be small."""


class _Written:
    """Parquet files of rows with the columns of `schema`, before those of the results."""

    suffix = ".parquet"

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> Any:
        schema = self._extended(columns)
        added = []
        for column in columns:
            values = answers[column.output]
            values = _as_text(values) if _is_text(column) else values
            added.append(pa.array(values, schema.field(column.name).type))
        return pa.RecordBatch.from_arrays([*self._own(chunk), *added], schema=schema)

    def _own(self, chunk: RowChunk) -> Sequence[Any]:
        """Return the original columns of a chunk."""
        own: Sequence[Any] = chunk.original.columns
        return own

    def pack(self, encoded: Sequence[Any]) -> bytes:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, encoded[0].schema) as writer:
            writer.write_table(pa.Table.from_batches(encoded))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        waiting: list[Any] = []
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

    def _extended(self, columns: Sequence[AnswerColumn]) -> Any:
        added = [pa.field(column.name, _type(column)) for column in columns]
        return pa.schema([*self._schema, *added], self._schema.metadata)


class Parquet(_Written):
    """A parquet file, read a row group's batches at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                super().__init__(file.schema_arrow)
                self._rows = file.metadata.num_rows
        except pa.ArrowException as error:
            raise _not_parquet(path, error) from error

    def scan(self, names: Sequence[str]) -> Scan:
        columns = self._schema.names
        return Scan(self._rows, frozenset(names) & frozenset(columns), columns)

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        first = 0
        for batch in self._batches(size):
            before, first = first, first + batch.num_rows
            if first > skip:
                rows = batch.slice(max(0, skip - before))
                columns = {name: rows.column(column).to_pylist() for name, column in wanted.items()}
                yield RowChunk(first - rows.num_rows, rows.num_rows, columns, rows)

    def values(self, chunk: RowChunk) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = chunk.original.to_pylist()
        return rows

    def _batches(self, size: int) -> Iterator[Any]:
        try:
            with pq.ParquetFile(self.path) as file:
                yield from file.iter_batches(batch_size=size)
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(self.path, error) from error


class ParquetWriter(_Written):
    """Rows of another format as parquet: their columns are text, lists and objects as JSON."""

    def __init__(self, table: Table, names: Sequence[str]) -> None:
        super().__init__(pa.schema([pa.field(name, pa.string()) for name in names]))
        self._table = table

    def _own(self, chunk: RowChunk) -> Sequence[Any]:
        rows = self._table.values(chunk)
        return [
            pa.array(_as_text([_valid(row.get(name)) for row in rows]), pa.string())
            for name in self._schema.names
        ]


def _valid(value: Any) -> Any:
    """Return text with bytes that were no text escaped, since parquet has only UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _not_parquet(path: Path, error: Exception) -> UserError:
    remedy = "Give a parquet file, or change the file's extension"
    return UserError(str(path), "must be a parquet file", given=error, remedy=remedy)


def _is_text(column: AnswerColumn) -> bool:
    return column.dtype is np.object_ and column.dims == (1,)


def _as_text(values: Sequence[Any]) -> list[str | None]:
    """Return text columns: values that were parsed from JSON become JSON again."""
    return [
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]


def _type(column: AnswerColumn) -> Any:
    kind = pa.string() if column.dtype is np.object_ else pa.from_numpy_dtype(column.dtype)
    for _ in column.dims if column.dims != (1,) else ():
        kind = pa.list_(kind)
    return kind
