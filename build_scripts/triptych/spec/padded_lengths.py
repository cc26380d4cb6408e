"""Padded lengths of the bucketed layout for the token lengths of the traffic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from triptych.spec.traffic import Lengths


def bucket_of(length: int, edges: tuple[int, ...]) -> int:
    """Return the smallest padded length that fits `length` tokens."""
    return next(edge for edge in edges if edge >= length)


def choose_edges(
    lengths: Lengths, max_length: int, *, count: int, multiple: int = 1
) -> tuple[int, ...]:
    """Return up to `count` padded lengths that minimize padding for the traffic.

    Uses dynamic programming over the length histogram, so the result is exact. An optimal padded
    length is an observed length (rounded up to `multiple`), so only those and `max_length` are
    candidates.

    Args:
        lengths: Token lengths of the traffic, at most `max_length`.
        max_length: Largest padded length; always part of the result.
        count: Maximum number of padded lengths.
        multiple: Multiple to which all padded lengths but the last are rounded up.
    """
    rounded: dict[int, int] = {}
    for length, rows in lengths.counts.items():
        edge = min(-(-length // multiple) * multiple, max_length)
        rounded[edge] = rounded.get(edge, 0) + rows
    rounded.setdefault(max_length, 0)
    candidates = np.array(sorted(rounded))
    rows_up_to = np.concatenate([[0], np.cumsum([rounded[c] for c in candidates])])
    # best[j]: computed tokens of all rows in the first j candidates, with the edges so far.
    best = np.full(len(candidates) + 1, np.inf)
    best[0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for _ in range(min(count, len(candidates))):
        # cost[i, j]: candidates i..j-1 padded to candidate j-1, after the best of the first i.
        cost = best[:, None] + (rows_up_to[None, 1:] - rows_up_to[:, None]) * candidates[None, :]
        cost[np.tril_indices(len(candidates), k=-1, m=len(candidates))] = np.inf
        cost[-1] = np.inf
        choices.append(cost.argmin(axis=0))
        best = np.concatenate([[np.inf], cost.min(axis=0)])
    edges = []
    end = len(candidates)
    for choice in reversed(choices):
        edges.append(int(candidates[end - 1]))
        end = int(choice[end - 1])
    return tuple(sorted(edges))
