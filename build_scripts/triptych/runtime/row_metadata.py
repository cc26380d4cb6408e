"""Metadata of a model row, which goes past the core to postprocess."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OUTSIDE, WORD_START, WORD_INSIDE = 0, 1, 2
"""Kinds of tokens: outside the text (special tokens, the question), first and later of a word."""

_HEADER = struct.Struct("<iii")


class RowMetadata(NamedTuple):
    """Metadata of one model row, used to find its results in the text.

    Attributes:
        row: Index of the request's row that it belongs to.
        text: Text of the offsets; empty if an earlier model row of the same row has it.
        offsets: INT32 ``[tokens, 2]``, start and end character of each token.
        kinds: UINT8 ``[tokens]``: OUTSIDE, WORD_START or WORD_INSIDE.
        ids: INT32 ``[tokens]``, id of each token where its results are joined by it; else empty.
    """

    row: int
    text: str
    offsets: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    ids: NDArray[np.int32] = np.empty(0, np.int32)


Metadata = Sequence[RowMetadata]


def pack_metadata(row_metadata: RowMetadata) -> bytes:
    text = row_metadata.text.encode("utf-8")
    header = _HEADER.pack(row_metadata.row, len(row_metadata.kinds), len(text))
    offsets = np.ascontiguousarray(row_metadata.offsets, dtype="<i4").tobytes()
    kinds = row_metadata.kinds.astype(np.uint8).tobytes()
    return header + offsets + kinds + text + row_metadata.ids.tobytes()


def unpack_metadata(data: bytes) -> RowMetadata:
    row, tokens, size = _HEADER.unpack_from(data)
    start = _HEADER.size
    offsets = np.frombuffer(data, "<i4", 2 * tokens, start).reshape(tokens, 2)
    kinds = np.frombuffer(data, np.uint8, tokens, start + 8 * tokens)
    end = start + 9 * tokens
    ids = np.frombuffer(data, "<i4", offset=end + size)
    return RowMetadata(row, data[end : end + size].decode("utf-8"), offsets, kinds, ids)


def unpack_rows(values: NDArray[np.generic], lengths: Sequence[int]) -> NDArray[np.generic]:
    """Return the core's results for each token, ``[n, stride, ...]``, as ``[n, longest, ...]``.

    Slots beyond a row are 0.
    """
    if len(values) == 1:
        return values[:, : lengths[0]]
    sizes = np.asarray(lengths)
    flat = values.reshape(-1, *values.shape[2:])[: sizes.sum()]
    rows = np.zeros((len(sizes), sizes.max(initial=0), *values.shape[2:]), values.dtype)
    rows[np.arange(rows.shape[1]) < sizes[:, None]] = flat
    return rows
