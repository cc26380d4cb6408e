"""What a file of rows is to a run: chunks of rows with a pipeline's inputs, and answers beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from triptych.base.errors import UserError, closest

ERROR = "error"
"""The column that says why a row has no answer."""


class AnswerColumn(NamedTuple):
    """A column that a run adds.

    Attributes:
        name: in the file that is written; `output` unless the rows have that column.
        output: of the pipeline; `ERROR`.
        dtype: numpy's, of an element; object for text.
        dims: of one row: ``(1,)`` stands in the column as a plain value, others as lists.
    """

    name: str
    output: str
    dtype: type[np.generic] = np.object_
    dims: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file.

    Attributes:
        first: index of the first in the file.
        count: of rows.
        columns: input of the pipeline -> its value in each row, as it stands in the file.
        faults: row of the chunk -> why it cannot be sent.
        parameters: of the rows' own requests; empty where the format has none.
        kept: all that the file says of these rows, as its format writes them again.
    """

    first: int
    count: int
    columns: Mapping[str, Sequence[object]]
    kept: Any
    faults: Mapping[int, str] = field(default_factory=dict)
    parameters: Sequence[Mapping[str, Any]] = ()


class Scan(NamedTuple):
    """What a first look through the file says.

    Attributes:
        rows: how many there are.
        names: those of the columns asked for that are there.
        columns: all of them, or as many as a message may show.
    """

    rows: int
    names: frozenset[str]
    columns: Sequence[str]


class Table(Protocol):
    """A file of rows in one format."""

    path: Path

    def scan(self, names: Sequence[str]) -> Scan:
        """Look through the file, for a column of each of `names`.

        Raises:
            UserError: it is not of its format.
        """

    def chunks(self, wanted: Mapping[str, str], size: int, skip: int) -> Iterator[Chunk]:
        """The rows behind the first `skip`, `size` at a time; `wanted`: input -> column."""

    def encode(self, chunk: Chunk, columns: Sequence[AnswerColumn], answers: Answers) -> Any:
        """`chunk` with its answers, in a form that `pack` takes."""

    def pack(self, encoded: Sequence[Any]) -> bytes:
        """The content of a part."""

    def join(self, parts: Sequence[Path], columns: Sequence[AnswerColumn], out: IO[bytes]) -> None:
        """Write the whole file from its parts."""


Answers = Mapping[str, Sequence[Any]]
"""Output -> plain value a row, None where it has none; also of `ERROR`."""


def name_columns(
    pipeline: str, outputs: Sequence[AnswerColumn], taken: frozenset[str]
) -> list[AnswerColumn]:
    """`outputs`, each that is named as a column of the file with the pipeline's name before it.

    Raises:
        UserError: the file has that one, too.
    """
    named = []
    for column in outputs:
        name = column.name if column.name not in taken else beside(pipeline, column.name)
        if name in taken:
            raise UserError(
                "--file",
                f"must not have the columns `{column.name}` and `{name}`, which answers go to",
                remedy="Rename one of them",
            )
        named.append(column._replace(name=name))
    return named


def beside(pipeline: str, name: str) -> str:
    """The other name of an answer's column."""
    return f"{pipeline}.{name}"


def check_columns(wanted: Mapping[str, str], scan: Scan, path: Path) -> None:
    """All columns of `wanted` (input -> column) are in the file.

    Raises:
        UserError: one is not.
    """
    for name, column in wanted.items():
        if column not in scan.names:
            option = f"--{name.replace('_', '-')}-column"
            raise UserError(
                f"{path}: {column}",
                f"must be a column, for the input `{name}`",
                given=f"the columns {', '.join(scan.columns)}" if scan.columns else "no column",
                remedy=f"{closest(column, scan.columns)}Name it with {option}",
            )
