"""Writers of rows in another format than that of the file that was read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from triptych.base.errors import UserError
from triptych.interface.bulk.formats import (
    ERROR,
    FORMATS,
    AnswerColumn,
    Answers,
    RowChunk,
    Scan,
    Table,
    Writer,
    answer_cell,
    cell_of,
    copy_parts,
    encode_cells,
    encode_text,
    read_parts,
)

VECTORS = ".npy"
OUTPUTS = (*FORMATS, VECTORS)
"""Extensions of files that can be written."""
MAX_CELL_NUMBERS = 16
"""Maximum number of numbers of one output in a cell, unless JSON in cells is asked for."""


def open_writer(
    table: Table, scan: Scan, out: Path, outputs: Sequence[AnswerColumn], *, json_cells: bool
) -> Writer:
    """Return the writer of a run: the file's own format, or a conversion.

    Raises:
        UserError: The format of `out` cannot hold the outputs.
    """
    suffix = out.suffix.lower()
    if suffix in (".csv", ".tsv") and not json_cells:
        _check_cells(out, outputs)
    if suffix == VECTORS:
        return VectorWriter(outputs)
    if suffix == table.suffix:
        return table
    if suffix == ".parquet":
        from triptych.interface.bulk.parquet import ParquetWriter

        return ParquetWriter(table, scan.columns)
    if suffix == ".jsonl":
        return JsonWriter(table)
    return DelimitedWriter(table, scan.columns, "\t" if suffix == ".tsv" else ",")


def _check_cells(out: Path, outputs: Sequence[AnswerColumn]) -> None:
    """Raise `UserError` for a vector; lists of scores beside lists of labels are short."""
    named = {output.dims for output in outputs if output.dtype is np.object_}
    for output in outputs:
        is_short = 0 not in output.dims and np.prod(output.dims) <= MAX_CELL_NUMBERS
        if output.dtype is not np.object_ and not is_short and output.dims not in named:
            raise UserError(
                "--out",
                f"has cells, and the output `{output.output}` is a vector",
                given=out,
                remedy=f"Name it {out.stem}.parquet or {out.stem}.npy, or add --json-cells to "
                "write vectors as JSON",
            )


def plain_value(value: Any) -> Any:
    """Return a value of a row for JSON: bytes in base64, times and decimals as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {name: plain_value(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class JsonWriter:
    """Rows of another format as JSON objects, with their results."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        lines = []
        for row, values in enumerate(self._table.values(chunk)):
            results = {column.name: answers[column.output][row] for column in columns}
            given = {name: value for name, value in results.items() if value is not None}
            lines.append(json.dumps({**plain_value(values), **given}, ensure_ascii=False) + "\n")
        return encode_text("".join(lines))

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        copy_parts(parts, out)


class DelimitedWriter:
    """Rows of another format as a table with a header; values that are no text become JSON."""

    def __init__(self, table: Table, names: Sequence[str], separator: str) -> None:
        self._table = table
        self._names = names
        self._separator = separator

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        rows = []
        for row, values in enumerate(self._table.values(chunk)):
            own = [cell_of(plain_value(values.get(name))) for name in self._names]
            results = [answer_cell(column, answers[column.output][row]) for column in columns]
            rows.append([*own, *results])
        return encode_cells(rows, self._separator)

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        header = [*self._names, *(column.name for column in columns)]
        out.write(encode_cells([header], self._separator))
        for rows in read_parts(parts, self._separator, len(header)):
            out.write(encode_cells(rows, self._separator))


class VectorWriter:
    """The vectors of a pipeline as one array [rows, …] in the format of `numpy.save`.

    A row without a result is NaN, or 0 in an array of integers.
    """

    def __init__(self, outputs: Sequence[AnswerColumn]) -> None:
        """Raise `UserError` if the pipeline has not exactly one output of vectors."""
        vectors = [
            output for output in outputs if output.dtype is not np.object_ and output.dims != (1,)
        ]
        if len(vectors) != 1:
            raise UserError(
                "--out",
                f"must not end with {VECTORS}: the pipeline has not exactly one output of vectors",
                given=", ".join(output.output for output in outputs if output.output != ERROR),
                remedy="Name it for example answers.parquet",
            )
        self._output = vectors[0]

    def encode(
        self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers
    ) -> list[Any]:
        return list(answers[self._output.output])

    def pack(self, encoded: Sequence[list[Any]]) -> bytes:
        rows = [row for chunk in encoded for row in chunk]
        dtype = np.dtype(self._output.dtype)
        known = next((np.asarray(row, dtype) for row in rows if row is not None), None)
        fill = np.nan if dtype.kind == "f" else 0
        empty = np.full(() if known is None else known.shape, fill, dtype)
        array = np.stack([empty if row is None else np.asarray(row, dtype) for row in rows])
        content = io.BytesIO()
        np.save(content, array)
        return content.getvalue()

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        dtype = np.dtype(self._output.dtype)
        shapes = [np.load(part, mmap_mode="r").shape for part in parts]
        widths = {shape[1:] for shape in shapes if shape[1:]}
        if len(widths) > 1:
            raise UserError(
                "--out",
                f"must not end with {VECTORS}: the vectors differ in size",
                given=", ".join(map(str, sorted(widths))),
                remedy="Name it for example answers.parquet, and run the command again",
            )
        width = next(iter(widths), ())
        whole = (sum(shape[0] for shape in shapes), *width)
        np.lib.format.write_array_header_1_0(  # type: ignore[no-untyped-call]
            out, {"descr": dtype.str, "fortran_order": False, "shape": whole}
        )
        for part in parts:
            array = np.load(part)
            # A part without any result does not know the width of the others.
            missing = array.ndim == 1 and bool(width)
            rows = np.full((len(array), *width), array[0], dtype) if missing else array
            out.write(rows.tobytes())
