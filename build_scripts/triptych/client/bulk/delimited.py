"""CSV and TSV: a header, then rows of cells, which stay as they are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from triptych.base.errors import UserError
from triptych.client.bulk.json_lines import copy_parts, not_utf8
from triptych.client.bulk.table import AnswerColumn, Answers, Chunk, Scan

_LONGEST_CELL = 1 << 24
"""Characters. A quote that nobody closes makes one cell of all that follows."""


class Delimited:
    """A table with a comma, a semicolon (where its header has no comma) or a tab between cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        csv.field_size_limit(_LONGEST_CELL)
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
                "must begin with the names of its columns, each once",
                given=f"twice: {', '.join(sorted(twice))}" if twice else "no line",
                remedy="Mend its first line",
            )

    def scan(self, names: Sequence[str]) -> Scan:
        rows = sum(1 for _ in self._rows()) - 1
        return Scan(rows, frozenset(names) & frozenset(self._header), self._header)

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[Chunk]:
        rows = islice(self._rows(), 1 + skip, None)
        width = len(self._header)
        places = {name: self._header.index(column) for name, column in wanted.items()}
        while kept := list(islice(rows, size)):
            faults = {
                row: f"must have {width} cells, as the header. Given: {len(cells)}"
                for row, cells in enumerate(kept)
                if len(cells) != width
            }
            columns = {
                name: [None if row in faults else cells[place] for row, cells in enumerate(kept)]
                for name, place in places.items()
            }
            yield Chunk(skip, len(kept), columns, kept, faults)
            skip += len(kept)

    def encode(self, chunk: Chunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        width = len(self._header)
        rows = []
        for row, cells in enumerate(chunk.kept):
            # Cells too many come last, where they shift nothing.
            own = (cells + [""] * width)[:width]
            found = [_cell(answers[column.output][row]) for column in columns]
            rows.append([*own, *found, *cells[width:]])
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
                return file.readline(_LONGEST_CELL)
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
                    "must have quotes that close, doubled within quotes",
                    given=error,
                    remedy="Mend the row that begins there or above",
                ) from error
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, reader.line_num, error) from error


def _cell(value: Any) -> str:
    if value is None or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
