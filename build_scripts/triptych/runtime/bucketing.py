"""Order of requests in the bucketed layout, and rows padded further to share a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .row_types import CoreRows


def order_by_length(
    requests: dict[int, CoreRows], *, batch_tokens: int, pad_token_id: int
) -> list[int]:
    """Return the order of requests for the core: by padded length, the most frequent last.

    Args:
        requests: Rows of each request by its index; some are padded further.
        batch_tokens: Cost of one more batch, in tokens of another batch.
        pad_token_id: Token id of the padding.
    """
    if not requests:
        return []
    widths = choose_padded_lengths(list(requests.values()), batch_tokens=batch_tokens)
    for (index, core_rows), width in zip(list(requests.items()), widths, strict=True):
        requests[index] = widen_rows(core_rows, width, pad_token_id)
    most = Counter(widths).most_common(1)[0][0]
    return sorted(
        requests, key=lambda index: (requests[index].width == most, requests[index].width)
    )


def choose_padded_lengths(requests: Sequence[CoreRows], *, batch_tokens: int) -> list[int]:
    """Return the padded length of each request: its own, or a longer one that saves a batch.

    Args:
        requests: One or more requests.
        batch_tokens: Cost of one more batch, in tokens of another batch.
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


def widen_rows(request: CoreRows, width: int, pad_token_id: int) -> CoreRows:
    """Return the request with rows padded to `width` on the right."""
    missing = width - request.width
    if not missing:
        return request
    ids = request.tensors["input_ids"]
    wide = np.full((len(ids), width), pad_token_id, ids.dtype)
    wide[:, : ids.shape[1]] = ids
    return request._replace(tensors={**request.tensors, "input_ids": wide}, width=width)
