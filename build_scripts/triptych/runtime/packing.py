"""Packed layout: the rows of a request end to end in one tensor, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .row_types import make_int32

MULTIPLE = 16
"""The core rounds the longest row of a batch up to a multiple of this number of tokens. Matrix
kernels and softmax then handle a row's keys in the same order alone and in any batch, so that its
result has the same bits."""


class PackedLayout:
    """Input tensors of the core from rows of token ids."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pad_token_id: int = settings["pad_token_id"]

    def tensors(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int32]]:
        """Return ``input_ids`` and ``row_offset`` of `pack_rows`."""
        ids, offset = pack_rows(rows, self._pad_token_id)
        return {"input_ids": ids, "row_offset": offset}


class SpannedLayout(PackedLayout):
    """Layout of a TensorRT core, which reads the length of its longest row from a tensor's size."""

    def tensors(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int32]]:
        return super().tensors(rows) | {"row_span": make_row_span([len(row) for row in rows])}


def pack_rows(
    rows: Sequence[Sequence[int]], fill: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return one or more rows of token ids end to end, as the packed layout sends them.

    Args:
        rows: Token ids of each of n rows.
        fill: Token id of the padding.

    Returns:
        Token ids, INT32 ``[n, stride]``, of which fewer than n at the end are padding; and the
        distance in tokens of each row's start from its index times `stride`, INT32 ``[n, 1]``.
    """
    count, lengths = len(rows), list(map(len, rows))
    total = sum(lengths)
    stride = max(1, -(-total // count))
    ids = make_int32([*chain.from_iterable(rows), *repeat(fill, count * stride - total)], stride)
    starts = accumulate(lengths[:-1], initial=0)
    return ids, make_int32([start - index * stride for index, start in enumerate(starts)])


def count_slots(tokens: int) -> int:
    """Return the padded length in the core of a row of `tokens` tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def make_row_span(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return a tensor of zeros ``[n, s]`` whose size is that of the longest row, rounded up.

    A TensorRT core takes the size of its padded rows from the largest such tensor of a batch.
    """
    longest = count_slots(max(1, *lengths))
    return np.zeros((len(lengths), -(-longest // len(lengths))), np.int32)
