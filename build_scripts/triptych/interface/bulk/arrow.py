"""Rows as typed columns of Arrow, in memory and in Parquet files.

In results, vectors are lists of a fixed size, and entities nested lists.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.base.extras import imports_of_extra
from triptych.interface.bulk.files import ERROR, AnswerColumn, Answers, RowChunk, Scan, Table
from triptych.interface.bulk.writers import rows_of

with imports_of_extra(
    "parquet",
    "pyarrow",
    "is required for Parquet files and for columns of Arrow; .csv, .tsv and .jsonl need none",
):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem

_GROUP_ROWS = 10_000
"""Minimum number of rows of a written row group, because parts may be small."""

_ENTITIES = "entities"
_ENTITY_FIELDS = {
    "entity": pa.string(),
    "text": pa.string(),
    "start": pa.int32(),
    "end": pa.int32(),
    "score": pa.float32(),
}
_VECTOR_SIZES = ("dimensions", "bytes")
"""Last dimension of outputs whose rows have one size, which the model or a parameter determines."""


class ArrowColumns:
    """Types of the columns of results; sizes of vectors are known from the first result on.

    Args:
        columns: Columns of results.
        fixed: Whether vectors have a fixed size. Arrow reads no such vector from a Parquet file in
            which one is null.
    """

    def __init__(self, columns: Sequence[AnswerColumn], *, fixed: bool = True) -> None:
        self._columns = columns
        self._fixed = fixed
        self._sizes: dict[str, int] = {}  # Size of a vector by output

    def append(self, rows: pa.Table, answers: Answers) -> pa.Table:
        """Return `rows` with a column for each column of results; a row without a result is null.

        Vectors of a fixed size have no column for an encoding that was not requested. Where all
        rows failed, they have the type null, which joins with any other.
        """
        every = not self._fixed or None not in answers[ERROR]
        for column in self._columns:
            values = answers[column.output]
            if every or any(values) or column.output not in _vector_outputs():
                array = pa.array(values, self._type(column, values))
                rows = rows.append_column(column.name, array)
        return rows

    def _type(self, column: AnswerColumn, values: Sequence[object]) -> pa.DataType:
        if column.output == _ENTITIES and column.dims == (1,):
            return pa.list_(pa.struct(list(_ENTITY_FIELDS.items())))
        if column.dims == (1,):
            return _type(column)
        sizes = [(self._fixed and size) or -1 for size in column.dims]
        if self._fixed and column.output in _vector_outputs() and sizes[-1] < 0:
            size = self._sizes.get(column.output, _last_size(values))
            if size is None:
                return pa.null()
            sizes[-1] = self._sizes[column.output] = size
        return _type(column, sizes)


def _last_size(values: Sequence[object]) -> int | None:
    """Return the last dimension of the first value that is not None."""
    value: Any = next((each for each in values if each is not None), None)
    return None if value is None else np.shape(value)[-1]


@functools.cache
def _vector_outputs() -> frozenset[str]:
    from triptych.tasks.catalog import TASKS

    tensors = (tensor for task in TASKS.values() for tensor in task.outputs)
    return frozenset(tensor.name for tensor in tensors if tensor.dims[-1] in _VECTOR_SIZES)


def to_table(batch: Mapping[str, NDArray[Any]] | pa.Table) -> pa.Table:
    """Return columns of numpy, [rows, …], as a table; a table is returned as it is.

    Raises:
        UserError: The values of a column have no common type, or the columns differ in length.
    """
    if isinstance(batch, pa.Table):
        return batch
    columns = {}
    for name, values in batch.items():
        plain = values if values.ndim == 1 else values.tolist()
        try:
            columns[name] = pa.array(plain, from_pandas=values.dtype == np.object_)
        except pa.ArrowException as error:
            remedy = "Convert its values to one type, or leave the column out"
            rule = "has values of several types"
            raise UserError(name, rule, given=error, remedy=remedy) from error
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(
            "batch",
            "has columns of different lengths",
            given=lengths,
            remedy="Give each row a value in each column",
        )
    return pa.table(columns)


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
        for batch in self._batches(size):
            rows = batch.slice(min(skip, batch.num_rows))
            skip -= batch.num_rows - rows.num_rows
            if rows.num_rows:
                yield make_chunk(rows, wanted)

    def _batches(self, size: int) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(str(self.path), filesystem=self._store) as file:
                yield from file.iter_batches(size, self._groups)
        except pa.ArrowException as error:
            raise _not_parquet(self.path, error) from error
        except OSError as error:  # a damaged page, or a store that is away
            remedy = "Check the file and its store, and run the same command again"
            raise UserError(str(self.path), "cannot be read", given=error, remedy=remedy) from error


class ParquetWriter:
    """Parquet files; columns of a text are text, with lists and objects as JSON."""

    def __init__(self, table: Table, names: Sequence[str]) -> None:
        self._schema = read_schema(table, names)

    def encode(
        self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers
    ) -> pa.Table:
        own = original_rows(chunk, self._schema.names).columns
        schema = self._extended(columns)
        added = []
        for column in columns:
            values = answers[column.output]
            kind = schema.field(column.name).type
            added.append(_texts(values) if kind == pa.string() else pa.array(values, kind))
        return pa.Table.from_arrays([*own, *added], schema=schema)

    def pack(self, encoded: Sequence[pa.Table]) -> bytes:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, encoded[0].schema) as writer:
            writer.write_table(pa.concat_tables(encoded))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        schema = self._extended(columns)
        with RowGroups(out, schema) as groups:
            for path in parts:
                with pq.ParquetFile(path) as part:
                    groups.add(part.read().select(schema.names))

    def _extended(self, columns: Sequence[AnswerColumn]) -> pa.Schema:
        added = [pa.field(column.name, _type(column)) for column in columns]
        return pa.schema([*self._schema, *added], self._schema.metadata)


class RowGroups:
    """A Parquet file that is written, with few row groups.

    Args:
        out: File.
        schema: Schema of a file without rows.
    """

    def __init__(self, out: Path | IO[bytes], schema: pa.Schema) -> None:
        self._out, self._schema = out, schema
        self._waiting: list[pa.Table] = []
        self._file: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table) -> None:
        """Write rows, some of them later."""
        self._waiting.append(rows)
        if sum(table.num_rows for table in self._waiting) >= _GROUP_ROWS:
            self._write()

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (self._waiting or self._file is None):
            self._write()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        rows = pa.concat_tables(self._waiting or [self._schema.empty_table()])
        self._waiting = []
        if self._file is None:
            self._file = pq.ParquetWriter(self._out, rows.schema)
        self._file.write_table(rows)


def make_chunk(rows: pa.Table | pa.RecordBatch, wanted: Mapping[str, str]) -> RowChunk:
    """Return rows as a chunk; `wanted` has the column by input."""
    columns = {name: rows.column(column).to_pylist() for name, column in wanted.items()}
    return RowChunk(rows.num_rows, columns, rows)


def read_schema(table: Table, names: Sequence[str]) -> pa.Schema:
    """Return the schema of rows with columns of these names."""
    text = pa.schema([pa.field(name, pa.string()) for name in names])
    return table.schema if isinstance(table, Parquet) else text


def original_rows(chunk: RowChunk, names: Sequence[str]) -> pa.Table:
    """Return the rows of a chunk: those of Arrow with their types, others as text."""
    if isinstance(chunk.original, pa.RecordBatch):
        return pa.Table.from_batches([chunk.original])
    rows = rows_of(chunk)
    texts = [_texts([row.values.get(name) for row in rows]) for name in names]
    return pa.Table.from_arrays(texts, names=list(names))


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


def _type(column: AnswerColumn, sizes: Sequence[int] = ()) -> pa.DataType:
    """Return the type of a column; `sizes` has the size of each dimension, -1 for any."""
    kind = pa.string() if column.dtype is np.object_ else pa.from_numpy_dtype(column.dtype)
    for size in reversed(sizes or [-1] * (len(column.dims) if column.dims != (1,) else 0)):
        kind = pa.list_(kind, size)
    return kind
