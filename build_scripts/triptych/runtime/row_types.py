"""What goes into a row maker and what comes out: a request's columns, the core's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray


class RowInputs(NamedTuple):
    """What one request asks for.

    Attributes:
        columns: input name to one value a row: `str` for texts, `bytes` for images.
        parameters: checked, with the defaults filled in.
    """

    columns: Mapping[str, list[Any]]
    parameters: Mapping[str, Any]


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
