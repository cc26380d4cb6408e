"""File formats of rows: JSON lines, plain text, CSV and TSV.

A format reads chunks of rows, and writes them with additional columns for the results.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from triptych.base.errors import UserError, closest
from triptych.spec.traffic import PARAMETERS

ERROR = "error"
"""Column with the reason why a row has no result."""


class AnswerColumn(NamedTuple):
    """A column that a run adds.

    Attributes:
        name: Name in the written file: that of the output unless the rows have such a column.
        output: Output of the pipeline, or `ERROR`.
        dtype: numpy type of an element; object for text.
        dims: Dimensions of one row; ``(1,)`` is written as a plain value, others as lists.
    """

    name: str
    output: str
    dtype: type[np.generic] = np.object_
    dims: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of a file.

    Attributes:
        first: Index of the first row in the file.
        count: Number of rows.
        columns: Values of each row by input of the pipeline, as they stand in the file.
        faults: Reason why a row of the chunk cannot be sent.
        parameters: Request parameters of each row; empty if the format has none.
        original: Original content of the rows, which the format writes again.
    """

    first: int
    count: int
    columns: Mapping[str, Sequence[object]]
    original: Any
    faults: Mapping[int, str] = field(default_factory=dict)
    parameters: Sequence[Mapping[str, Any]] = ()


class Scan(NamedTuple):
    """Result of reading a file for the first time.

    Attributes:
        rows: Number of rows.
        names: Requested columns that exist.
        columns: All columns, or as many as a message may show.
    """

    rows: int
    names: frozenset[str]
    columns: Sequence[str]


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


class Table(Writer, Protocol):
    """A file of rows in one format, which it also writes.

    Attributes:
        suffix: Extension of the files that it writes.
    """

    path: Path
    suffix: str

    def scan(self, names: Sequence[str]) -> Scan:
        """Read through the file and look for a column of each of `names`.

        Raises:
            UserError: The file does not have its format.
        """

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        """Yield the rows after the first `skip` in chunks; `wanted` has the column by input."""

    def values(self, chunk: RowChunk) -> list[dict[str, Any]]:
        """Return the original rows of a chunk by the names of their columns."""


Answers = Mapping[str, Sequence[Any]]
"""Plain value of each row by output, None for none; includes `ERROR`."""


def name_columns(
    pipeline: str, outputs: Sequence[AnswerColumn], taken: frozenset[str]
) -> list[AnswerColumn]:
    """Return `outputs`, with the pipeline's name before names that the file has already.

    Raises:
        UserError: The file has that name too.
    """
    named = []
    for column in outputs:
        name = column.name if column.name not in taken else beside(pipeline, column.name)
        if name in taken:
            raise UserError(
                "--file",
                f"has both columns `{column.name}` and `{name}`, which results are written to",
                remedy="Rename one of them",
            )
        named.append(column._replace(name=name))
    return named


def beside(pipeline: str, name: str) -> str:
    """Return the alternative name of a result's column."""
    return f"{pipeline}.{name}"


def check_columns(wanted: Mapping[str, str], scan: Scan, path: Path) -> None:
    """Check that the file has all columns of `wanted` (column by input).

    Raises:
        UserError: A column is missing.
    """
    for name, column in wanted.items():
        if column not in scan.names:
            option = f"--{name.replace('_', '-')}-column"
            raise UserError(
                f"{path}: {column}",
                f"is not a column of the file; input `{name}` needs one",
                given=_list_columns(scan.columns),
                remedy=f"{closest(column, scan.columns)}Give the column with {option}",
            )


_MAX_SHOWN = 20
UTF_8 = "utf-8"


def _list_columns(columns: Sequence[str]) -> str:
    more = ", ..." if len(columns) > _MAX_SHOWN else ""
    return f"the columns {', '.join(columns[:_MAX_SHOWN])}{more}" if columns else "no column"


_FOREIGN = (
    (b"PK\x03\x04", "a zip file, such as .xlsx", "Export the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", "a file of an old office program, such as .xls", "Export it as CSV"),
    (b"PAR1", "a parquet file", "Give it the extension .parquet"),
    (b"\x1f\x8b", "a gzip file", "Decompress it"),
)
"""First bytes of files that are no text, what they are, and the remedy."""


def _check_text(path: Path, encoding: str) -> None:
    """Raise `UserError` if a file is no text in `encoding`, judged by its first bytes."""
    with path.open("rb") as file:  # a missing file is reported here
        start = file.read(1024)
    for mark, name, remedy in _FOREIGN:
        if start.startswith(mark):
            raise UserError(str(path), "must be text", given=name, remedy=remedy)
    if encoding == UTF_8 and start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        remedy = "Add --encoding utf-16"
        raise UserError(str(path), "must be text in UTF-8", given="UTF-16", remedy=remedy)
    if encoding == UTF_8 and b"\0" in start:
        remedy = "Give a file of text, or its encoding with --encoding"
        raise UserError(str(path), "must be text", given="bytes of value 0", remedy=remedy)


_UNDECODED = re.compile("[\udc80-\udcff]")
"""Characters that Python decodes from bytes that are not of an encoding."""


def check_decoded(text: str, encoding: str = UTF_8) -> None:
    """Raise `ValueError` if a text was decoded from bytes that are not of its encoding."""
    if not text.isascii() and (found := _UNDECODED.search(text)):
        byte = ord(found[0]) - 0xDC00
        raise ValueError(
            f"must be text in {encoding}. Given: byte {byte:#04x} at position {found.start()}"
        )


def encode_text(text: str) -> bytes:
    """Return text as UTF-8; what is no text, such as a byte of another encoding, is escaped."""
    return text.encode("utf-8", "backslashreplace")


def _open_text(path: Path, encoding: str, newline: str) -> IO[str]:
    name = "utf-8-sig" if encoding == UTF_8 else encoding
    return path.open(encoding=name, newline=newline, errors="surrogateescape")


class JsonLines:
    """Rows as JSON objects; a line is written unchanged, with results before its closing brace."""

    suffix = ".jsonl"

    def __init__(self, path: Path, encoding: str = UTF_8) -> None:
        _check_text(path, encoding)
        self.path = path
        self._encoding = encoding

    def scan(self, names: Sequence[str]) -> Scan:
        rows, found, columns = 0, set[str](), dict[str, None]()
        for _, line in self.lines():
            rows += 1
            try:
                row = self.parse(line)
            except ValueError:
                continue
            found |= {name for name in names if name in row}
            columns |= dict.fromkeys(row)
        return Scan(rows, frozenset(found), list(columns))

    def values(self, chunk: RowChunk) -> list[dict[str, Any]]:
        rows = []
        for line in chunk.original:
            try:
                rows.append(self.parse(line))
            except ValueError:
                rows.append({"line": line})
        return rows

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        lines = islice((line for _, line in self.lines()), skip, None)
        while batch := list(islice(lines, size)):
            columns: dict[str, list[object]] = {name: [] for name in wanted}
            faults, parameters = {}, []
            for row, line in enumerate(batch):
                values: dict[str, Any] = {}
                try:
                    values = self.parse(line)
                    parameters.append(_own_parameters(values))
                except ValueError as error:
                    faults[row] = str(error)
                    parameters.append({})
                for name, column in wanted.items():
                    columns[name].append(values.get(column))
            yield RowChunk(skip, len(batch), columns, batch, faults, parameters)
            skip += len(batch)

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        lines = []
        for row, line in enumerate(chunk.original):
            results = {column.name: answers[column.output][row] for column in columns}
            results = {name: value for name, value in results.items() if value is not None}
            try:
                own = self._own(line)
            except ValueError:
                own = json.dumps({"line": line})
            inner = own.strip()[1:-1].strip()
            answer = json.dumps(results, ensure_ascii=False)[1:]
            lines.append(f"{{{inner}{', ' if inner and results else ''}{answer}\n")
        return encode_text("".join(lines))

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        copy_parts(parts, out)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each line with its number, from 1."""
        # Only line feeds separate lines: a JSON string may contain other line separators.
        with _open_text(self.path, self._encoding, "\n") as file, _decoding(self.path):
            for number, line in enumerate(file, 1):
                if not self._is_blank(line):
                    yield number, line.rstrip("\r\n")

    def _is_blank(self, line: str) -> bool:
        return not line.strip()

    def _own(self, line: str) -> str:
        """Return the text of the JSON object in a line.

        Raises:
            ValueError: The line is not a JSON object.
        """
        self.parse(line)
        return line

    def parse(self, line: str) -> dict[str, Any]:
        """Return the row in a line.

        Raises:
            ValueError: The line is not a JSON object.
        """
        check_decoded(line, self._encoding)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"must be a JSON object. Given: {line[:80]}")
        return row


class PlainText(JsonLines):
    """One text per line, also for empty lines; written as JSON objects with `text`."""

    def _is_blank(self, line: str) -> bool:
        return False

    def _own(self, line: str) -> str:
        return json.dumps({"text": line}, ensure_ascii=False)

    def parse(self, line: str) -> dict[str, Any]:
        check_decoded(line, self._encoding)
        return {"text": line}


def copy_parts(parts: Sequence[Path], out: IO[bytes]) -> None:
    """Concatenate the parts of a text."""
    for path in parts:
        with path.open("rb") as part:
            shutil.copyfileobj(part, out)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Raise `UserError` for bytes that no row of the file can be read with."""
    try:
        yield
    except UnicodeError as error:
        raise UserError(
            str(path),
            "must be text in its encoding",
            given=error,
            remedy="Name the encoding of the file with --encoding",
        ) from error


def _own_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = values.get(PARAMETERS, {})
    if not isinstance(parameters, dict):
        raise ValueError(f"`{PARAMETERS}` must be an object. Given: {parameters!r:.80}")
    return parameters


_MAX_CELL = 1 << 24
"""Maximum number of characters in a cell. An unclosed quote makes one cell of all that follows."""


class Delimited:
    """Table with comma, semicolon (if its header has no comma) or tab between cells."""

    def __init__(self, path: Path, encoding: str = UTF_8, *, suffix: str = ".csv") -> None:
        self.path, self.suffix = path, suffix
        self._encoding = encoding
        csv.field_size_limit(_MAX_CELL)
        _check_text(path, encoding)
        self._separator = "\t" if suffix == ".tsv" else ","
        first = self._first_line()
        self._line_end = "\r\n" if first.endswith("\r\n") else "\n"
        if suffix == ".csv" and "," not in first and ";" in first:
            self._separator = ";"
        self._header = next(self._rows(), [])
        try:
            check_decoded("".join(self._header), encoding)
        except ValueError as error:
            raise UserError(
                f"{path}:1", str(error), remedy="Name the encoding of the file with --encoding"
            ) from error
        twice = {name for name in self._header if self._header.count(name) > 1}
        if twice or not self._header:
            raise UserError(
                str(path),
                "must begin with a header of unique column names",
                given=f"twice: {', '.join(sorted(twice))}" if twice else "no line",
                remedy="Fix the first line",
            )

    def scan(self, names: Sequence[str]) -> Scan:
        rows = sum(1 for _ in self._rows()) - 1
        return Scan(rows, frozenset(names) & frozenset(self._header), self._header)

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        rows = islice(self._rows(), 1 + skip, None)
        indexes = {name: self._header.index(column) for name, column in wanted.items()}
        while batch := list(islice(rows, size)):
            faults = {
                row: fault for row, cells in enumerate(batch) if (fault := self._fault(cells))
            }
            columns = {
                name: [None if row in faults else cells[index] for row, cells in enumerate(batch)]
                for name, index in indexes.items()
            }
            yield RowChunk(skip, len(batch), columns, batch, faults)
            skip += len(batch)

    def _fault(self, cells: Sequence[str]) -> str:
        width = len(self._header)
        if len(cells) != width:
            return f"must have {width} cells, as the header. Given: {len(cells)}"
        for name, cell in zip(self._header, cells, strict=True):
            try:
                check_decoded(cell, self._encoding)
            except ValueError as error:
                return f"`{name}` {error}"
        return ""

    def values(self, chunk: RowChunk) -> list[dict[str, Any]]:
        return [dict(zip(self._header, cells, strict=False)) for cells in chunk.original]

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        width = len(self._header)
        rows = []
        for row, cells in enumerate(chunk.original):
            # Surplus cells come last, so that they do not shift the results.
            own = (cells + [""] * width)[:width]
            results = [answer_cell(column, answers[column.output][row]) for column in columns]
            rows.append([*own, *results, *cells[width:]])
        return self._write(rows)

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        header = [*self._header, *(column.name for column in columns)]
        out.write(self._write([header]))
        if columns[-1].output == ERROR:
            copy_parts(parts, out)
            return
        for rows in read_parts(parts, self._separator, len(header)):
            out.write(self._write(rows))

    def _write(self, rows: Iterable[Sequence[str]]) -> bytes:
        return encode_cells(rows, self._separator, self._line_end)

    def _first_line(self) -> str:
        with _open_text(self.path, self._encoding, "") as file, _decoding(self.path):
            return file.readline(_MAX_CELL)

    def _rows(self) -> Iterator[list[str]]:
        with _open_text(self.path, self._encoding, "") as file, _decoding(self.path):
            reader = csv.reader(file, delimiter=self._separator, strict=True)
            try:
                yield from (cells for cells in reader if cells)
            except csv.Error as error:
                raise UserError(
                    f"{self.path}:{reader.line_num}",
                    "has a quote that is not closed, or not doubled within quotes",
                    given=error,
                    remedy="Fix the row that begins there or above",
                ) from error


def read_parts(parts: Sequence[Path], separator: str, width: int) -> Iterator[Iterator[list[str]]]:
    """Yield the rows of each part of a table, with the first `width` cells of each row."""
    for part in parts:
        with part.open(encoding="utf-8", newline="") as file:
            yield (row[:width] for row in csv.reader(file, delimiter=separator, strict=True))


def encode_cells(rows: Iterable[Sequence[str]], separator: str, line_end: str = "\n") -> bytes:
    """Return rows of a table as text in UTF-8."""
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator=line_end).writerows(rows)
    return encode_text(text.getvalue())


def cell_of(value: Any) -> str:
    """Return a value as the text of a cell; lists and objects as JSON."""
    if value is None or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def answer_cell(column: AnswerColumn, value: Any) -> str:
    """Return an answer as the text of a cell; a list of one label or number as this value."""
    is_one = column.dims != (1,) and isinstance(value, list) and len(value) == 1
    return cell_of(value[0] if is_one else value)


def _open_parquet(path: Path, _encoding: str) -> Table:
    from triptych.interface.bulk.parquet import Parquet

    return Parquet(path)


FORMATS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": Delimited,
    ".tsv": partial(Delimited, suffix=".tsv"),
    ".jsonl": JsonLines,
    ".parquet": _open_parquet,
}
"""Format by file extension; a file with another extension has a text per line."""


def open_rows(path: Path, encoding: str = UTF_8, suffix: str | None = None) -> Table:
    """Return the rows of `path`.

    Args:
        path: File of rows.
        encoding: Name of the encoding of its text.
        suffix: Extension of its format; None for that of the file.

    Raises:
        UserError: The file cannot be read, or the encoding is unknown.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise UserError(
            "--encoding",
            "must be the name of an encoding that Python has",
            given=encoding,
            remedy="Write for example --encoding latin-1",
        ) from error
    kind = path.suffix.lower() if suffix is None else suffix
    try:
        return FORMATS.get(kind, PlainText)(path, name)
    except OSError as error:
        raise UserError(
            "--file",
            "is not a readable file",
            given=f"{path} ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
