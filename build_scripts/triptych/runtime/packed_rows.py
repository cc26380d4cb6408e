"""Rows of one request end to end in one tensor, as the packed layout sends them to the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MULTIPLE = 16
"""The core rounds the longest row of a batch up to a multiple of this number of tokens. Matrix
kernels and softmax then handle a row's keys in the same order alone and in any batch, so that its
result has the same bits."""


class PackedRows(NamedTuple):
    """The rows of a request.

    Attributes:
        ids: Token ids, INT32 ``[n, stride]``; fewer than n of them, at the end, fill it up.
        offset: Distance of each row's first token from where it would be if each row took `stride`
            tokens, INT32 ``[n, 1]``.
    """

    ids: NDArray[np.int32]
    offset: NDArray[np.int32]


def pack_rows(rows: Sequence[Sequence[int]], fill: int) -> PackedRows:
    """Put at least one row of token ids end to end; `fill` is the id that fills up the end."""
    count = len(rows)
    lengths = np.fromiter(map(len, rows), np.int32, count)
    stride = max(1, -(-int(lengths.sum()) // count))
    ids = np.full(count * stride, fill, np.int32)
    start = 0
    for row in rows:
        ids[start : start + len(row)] = row
        start += len(row)
    offset = np.cumsum(lengths) - lengths - stride * np.arange(count)
    return PackedRows(ids.reshape(count, stride), offset.astype(np.int32)[:, None])


def unpack_rows(values: NDArray[Any], lengths: Sequence[int]) -> NDArray[Any]:
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


def slots_of(tokens: int) -> int:
    """Return the number of slots of the core for a longest row of `tokens` tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def span_of(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a tensor of zeros ``[n, s]`` whose size is that of the longest row, rounded up.

    A TensorRT core takes the size of its padded rows from the largest such tensor of a batch.
    """
    longest = slots_of(max(int(lengths.max()), 1))
    return np.zeros((len(lengths), -(-longest // len(lengths))), np.int32)
