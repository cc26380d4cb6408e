"""A request's inputs on their way past the core, for an `after` that asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PREFIX = "given_"
"""Before an input's name: what its tensor is called between preprocess and postprocess."""


def given_tensors(columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, NDArray[Any]]:
    """`columns` of inputs, str or bytes, as BYTES ``[count, 1]`` each; the request's rows first.

    The core has at least as many rows as the request; the rest is empty.
    """
    tensors = {}
    for name, values in columns.items():
        tensor = np.full((count, 1), b"", dtype=np.object_)
        for row, value in enumerate(values):
            tensor[row, 0] = value.encode() if isinstance(value, str) else value
        tensors[PREFIX + name] = tensor
    return tensors


def given_rows(
    columns: Mapping[str, Sequence[bytes]], contents: Mapping[str, str], count: int
) -> list[dict[str, Any]]:
    """The request's `count` rows of what `given_tensors` made: bytes for images, else str.

    Args:
        columns: by the input's name, one value a core row.
        contents: of each input: ``text`` or ``image``.
        count: rows of the request.
    """
    return [
        {
            name: columns[name][row] if content == "image" else columns[name][row].decode()
            for name, content in contents.items()
        }
        for row in range(count)
    ]
