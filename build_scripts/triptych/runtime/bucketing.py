"""Bucketed layout: rows padded to planned lengths, and requests ordered to share a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .row_types import CoreRows, make_int32


class PaddedLayout:
    """Input tensors of the core from rows of token ids: padded to a planned length."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pad_token_id: int = settings["pad_token_id"]
        self._edges: list[int] = settings["bucket_edges"]

    def tensors(self, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int32]]:
        """Return ``input_ids`` INT32 ``[n, length]``; without planned lengths, of the longest row.

        A tensor needs one slot even where a tokenizer makes no token.
        """
        width = max(1, *map(len, rows))
        if self._edges:
            width = next(edge for edge in self._edges if edge >= width)
        return {"input_ids": pad_rows(rows, width, self._pad_token_id)}


def pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> NDArray[np.int32]:
    """Return lists of int as INT32 ``[len(rows), width]``, padded on the right with `fill`."""
    padding = [fill] * width
    return make_int32([*chain.from_iterable([*row, *padding[len(row) :]] for row in rows)], width)


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


def pad_tensors(request: CoreRows, width: int) -> dict[str, NDArray[np.generic]]:
    """Return the tensors with their padded axis filled up to `width` with zeros."""
    tensors = dict(request.tensors)
    for name, axis in request.padded.items():
        array = tensors[name]
        shape = (*array.shape[:axis], width, *array.shape[axis + 1 :])
        tensors[name] = np.zeros(shape, array.dtype)
        tensors[name][tuple(map(slice, array.shape))] = array
    return tensors


def widen_rows(request: CoreRows, width: int, pad_token_id: int) -> CoreRows:
    """Return the request with rows padded to `width` on the right."""
    missing = width - request.width
    if not missing:
        return request
    if request.padded:
        return request._replace(tensors=pad_tensors(request, width), width=width)
    ids = request.tensors["input_ids"]
    wide = np.full((len(ids), width), pad_token_id, ids.dtype)
    wide[:, : ids.shape[1]] = ids
    return request._replace(tensors={**request.tensors, "input_ids": wide}, width=width)
