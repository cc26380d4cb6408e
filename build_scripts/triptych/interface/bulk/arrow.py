"""Results of rows as typed columns of Arrow: vectors of a fixed size, entities as nested lists."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.interface.bulk.files import ERROR, AnswerColumn, Answers

try:
    import pyarrow as pa
except ImportError as error:
    raise UserError(
        "pyarrow",
        "is required for rows in Arrow's columns",
        given=error,
        remedy=f"Run `{install_command('parquet')}`",
    ) from error

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
        kind = pa.string() if column.dtype is np.object_ else pa.from_numpy_dtype(column.dtype)
        if column.dims == (1,):
            return kind
        sizes = [(self._fixed and size) or -1 for size in column.dims]
        if self._fixed and column.output in _vector_outputs() and sizes[-1] < 0:
            size = self._sizes.get(column.output, _last_size(values))
            if size is None:
                return pa.null()
            sizes[-1] = self._sizes[column.output] = size
        for size in reversed(sizes):
            kind = pa.list_(kind, size)
        return kind


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
