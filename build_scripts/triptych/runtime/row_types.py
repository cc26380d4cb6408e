"""Data of the rows between preprocess, the core and postprocess.

A request's rows become rows of the model (`CoreRows`). Metadata of each model row
(`RowMetadata`) and forwarded inputs go past the core to postprocess.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Metadata = Sequence["RowMetadata"]


def find_class(name: str) -> Any:
    """Return a class of this package by module and name, such as ``decode_rows.MaskDecoder``."""
    module, _, class_name = name.partition(".")
    return getattr(import_module(f".{module}", __package__), class_name)


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


OUTSIDE, WORD_START, WORD_INSIDE = 0, 1, 2
"""A token that is not of the text (a special one, or of the question); one that begins a word;
one that goes on with the word of the token before."""

_HEADER = struct.Struct("<iii")


class RowMetadata(NamedTuple):
    """What one core row brings.

    Attributes:
        row: the request's row it is made of, from 0.
        text: what the offsets count in; empty where an earlier core row of the same row has it.
        offsets: INT32 ``[tokens, 2]``, first character of each token and the one after its last.
        kinds: UINT8 ``[tokens]``: OUTSIDE, WORD_START or WORD_INSIDE.
    """

    row: int
    text: str
    offsets: NDArray[np.int32]
    kinds: NDArray[np.uint8]


Arrays = Mapping[str, NDArray[Any]]
"""A decoder's outputs of the core, ``[core rows, ...]`` each, or of the ensemble, ``[n, ...]``."""

Parameters = Mapping[str, Any]


def pack_metadata(carry: RowMetadata) -> bytes:
    text = carry.text.encode("utf-8")
    header = _HEADER.pack(carry.row, len(carry.kinds), len(text))
    offsets = np.ascontiguousarray(carry.offsets, dtype="<i4").tobytes()
    return header + offsets + carry.kinds.astype(np.uint8).tobytes() + text


def unpack_metadata(data: bytes) -> RowMetadata:
    row, tokens, size = _HEADER.unpack_from(data)
    start = _HEADER.size
    offsets = np.frombuffer(data, "<i4", 2 * tokens, start).reshape(tokens, 2)
    kinds = np.frombuffer(data, np.uint8, tokens, start + 8 * tokens)
    end = start + 9 * tokens
    return RowMetadata(row, data[end : end + size].decode("utf-8"), offsets, kinds)


FORWARDED_PREFIX = "given_"
"""Before an input's name: what its tensor is called between preprocess and postprocess."""


def make_forwarded(columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, NDArray[Any]]:
    """`columns` of inputs, str or bytes, as BYTES ``[count, 1]`` each; the request's rows first.

    The core has at least as many rows as the request; the rest is empty.
    """
    tensors = {}
    for name, values in columns.items():
        tensor = np.full((count, 1), b"", dtype=np.object_)
        for row, value in enumerate(values):
            tensor[row, 0] = value.encode() if isinstance(value, str) else value
        tensors[FORWARDED_PREFIX + name] = tensor
    return tensors


def read_forwarded(
    columns: Mapping[str, Sequence[bytes]], contents: Mapping[str, str], count: int
) -> list[dict[str, Any]]:
    """The request's `count` rows of what `make_forwarded` made: bytes for images, else str.

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


def joined_widths(requests: Sequence[CoreRows], *, batch_tokens: int) -> list[int]:
    """The width of each request: its own, or a wider one's where that costs less than a batch.

    Args:
        requests: at least one, each with a width of its own.
        batch_tokens: a batch takes as much time as so many tokens more in another one.
    """
    rows: Counter[int] = Counter()
    for request in requests:
        rows[request.width] += request.row_count
    widths = sorted(rows)
    targets: dict[int, int] = {}
    joined, count = [], 0
    for width, wider in zip(widths, [*widths[1:], None], strict=True):
        joined.append(width)
        count += rows[width]
        if wider is None or count * (wider - width) > batch_tokens:
            targets |= dict.fromkeys(joined, width)
            joined, count = [], 0
    return [targets[request.width] for request in requests]


def widened(request: CoreRows, width: int, pad_token_id: int) -> CoreRows:
    """The request with rows of `width`, filled up on the right."""
    missing = width - request.width
    if not missing:
        return request
    ids = request.tensors["input_ids"]
    wide = np.full((len(ids), width), pad_token_id, ids.dtype)
    wide[:, : ids.shape[1]] = ids
    return request._replace(tensors={**request.tensors, "input_ids": wide}, width=width)
