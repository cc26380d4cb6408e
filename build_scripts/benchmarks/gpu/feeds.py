"""Rows as the feeds of an engine, and the loads that every contender gets alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.tensors import TokenRow
from triptych.core.feeds import Feed, core_feed
from triptych.spec.plan import Plan, bucket_of

BATCHES = (1, 8, 32, 128)
CALLS = 16
"""Different batches of a load, so that no length is measured alone."""

SINGLE_CALLS = 64


@dataclass(frozen=True)
class Load:
    """Batches that contenders run, over and over.

    Attributes:
        name: in tables.
        batch_size: rows of each.
        lengths: ``mixed`` as in the traffic, or ``equal``: all of its median.
        batches: the rows.
    """

    name: str
    batch_size: int
    lengths: str
    batches: tuple[tuple[TokenRow, ...], ...]


def loads_of(rows: Sequence[TokenRow], sizes: Sequence[int] = BATCHES) -> list[Load]:
    """For each size a load of mixed lengths, then one of equal lengths.

    Args:
        rows: of the traffic.
        sizes: rows a batch.
    """
    return [_mixed(rows, size) for size in sizes] + [_equal(rows, size) for size in sizes]


def _mixed(rows: Sequence[TokenRow], size: int) -> Load:
    endless = cycle(rows)
    count = SINGLE_CALLS if size == 1 else CALLS
    batches = tuple(tuple(islice(endless, size)) for _ in range(count))
    return Load(f"batch {size}, mixed lengths", size, "mixed", batches)


def _equal(rows: Sequence[TokenRow], size: int) -> Load:
    length = int(np.median([len(row.ids) for row in rows]))
    batch = tuple(
        TokenRow(tuple(islice(cycle(row.ids), length)), length) for row in islice(cycle(rows), size)
    )
    return Load(f"batch {size}, {length} tokens each", size, "equal", (batch,))


def feeds_of(rows: Sequence[TokenRow], plan: Plan) -> list[tuple[list[int], Feed]]:
    """The runs that an engine makes of a batch, each with the places of its rows in `rows`.

    A packed engine takes as many rows as a batch may have; a bucketed one the rows of one padded
    length at a time, as the server's queue hands them to it.

    Args:
        rows: of the batch.
        plan: of the pipeline.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        edge = 0 if plan.packed else bucket_of(len(row.ids), plan.bucket_edges)
        groups.setdefault(edge, []).append(place)
    most = plan.max_batch_size
    chunks = [
        (edge, places[start : start + most])
        for edge, places in sorted(groups.items())
        for start in range(0, len(places), most)
    ]
    return [
        (places, _feed([rows[place] for place in places], plan, edge)) for edge, places in chunks
    ]


def _feed(rows: Sequence[TokenRow], plan: Plan, edge: int) -> Feed:
    width = None if plan.packed else edge
    pad = plan.facts.pad_token_id
    return core_feed(rows, plan.core_inputs, pad_token_id=pad, width=width)


def padded(rows: Sequence[TokenRow], pad_token_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and mask, INT64 ``[rows, longest]``, as PyTorch's models take them."""
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, mask = np.full(shape, pad_token_id, np.int64), np.zeros(shape, np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        mask[place, : len(row.ids)] = 1
    return ids, mask
