"""File formats of rows: JSON lines, plain text, CSV and TSV.

A format reads chunks of rows, and writes them with additional columns for the results.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


class Table(Protocol):
    """A file of rows in one format."""

    path: Path

    def scan(self, names: Sequence[str]) -> Scan:
        """Read through the file and look for a column of each of `names`.

        Raises:
            UserError: The file does not have its format.
        """

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[RowChunk]:
        """Yield the rows after the first `skip` in chunks; `wanted` has the column by input."""

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> Any:
        """Return `chunk` with its results in a form that `pack` takes."""

    def pack(self, encoded: Sequence[Any]) -> bytes:
        """Return the content of a part."""

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        """Write the whole file from its parts."""


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
                given=f"the columns {', '.join(scan.columns)}" if scan.columns else "no column",
                remedy=f"{closest(column, scan.columns)}Give the column with {option}",
            )


_MAX_SHOWN = 20


class JsonLines:
    """Rows as JSON objects; a line is written unchanged, with results before its closing brace."""

    def __init__(self, path: Path) -> None:
        path.open("rb").close()  # a missing file is reported here
        self.path = path

    def scan(self, names: Sequence[str]) -> Scan:
        rows, found, columns = 0, set[str](), dict[str, None]()
        for _, line in self.lines():
            rows += 1
            try:
                row = self.parse(line)
            except ValueError:
                continue
            found |= {name for name in names if name in row}
            if len(columns) < _MAX_SHOWN:
                columns |= dict.fromkeys(row)
        return Scan(rows, frozenset(found), list(columns)[:_MAX_SHOWN])

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
        return "".join(lines).encode("utf-8", "backslashreplace")

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        copy_parts(parts, out)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each line with its number, from 1."""
        # Only line feeds separate lines: a JSON string may contain other line separators.
        with self.path.open(encoding="utf-8-sig", newline="\n") as file:
            number = 0
            try:
                for line in file:
                    number += 1
                    if not self._is_blank(line):
                        yield number, line.rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, number, error) from error

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
        return json.dumps(self.parse(line), ensure_ascii=False)

    def parse(self, line: str) -> dict[str, Any]:
        return {"text": line}


def copy_parts(parts: Sequence[Path], out: IO[bytes]) -> None:
    """Concatenate the parts of a text."""
    for path in parts:
        with path.open("rb") as part:
            shutil.copyfileobj(part, out)


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    """Return the error for a file in another encoding; `line` is the last one read."""
    return UserError(
        str(path),
        "must be text in UTF-8",
        given=f"byte {error.object[error.start]:#04x} shortly after line {line}",
        remedy="Convert it, as with `iconv -f latin1 -t utf-8`",
    )


def _own_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = values.get(PARAMETERS, {})
    if not isinstance(parameters, dict):
        raise ValueError(f"`{PARAMETERS}` must be an object. Given: {parameters!r:.80}")
    return parameters


_MAX_CELL = 1 << 24
"""Maximum number of characters in a cell. An unclosed quote makes one cell of all that follows."""


class Delimited:
    """Table with comma, semicolon (if its header has no comma) or tab between cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        csv.field_size_limit(_MAX_CELL)
        self._separator = "\t" if path.suffix.lower() == ".tsv" else ","
        first = self._first_line()
        self._line_end = "\r\n" if first.endswith("\r\n") else "\n"
        if path.suffix.lower() == ".csv" and "," not in first and ";" in first:
            self._separator = ";"
        self._header = next(self._rows(), [])
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
        width = len(self._header)
        indexes = {name: self._header.index(column) for name, column in wanted.items()}
        while batch := list(islice(rows, size)):
            faults = {
                row: f"must have {width} cells, as the header. Given: {len(cells)}"
                for row, cells in enumerate(batch)
                if len(cells) != width
            }
            columns = {
                name: [None if row in faults else cells[index] for row, cells in enumerate(batch)]
                for name, index in indexes.items()
            }
            yield RowChunk(skip, len(batch), columns, batch, faults)
            skip += len(batch)

    def encode(self, chunk: RowChunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        width = len(self._header)
        rows = []
        for row, cells in enumerate(chunk.original):
            # Surplus cells come last, so that they do not shift the results.
            own = (cells + [""] * width)[:width]
            results = [_cell(answers[column.output][row]) for column in columns]
            rows.append([*own, *results, *cells[width:]])
        return self._write(rows)

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        out.write(self._write([[*self._header, *(column.name for column in columns)]]))
        copy_parts(parts, out)

    def _write(self, rows: Sequence[Sequence[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._separator, lineterminator=self._line_end).writerows(rows)
        return text.getvalue().encode("utf-8", "backslashreplace")

    def _first_line(self) -> str:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            try:
                return file.readline(_MAX_CELL)
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, 0, error) from error

    def _rows(self) -> Iterator[list[str]]:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
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
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, reader.line_num, error) from error


def _cell(value: Any) -> str:
    if value is None or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _open_parquet(path: Path) -> Table:
    from triptych.client.bulk.parquet import Parquet

    return Parquet(path)


FORMATS: dict[str, Callable[[Path], Table]] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".jsonl": JsonLines,
    ".parquet": _open_parquet,
}
"""Format by file extension; a file with another extension has a text per line."""


def open_rows(path: Path) -> Table:
    """Return the rows of `path`.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return FORMATS.get(path.suffix.lower(), PlainText)(path)
    except OSError as error:
        raise UserError(
            "--file",
            "is not a readable file",
            given=f"{path} ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
