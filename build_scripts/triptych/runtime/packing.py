"""Packed layout: the rows of a request end to end in one tensor, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .row_types import make_int32


class PackedLayout:
    """Input tensors of the core from rows of token ids."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pad_token_id: int = settings["pad_token_id"]

    def tensors(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int32]]:
        """Return ``input_ids`` and ``row_offset`` of `pack_rows`."""
        ids, offset = pack_rows(rows, self._pad_token_id)
        return {"input_ids": ids, "row_offset": offset}


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
