"""Rows as JSON objects, one a line, and texts, one a line, which become such objects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from triptych.base.errors import UserError
from triptych.client.bulk.table import AnswerColumn, Answers, Chunk, Scan
from triptych.spec.traffic import PARAMETERS

_MOST_SHOWN = 20


class JsonLines:
    """Rows as JSON objects; a line keeps its bytes, and the answers follow within its braces."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self, names: Sequence[str]) -> Scan:
        rows, found, columns = 0, set[str](), dict[str, None]()
        for line in self._lines():
            rows += 1
            try:
                row = self._parse(line)
            except ValueError:
                continue
            found |= {name for name in names if name in row}
            if len(columns) < _MOST_SHOWN:
                columns |= dict.fromkeys(row)
        return Scan(rows, frozenset(found), list(columns)[:_MOST_SHOWN])

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[Chunk]:
        lines = islice(self._lines(), skip, None)
        while kept := list(islice(lines, size)):
            columns: dict[str, list[object]] = {name: [] for name in wanted}
            faults, parameters = {}, []
            for row, line in enumerate(kept):
                values: dict[str, Any] = {}
                try:
                    values = self._parse(line)
                    parameters.append(_own_parameters(values))
                except ValueError as error:
                    faults[row] = str(error)
                    parameters.append({})
                for name, column in wanted.items():
                    columns[name].append(values.get(column))
            yield Chunk(skip, len(kept), columns, kept, faults, parameters)
            skip += len(kept)

    def encode(self, chunk: Chunk, columns: Sequence[AnswerColumn], answers: Answers) -> bytes:
        lines = []
        for row, line in enumerate(chunk.kept):
            found = {column.name: answers[column.output][row] for column in columns}
            found = {name: value for name, value in found.items() if value is not None}
            try:
                own = self._own(line)
            except ValueError:
                own = json.dumps({"line": line})
            inner = own.strip()[1:-1].strip()
            answer = json.dumps(found, ensure_ascii=False)[1:]
            lines.append(f"{{{inner}{', ' if inner and found else ''}{answer}\n")
        return "".join(lines).encode("utf-8", "backslashreplace")

    def pack(self, encoded: Sequence[bytes]) -> bytes:
        return b"".join(encoded)

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        copy_parts(parts, out)

    def _lines(self) -> Iterator[str]:
        # Split at line feeds alone: a JSON string may hold other line separators as they are.
        with self.path.open(encoding="utf-8-sig", newline="\n") as file:
            number = 0
            try:
                for line in file:
                    number += 1
                    if not self._is_blank(line):
                        yield line.rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, number, error) from error

    def _is_blank(self, line: str) -> bool:
        return not line.strip()

    def _own(self, line: str) -> str:
        """The text of the JSON object that a line is.

        Raises:
            ValueError: it is none.
        """
        self._parse(line)
        return line

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"must be a JSON object. Given: {line[:80]}")
        return row


class PlainText(JsonLines):
    """One text a line, an empty one too; written as JSON objects with `text`."""

    def _is_blank(self, line: str) -> bool:
        return False

    def _own(self, line: str) -> str:
        return json.dumps(self._parse(line), ensure_ascii=False)

    def _parse(self, line: str) -> dict[str, Any]:
        return {"text": line}


def copy_parts(parts: Sequence[Path], out: IO[bytes]) -> None:
    """Write the parts of a text, end to end."""
    for path in parts:
        with path.open("rb") as part:
            shutil.copyfileobj(part, out)


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    """What is said of a file in another encoding; `line` is the last one read."""
    return UserError(
        str(path),
        "must be text in UTF-8",
        given=f"byte {error.object[error.start]:#04x} soon after line {line}",
        remedy="Convert it, as with `iconv -f latin1 -t utf-8`",
    )


def _own_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = values.get(PARAMETERS, {})
    if not isinstance(parameters, dict):
        raise ValueError(f"`{PARAMETERS}` must be an object. Given: {parameters!r:.80}")
    return parameters
