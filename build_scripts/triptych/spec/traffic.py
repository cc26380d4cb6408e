"""Reader of ``traffic.jsonl``, a pipeline's real requests, and their token lengths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError, closest

TRAFFIC_FILE = "traffic.jsonl"
PARAMETERS = "parameters"


class TrafficRow(NamedTuple):
    """One line of the traffic.

    Attributes:
        line: Line number, from 1.
        inputs: String for each input of the task; the path of the file for an image.
        parameters: Request parameters of this row.
    """

    line: int
    inputs: dict[str, str]
    parameters: dict[str, Any]


JsonLine = tuple[int, str, dict[str, Any] | None]
"""Line number from 1, text, and JSON object of a line; None if it is no JSON object."""


@dataclass(frozen=True)
class Lengths:
    """Token lengths of the traffic's model rows.

    Attributes:
        counts: Number of rows by length in tokens, in ascending order.
        truncated_rows: Number of rows that exceed the limit before truncation.
    """

    counts: dict[int, int]
    rows: int
    truncated_rows: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, max_length: int) -> Lengths:
        """Count token lengths before truncation against the limit."""
        clipped = Counter(min(length, max_length) for length in lengths)
        return cls(
            counts=dict(sorted(clipped.items())),
            rows=len(lengths),
            truncated_rows=sum(length > max_length for length in lengths),
        )

    @property
    def mean(self) -> float:
        return sum(length * n for length, n in self.counts.items()) / self.rows

    @property
    def truncated_share(self) -> float:
        return self.truncated_rows / self.rows

    def quantile(self, q: float) -> int:
        """Return the smallest length that at least the fraction `q` of rows does not exceed."""
        reached = zip(self.counts, accumulate(self.counts.values()), strict=True)
        return next((n for n, rows in reached if rows >= q * self.rows), max(self.counts))


def read_traffic(folder: Path, fields: Sequence[str]) -> list[TrafficRow]:
    """Read ``folder/traffic.jsonl``: a JSON object per line with a string for each of `fields`.

    An object may also have `parameters`, the request parameters of that row, and nothing else.

    Raises:
        UserError: The file is missing or empty, or a line is not such an object.
    """
    path = folder / TRAFFIC_FILE
    form = "{" + ", ".join(f'"{name}": "…"' for name in fields) + "}"
    rows = []
    for number, line, row in require_lines(path, form):
        if row is None:
            raise UserError(
                f"{path}:{number}",
                "must be a JSON object with a string for each input of the task",
                given=repr(line[:80]),
                remedy=f"Write {form}",
            )
        parameters = row.get(PARAMETERS, {})
        wrong = [field for field in fields if not isinstance(row.get(field), str)]
        if wrong or not isinstance(parameters, dict):
            field = wrong[0] if wrong else PARAMETERS
            raise UserError(
                f"{path}:{number}: {field}",
                "must be a string" if wrong else "must be an object",
                given=f"{row[field]!r:.80}" if field in row else "",
                remedy=f"{closest(field, row) if wrong and field not in row else ''}Write {form}",
            )
        for unknown in row.keys() - {*fields, PARAMETERS}:
            raise UserError(
                f"{path}:{number}: {unknown}",
                "is not an input of the task",
                given=f"{row[unknown]!r:.80}",
                remedy="Set `pairs: true` for pairs in text-classification, or remove it"
                if unknown == "text_pair"
                else f"{closest(unknown, fields)}Remove it, or write {form}",
            )
        rows.append(TrafficRow(number, {name: row[name] for name in fields}, parameters))
    return rows


def require_lines(path: Path, form: str, rows: str = "real requests") -> list[JsonLine]:
    """Return the lines of `read_lines`, at least one.

    Args:
        form: Example of a line, for errors.
        rows: Description of the rows, for errors.

    Raises:
        UserError: The file does not exist or has no rows.
    """
    if not path.is_file():
        remedy = f"Create it with {rows}, a line each: {form}"
        raise UserError(str(path), "does not exist", given="no such file", remedy=remedy)
    lines = list(read_lines(path))
    if not lines:
        remedy = f"Add {rows}: {form}"
        raise UserError(str(path), "has no rows", given="an empty file", remedy=remedy)
    return lines


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yield line number (from 1), text and JSON object of each line that is not blank.

    The object is None if the line is not a JSON object, or contains invalid Unicode.
    """
    # Only line feeds separate lines: a JSON string may contain other line separators.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is not text
            except (ValueError, RecursionError):
                row = None
            text = line.decode("utf-8", "replace")
            yield number, text, row if isinstance(row, dict) else None
