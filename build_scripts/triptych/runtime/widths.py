"""How wide the rows of a bucketed batch are padded, so that requests share a batch of the core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .row_types import CoreRows


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
