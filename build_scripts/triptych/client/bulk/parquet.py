"""Rows in parquet files, with columns of any type; the only module that imports pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from triptych.base.errors import UserError
from triptych.client.bulk.formats import AnswerColumn, Answers, RowChunk, Scan

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise UserError(
        "--file",
        "must be .csv, .tsv or .jsonl where pyarrow is not installed",
        given=error,
        remedy="Run `pip install triptych[parquet]`",
    ) from error

_GROUP_ROWS = 10_000
"""Minimum number of rows of a written row group, because parts may be small."""


class Parquet:
    """A parquet file, read a row group's batches at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                self._schema, self._rows = file.schema_arrow, file.metadata.num_rows
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

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> Any:
        schema = self._extended(columns)
        added = []
        for column in columns:
            values = answers[column.output]
            values = _as_text(values) if _is_text(column) else values
            added.append(pa.array(values, schema.field(column.name).type))
        return pa.RecordBatch.from_arrays([*chunk.original.columns, *added], schema=schema)

    def pack(self, encoded: Sequence[Any]) -> bytes:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, encoded[0].schema) as writer:
            writer.write_table(pa.Table.from_batches(encoded))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        waiting: list[Any] = []
        with pq.ParquetWriter(out, self._extended(columns)) as writer:
            for path in parts:
                with pq.ParquetFile(path) as part:
                    waiting.append(part.read())
                if sum(table.num_rows for table in waiting) >= _GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
            if waiting:
                writer.write_table(pa.concat_tables(waiting))

    def _batches(self, size: int) -> Iterator[Any]:
        try:
            with pq.ParquetFile(self.path) as file:
                yield from file.iter_batches(batch_size=size)
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(self.path, error) from error

    def _extended(self, columns: Sequence[AnswerColumn]) -> Any:
        added = [pa.field(column.name, _type(column)) for column in columns]
        return pa.schema([*self._schema, *added], self._schema.metadata)


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
