"""Rows as feeds of an engine, and the loads that every system gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.tensors import TokenRow
from triptych.core.requests import Feed, core_feed
from triptych.spec.plan import Plan, bucket_of

BATCHES = (1, 8, 32, 128)
CALLS, SINGLE_CALLS = 16, 64
"""Numbers of different batches in a load of mixed lengths, and with one row in a batch."""


@dataclass(frozen=True)
class EngineLoad:
    """Batches that a system runs repeatedly.

    Attributes:
        lengths: ``mixed`` as in the traffic, or ``equal``: each of the median length.
    """

    name: str
    batch_size: int
    lengths: str
    batches: tuple[tuple[TokenRow, ...], ...]


def make_loads(rows: Sequence[TokenRow], sizes: Sequence[int] = BATCHES) -> list[EngineLoad]:
    """Return a load of mixed and one of equal lengths for each batch size."""
    return [_mixed(rows, size) for size in sizes] + [_equal(rows, size) for size in sizes]


def _mixed(rows: Sequence[TokenRow], size: int) -> EngineLoad:
    endless = cycle(rows)
    count = SINGLE_CALLS if size == 1 else CALLS
    batches = tuple(tuple(islice(endless, size)) for _ in range(count))
    return EngineLoad(f"batch {size}, mixed lengths", size, "mixed", batches)


def _equal(rows: Sequence[TokenRow], size: int) -> EngineLoad:
    length = int(np.median([len(row.ids) for row in rows]))
    batch = tuple(
        TokenRow(tuple(islice(cycle(row.ids), length)), length) for row in islice(cycle(rows), size)
    )
    return EngineLoad(f"batch {size}, {length} tokens each", size, "equal", (batch,))


def make_feeds(rows: Sequence[TokenRow], plan: Plan) -> list[tuple[list[int], Feed]]:
    """Return the runs that an engine makes of a batch, each with the indices of its rows.

    A packed engine takes as many rows as a batch may have. A bucketed engine takes the rows of one
    padded length at a time, as the server's queue passes them.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        length = 0 if plan.packed else bucket_of(len(row.ids), plan.bucket_edges)
        groups.setdefault(length, []).append(index)
    size = plan.max_batch_size
    feeds = []
    for length, indices in sorted(groups.items()):
        for start in range(0, len(indices), size):
            chunk = indices[start : start + size]
            feed = core_feed(
                [rows[index] for index in chunk],
                plan.core_inputs,
                pad_token_id=plan.info.pad_token_id,
                width=None if plan.packed else length,
            )
            feeds.append((chunk, feed))
    return feeds


def pad(rows: Sequence[TokenRow], pad_token_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids and mask, INT64 ``[rows, longest]``, as models of PyTorch take them."""
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, mask = np.full(shape, pad_token_id, np.int64), np.zeros(shape, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        mask[index, : len(row.ids)] = 1
    return ids, mask
