"""What goes into a row maker and what comes out: a request's columns, the core's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class RowInputs(NamedTuple):
    """One request, ready for a row maker.

    Attributes:
        columns: input name to one value a row: `str` for texts, `bytes` for images.
        parameters: checked, with the defaults filled in.
    """

    columns: Mapping[str, list[Any]]
    parameters: Mapping[str, Any]


class Row(NamedTuple):
    """One core row of tokens.

    Attributes:
        ids: of the tokens.
        first_segment: how many of them come before the second segment.
        carry: what goes past the core, as `carry.pack` makes it; empty where the task has none.
    """

    ids: Sequence[int]
    first_segment: int
    carry: bytes = b""


class CoreRows(NamedTuple):
    """What the core gets for one request.

    Attributes:
        tensors: by the name of the core's input, each ``[core rows, ...]``.
        carries: one a core row, as `carry.pack` makes them; empty where the task has none.
        width: places of the widest row after padding: what the bucketed layout sorts by.
    """

    tensors: dict[str, NDArray[Any]]
    carries: list[bytes]
    width: int

    @property
    def row_count(self) -> int:
        """Core rows."""
        return len(next(iter(self.tensors.values())))


class RowMaker(Protocol):
    """What makes a task's core rows: the class `RowMaker` of each ``rows_*.py``."""

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """The core's tensors for each request, or its fault."""
        ...


class TextRowMaker(RowMaker, Protocol):
    """One whose rows are of tokens."""

    max_length: int
    """Most tokens of a core row."""

    tokenizer: Any
    """A `tokenizers.Tokenizer`."""

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        """The core rows of each request, or its fault."""
        ...
