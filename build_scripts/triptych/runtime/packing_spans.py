"""Packed layout of a TensorRT core, and the lengths that a packed core computes with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .packing import PackedLayout

MULTIPLE = 16
"""The core rounds the longest row of a batch up to a multiple of this number of tokens. Matrix
kernels and softmax then handle a row's keys in the same order alone and in any batch, so that its
result has the same bits."""


class SpannedLayout(PackedLayout):
    """Layout of a TensorRT core, which reads the length of its longest row from a tensor's size."""

    def tensors(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int32]]:
        return super().tensors(rows) | {"row_span": make_row_span([len(row) for row in rows])}


def count_slots(tokens: int) -> int:
    """Return the padded length in the core of a row of `tokens` tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def make_row_span(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return a tensor of zeros ``[n, s]`` whose size is that of the longest row, rounded up.

    A TensorRT core takes the size of its padded rows from the largest such tensor of a batch.
    """
    longest = count_slots(max(1, *lengths))
    return np.zeros((len(lengths), -(-longest // len(lengths))), np.int32)
