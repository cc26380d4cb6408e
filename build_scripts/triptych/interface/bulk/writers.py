"""Writers of rows with their results: parts first, then the whole file."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from triptych.base.errors import UserError
from triptych.interface.bulk.files import (
    ERROR,
    AnswerColumn,
    Answers,
    Delimited,
    FileRow,
    RowChunk,
    Scan,
    Table,
)

VECTORS = ".npy"
OUTPUTS = (".csv", ".tsv", ".jsonl", ".parquet", VECTORS)
"""Extensions of files that can be written."""
MAX_CELL_NUMBERS = 16
"""Maximum number of numbers of one output in a cell, unless JSON in cells is asked for."""


class Writer(Protocol):
    """Writer of the rows of a file with their results; parts first, then the whole file."""

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> Any:
        """Return `chunk` with its results in a form that `pack` takes."""

    def pack(self, encoded: Sequence[Any]) -> bytes:
        """Return the content of a part."""

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        """Write the whole file from its parts; the last column of parts is that of errors.

        Without a column of errors in `columns`, that of the parts is left out.
        """


def open_writer(
    table: Table, scan: Scan, out: Path, outputs: Sequence[AnswerColumn], *, json_cells: bool
) -> Writer:
    """Return the writer of the format of `out`.

    Raises:
        UserError: The format of `out` cannot hold the outputs.
    """
    suffix = out.suffix.lower()
    if suffix in (".csv", ".tsv") and not json_cells:
        _check_cells(out, outputs)
    if suffix == VECTORS:
        return VectorWriter(outputs)
    if suffix == ".parquet":
        from triptych.interface.bulk.arrow import ParquetWriter

        return ParquetWriter(table, scan.columns)
    if suffix == ".jsonl":
        return JsonWriter()
    if isinstance(table, Delimited) and table.suffix == suffix:
        return DelimitedWriter(scan.columns, table.separator, table.line_end)
    return DelimitedWriter(scan.columns, "\t" if suffix == ".tsv" else ",", "\n")


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


def rows_of(chunk: RowChunk) -> Sequence[FileRow]:
    """Return the rows of a chunk."""
    if isinstance(chunk.original, Sequence):
        return chunk.original
    return [FileRow(values) for values in chunk.original.to_pylist()]


def plain_value(value: object) -> object:
    """Return a value of a row for JSON: bytes in base64, times and decimals as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {name: plain_value(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _encode_text(text: str) -> bytes:
    """Return text as UTF-8; what is no text, such as a byte of another encoding, is escaped."""
    return text.encode("utf-8", "backslashreplace")


class _TextWriter:
    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        for path in parts:
            with path.open("rb") as part:
                shutil.copyfileobj(part, out)


class JsonWriter(_TextWriter):
    """JSON objects; those of the file are written unchanged, with results before their brace."""

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        lines = []
        for index, row in enumerate(rows_of(chunk)):
            results = {column.name: answers[column.output][index] for column in columns}
            results = {name: value for name, value in results.items() if value is not None}
            own = row.line or json.dumps(plain_value(row.values), ensure_ascii=False)
            inner = own.strip()[1:-1].strip()
            answer = json.dumps(results, ensure_ascii=False)[1:]
            lines.append(f"{{{inner}{', ' if inner and results else ''}{answer}\n")
        return _encode_text("".join(lines))


class DelimitedWriter(_TextWriter):
    """A table with a header; values that are no text become JSON."""

    def __init__(self, names: Sequence[str], separator: str, line_end: str) -> None:
        self._names, self._separator, self._line_end = names, separator, line_end

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        width, rows = len(self._names), []
        for index, row in enumerate(rows_of(chunk)):
            own = list(row.cells) or [_cell(plain_value(row.values.get(n))) for n in self._names]
            own += [""] * (width - len(own))
            results = [_answer_cell(column, answers[column.output][index]) for column in columns]
            # Surplus cells come last, so that they do not shift the results.
            rows.append([*own[:width], *results, *own[width:]])
        return self._write(rows)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        header = [*self._names, *(column.name for column in columns)]
        out.write(self._write([header]))
        if columns[-1].output == ERROR:
            super().join(parts, columns, out)
            return
        for path in parts:
            out.write(self._write(row[: len(header)] for row in self._read(path)))

    def _read(self, path: Path) -> Iterator[list[str]]:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.reader(file, delimiter=self._separator, strict=True)

    def _write(self, rows: Iterable[Sequence[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._separator, lineterminator=self._line_end).writerows(rows)
        return _encode_text(text.getvalue())


def _cell(value: object) -> str:
    """Return a value as the text of a cell; lists and objects as JSON."""
    if value is None or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _answer_cell(column: AnswerColumn, value: object) -> str:
    """Return an answer as the text of a cell; a list of one label or number as this value."""
    if column.dims != (1,) and isinstance(value, list) and len(value) == 1:
        value = value[0]
    return _cell(value)


class VectorWriter:
    """The vectors of a pipeline as one array [rows, …] in the format of `numpy.save`.

    A row without a result is NaN, or 0 in an array of integers.
    """

    def __init__(self, outputs: Sequence[AnswerColumn]) -> None:
        """Raise `UserError` if the pipeline has not exactly one output of vectors."""
        vectors = [
            output for output in outputs if output.dtype is not np.object_ and output.dims != (1,)
        ]
        # The others are its encodings: `embedding_int8` of `embedding`.
        vectors = [
            one for one in vectors if all(each.output.startswith(one.output) for each in vectors)
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
    ) -> list[object]:
        return list(answers[self._output.output])

    def pack(self, encoded: Sequence[list[object]]) -> bytes:
        rows = [row for chunk in encoded for row in chunk]
        dtype = np.dtype(self._output.dtype)
        known = next((np.asarray(row, dtype) for row in rows if row is not None), None)
        if known is not None and not known.size:
            raise UserError(
                "--out",
                f"must not end with {VECTORS}: the rows have another encoding than this output",
                given=self._output.output,
                remedy="Leave out the parameter `encoding`, or name it for example answers.parquet",
            )
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
