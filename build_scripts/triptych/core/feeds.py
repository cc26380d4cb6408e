"""Batches of core rows as inputs of the graph, in either layout, as the server sends them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.tensors import LONGEST, ROW_OFFSET, ROW_STRIDE, Tensor, TokenRow, made_by_server
from triptych.runtime.packed_rows import pack_rows, span_of

Sample = TokenRow | NDArray[np.uint8]
"""A row of the core: tokens, or the pixels of an image, UINT8 ``[height, width, channels]``."""

Feed = dict[str, NDArray[Any]]
"""The graph's inputs for one batch, by name."""

REQUEST_SIZES = (1, 3, 2)
"""Number of rows of the requests that form a packed batch, repeated."""


def core_feed(
    samples: Sequence[Sample],
    inputs: tuple[Tensor, ...],
    *,
    pad_token_id: int,
    width: int | None = None,
) -> Feed:
    """Return one batch of `samples`.

    Args:
        samples: Rows, all of tokens or all of pixels of one size.
        inputs: Inputs of the core as its config declares them; inputs that Triton makes are added.
        pad_token_id: Token id for padding.
        width: Padded length in tokens, with each row as a separate request. None for the usual
            feed: padded to the longest row, or packed, in requests of `REQUEST_SIZES`.
    """
    rows = [sample for sample in samples if isinstance(sample, TokenRow)]
    if not rows:
        return {inputs[0].name: np.stack([np.asarray(sample) for sample in samples])}
    lengths = np.array([[len(row.ids)] for row in rows], dtype=np.int32)
    feed: Feed = {
        "row_length": lengths,
        "first_segment": np.array([[row.first_segment] for row in rows], dtype=np.int32),
    }
    if ROW_OFFSET in inputs and width is None:
        feed |= _packed(rows, pad_token_id)
    else:
        width = max(len(row.ids) for row in rows) if width is None else width
        padded = [(*row.ids, *[pad_token_id] * (width - len(row.ids))) for row in rows]
        ids = np.array(padded, dtype=np.int32)
        feed |= {
            "input_ids": ids.reshape(-1) if ROW_OFFSET in inputs else ids,
            "row_offset": np.zeros_like(lengths),
            ROW_STRIDE.name: np.full(len(rows), width, np.int32),
            "row_span": span_of(np.array([[width]])).reshape(-1),
        }
        feed[LONGEST.name] = feed["row_span"]
    names = [tensor.name for tensor in (*inputs, *made_by_server(inputs))]
    return {name: feed[name] for name in names}


def row_starts(rows: Sequence[TokenRow], inputs: Sequence[Tensor]) -> list[int]:
    """Return the index of each row's first token in a packed feed; 0 for all in a padded one."""
    if ROW_OFFSET not in inputs:
        return [0] * len(rows)
    feed = _packed(rows, 0)
    stride = feed[ROW_STRIDE.name]
    starts: list[int] = (np.cumsum(stride) - stride + feed["row_offset"][:, 0]).tolist()
    return starts


def _packed(rows: Sequence[TokenRow], pad_token_id: int) -> Feed:
    """Return the inputs of a packed core for the rows of several requests."""
    sizes: list[int] = []
    for size in cycle(REQUEST_SIZES):
        if sum(sizes) >= len(rows):
            break
        sizes.append(min(size, len(rows) - sum(sizes)))
    ends = list(accumulate(sizes))
    requests = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    packed = [pack_rows([row.ids for row in request], pad_token_id) for request in requests]
    spans = [span_of(np.array([[len(row.ids)] for row in request])) for request in requests]
    strides = [np.full(len(each.ids), each.ids.shape[1], np.int32) for each in packed]
    return {
        "input_ids": np.concatenate([each.ids.reshape(-1) for each in packed]),
        "row_offset": np.concatenate([each.offset for each in packed]),
        "row_span": np.concatenate([span.reshape(-1) for span in spans]),
        ROW_STRIDE.name: np.concatenate(strides),
        LONGEST.name: max(spans, key=np.size).reshape(-1),
    }
