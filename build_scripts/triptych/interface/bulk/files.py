"""Files of rows that are read: JSON lines, plain text, CSV and TSV; Parquet is in `arrow`.

Python's `csv` and `json` read them, not pyarrow: a bad row must fail alone and in its place, and
cells and lines are written again as they stand in the file.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from triptych.base.errors import UserError, closest
from triptych.spec.traffic import PARAMETERS

ERROR = "error"
"""Column with the reason why a row has no result."""


class AnswerColumn(NamedTuple):
    """A column that a run adds."""

    name: str  # Name in the written file: that of the output unless the rows have such a column
    output: str  # Output of the pipeline, or `ERROR`
    dtype: type[np.generic] = np.object_  # numpy type of an element; object for text
    # Dimensions of one row; ``(1,)`` is written as a plain value, others as lists.
    dims: tuple[int, ...] = (1,)


class FileRow(NamedTuple):
    """A row of a file."""

    # Values by column; of a line that is no JSON object, the line as `line`.
    values: Mapping[str, object]
    fault: str = ""  # Reason why it cannot be sent; empty for none
    line: str = ""  # Its JSON object as it stands in the file; empty in other formats
    cells: Sequence[str] = ()  # Its cells as they stand in the file; empty in other formats


class TypedRows(Protocol):
    """Rows with columns of any type: a RecordBatch of pyarrow."""

    def to_pylist(self) -> list[dict[str, object]]:
        """Return the values of each row by column."""


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of a file."""

    count: int  # Number of rows
    # Values of each row by input of the pipeline, as they stand in the file.
    columns: Mapping[str, Sequence[object]]
    original: Sequence[FileRow] | TypedRows  # The rows, with all columns of the file
    # Reason why a row of the chunk cannot be sent.
    faults: Mapping[int, str] = field(default_factory=dict)
    # Request parameters of each row; empty if the format has none.
    parameters: Sequence[Mapping[str, object]] = ()


class Scan(NamedTuple):
    """Result of reading a file for the first time: the number of its rows, and its columns."""

    rows: int
    columns: Sequence[str]


class Table(Protocol):
    """A file of rows in one format."""

    path: Path
    suffix: str  # Extension of files of its format

    def scan(self) -> Scan:
        """Read through the file.

        Raises:
            UserError: The file does not have its format.
        """

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        """Yield the rows after the first `skip` in chunks; `wanted` has the column by input."""


Answers = Mapping[str, Sequence[object]]
"""Plain value of each row by output, None for none; includes `ERROR`."""


def name_columns(
    pipeline: str, outputs: Sequence[AnswerColumn], taken: Sequence[str]
) -> list[AnswerColumn]:
    """Return `outputs`, with the pipeline's name before names that the file has already.

    Raises:
        UserError: The file has that name too.
    """
    named = []
    for column in outputs:
        name = column.name if column.name not in taken else f"{pipeline}.{column.name}"
        if name in taken:
            raise UserError(
                "--file",
                f"has both columns `{column.name}` and `{name}`, which results are written to",
                remedy="Rename one of them",
            )
        named.append(column._replace(name=name))
    return named


def check_columns(
    wanted: Mapping[str, str], columns: Sequence[str], path: Path | None = None
) -> None:
    """Check that a file, or a batch if `path` is None, has all columns of `wanted` (by input).

    Raises:
        UserError: A column is missing.
    """
    for name, column in wanted.items():
        if column not in columns:
            key = name.replace("_", "-")
            option = f"--{key}-column" if path else f"columns={{'{name}': COLUMN}}"
            raise UserError(
                f"{path}: {column}" if path else column,
                f"is not a column of the {'file' if path else 'batch'}; input `{name}` needs one",
                given=_list_columns(columns),
                remedy=f"{closest(column, columns)}Give the column with {option}",
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


class _TextTable:
    """Rows of a text, which a subclass splits."""

    suffix = ".jsonl"

    def __init__(self, path: Path, encoding: str = UTF_8) -> None:
        _check_text(path, encoding)
        self.path = path
        self._encoding = encoding

    def scan(self) -> Scan:
        rows, columns = 0, dict[str, None]()
        for rows, row in enumerate(self.rows(), 1):  # noqa: B007
            if row.line or not row.fault:  # else the line is no object
                columns |= dict.fromkeys(row.values)
        return Scan(rows, list(columns))

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        rows = islice(self.rows(), skip, None)
        while batch := list(islice(rows, size)):
            columns = {
                name: [None if row.fault else row.values.get(column) for row in batch]
                for name, column in wanted.items()
            }
            faults = {index: row.fault for index, row in enumerate(batch) if row.fault}
            yield RowChunk(len(batch), columns, batch, faults, self._parameters(batch))

    def rows(self) -> Iterator[FileRow]:
        """Yield the rows of the file."""
        raise NotImplementedError

    def _parameters(self, rows: Sequence[FileRow]) -> Sequence[Mapping[str, object]]:
        """Return the request parameters of rows."""
        return ()

    @contextmanager
    def _open(self, newline: str) -> Iterator[IO[str]]:
        """Open the text; bytes that are not of its encoding become surrogates, for `check_decoded`.

        Raises:
            UserError: The encoding reads no row of the file.
        """
        name = "utf-8-sig" if self._encoding == UTF_8 else self._encoding
        try:
            with self.path.open(encoding=name, newline=newline, errors="surrogateescape") as file:
                yield file
        except UnicodeError as error:
            raise UserError(
                str(self.path),
                "must be text in its encoding",
                given=error,
                remedy="Name the encoding of the file with --encoding",
            ) from error


class JsonLines(_TextTable):
    """Rows as JSON objects; empty lines are none."""

    def rows(self) -> Iterator[FileRow]:
        for _, line in self.lines():
            try:
                values = self.parse(line)
            except ValueError as error:
                yield FileRow({"line": line}, str(error))
                continue
            own, fault = values.get(PARAMETERS, {}), ""
            if not isinstance(own, dict):
                fault = f"`{PARAMETERS}` must be an object. Given: {own!r:.80}"
            yield FileRow(values, fault, line)

    def _parameters(self, rows: Sequence[FileRow]) -> Sequence[Mapping[str, object]]:
        given = (row.values.get(PARAMETERS) for row in rows)
        return [own if isinstance(own, dict) else {} for own in given]

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each line with its number, from 1."""
        # Only line feeds separate lines: a JSON string may contain other line separators.
        with self._open("\n") as file:
            for number, line in enumerate(file, 1):
                if not self._is_blank(line):
                    yield number, line.rstrip("\r\n")

    def _is_blank(self, line: str) -> bool:
        return not line.strip()

    def parse(self, line: str) -> dict[str, object]:
        """Return the values in a line.

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

    def rows(self) -> Iterator[FileRow]:
        for _, line in self.lines():
            try:
                yield FileRow(self.parse(line))
            except ValueError as error:
                yield FileRow({"text": line}, str(error))

    def _is_blank(self, line: str) -> bool:
        return False

    def parse(self, line: str) -> dict[str, object]:
        check_decoded(line, self._encoding)
        return {"text": line}


class FileFolder(_TextTable):
    """A row for each file of a folder, such as an image, by name; written as JSON with `image`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = sorted(
            each.name for each in path.iterdir() if each.is_file() and each.name[0] != "."
        )

    def rows(self) -> Iterator[FileRow]:
        return (FileRow({"image": name}) for name in self._names)


_MAX_CELL = 1 << 24
"""Maximum number of characters in a cell. An unclosed quote makes one cell of all that follows."""


class Delimited(_TextTable):
    """Table with comma, semicolon (if its header has no comma) or tab between cells.

    Attributes:
        separator: Character between cells.
        line_end: End of a row.
    """

    def __init__(self, path: Path, encoding: str = UTF_8, *, suffix: str = ".csv") -> None:
        super().__init__(path, encoding)
        self.suffix = suffix
        csv.field_size_limit(_MAX_CELL)
        self.separator = "\t" if suffix == ".tsv" else ","
        with self._open("") as file:
            first = file.readline(_MAX_CELL)
        self.line_end = "\r\n" if first.endswith("\r\n") else "\n"
        if suffix == ".csv" and "," not in first and ";" in first:
            self.separator = ";"
        self._names = next(self._cells(), [])
        try:
            check_decoded("".join(self._names), encoding)
        except ValueError as error:
            raise UserError(
                f"{path}:1", str(error), remedy="Name the encoding of the file with --encoding"
            ) from error
        twice = {name for name in self._names if self._names.count(name) > 1}
        if twice or not self._names:
            raise UserError(
                str(path),
                "must begin with a header of unique column names",
                given=f"twice: {', '.join(sorted(twice))}" if twice else "no line",
                remedy="Fix the first line",
            )

    def rows(self) -> Iterator[FileRow]:
        for cells in islice(self._cells(), 1, None):
            yield FileRow(
                dict(zip(self._names, cells, strict=False)), self._fault(cells), cells=cells
            )

    def scan(self) -> Scan:
        return Scan(sum(1 for _ in self._cells()) - 1, self._names)

    def _fault(self, cells: Sequence[str]) -> str:
        width = len(self._names)
        if len(cells) != width:
            return f"must have {width} cells, as the header. Given: {len(cells)}"
        for name, cell in zip(self._names, cells, strict=True):
            try:
                check_decoded(cell, self._encoding)
            except ValueError as error:
                return f"`{name}` {error}"
        return ""

    def _cells(self) -> Iterator[list[str]]:
        with self._open("") as file:
            reader = csv.reader(file, delimiter=self.separator, strict=True)
            try:
                yield from (cells for cells in reader if cells)
            except csv.Error as error:
                raise UserError(
                    f"{self.path}:{reader.line_num}",
                    "has a quote that is not closed, or not doubled within quotes",
                    given=error,
                    remedy="Fix the row that begins there or above",
                ) from error


def open_rows(path: Path, encoding: str = UTF_8, suffix: str | None = None) -> Table:
    """Return the rows of `path`; a file with an unknown extension has a text per line.

    Args:
        path: File of rows, or folder with a file for each row.
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
        if path.is_dir():
            return FileFolder(path)
        if kind == ".parquet":
            from triptych.interface.bulk.arrow import Parquet

            return Parquet(path)
        if kind in (".csv", ".tsv"):
            return Delimited(path, name, suffix=kind)
        return (JsonLines if kind == ".jsonl" else PlainText)(path, name)
    except OSError as error:
        raise UserError(
            "--file",
            "is not a readable file",
            given=f"{path} ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
