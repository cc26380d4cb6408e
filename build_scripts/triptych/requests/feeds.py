"""Core rows as the feed of one batch of the graph, in either layout: as the server passes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.tensors import ROW_STRIDE, Tensor, TokenRow

Sample = TokenRow | NDArray[np.uint8]
"""One row for the core: tokens, or the pixels of an image, UINT8 ``[height, width, channels]``."""

Feed = dict[str, NDArray[Any]]
"""The graph's inputs for one batch, by name."""


def core_feed(
    samples: Sequence[Sample],
    inputs: tuple[Tensor, ...],
    *,
    packed: bool,
    pad_token_id: int,
    strides: Sequence[int] | None = None,
) -> Feed:
    """One batch of `samples`.

    Args:
        samples: the rows, all tokens or all pixels of one size.
        inputs: of the graph, by the names of `triptych.tensors`; ``row_stride`` is added where
            the layout is packed. For a core that reads images: the one input.
        packed: the layout.
        pad_token_id: fills rows up.
        strides: places each row takes; those of `row_strides` where left out.
    """
    rows = [sample for sample in samples if isinstance(sample, TokenRow)]
    if not rows:
        return {inputs[0].name: np.stack([np.asarray(sample) for sample in samples])}
    strides = row_strides(rows, packed=packed) if strides is None else strides
    feed = {
        "input_ids": _input_ids(rows, strides, pad_token_id, packed=packed),
        "row_length": np.array([[len(row.ids)] for row in rows], dtype=np.int32),
        "first_segment": np.array([[row.first_segment] for row in rows], dtype=np.int32),
        ROW_STRIDE.name: np.array(strides, dtype=np.int32),
    }
    fed = [tensor.name for tensor in inputs] + [ROW_STRIDE.name] * packed
    return {name: feed[name] for name in fed}


def row_strides(rows: Sequence[TokenRow], *, packed: bool) -> list[int]:
    """Places each row takes, pads included.

    In the packed layout every second row is followed by pads, as rows of a request of several
    rows are.
    """
    if not packed:
        return [max(len(row.ids) for row in rows)] * len(rows)
    return [len(row.ids) + (index % 4 if index % 2 else 0) for index, row in enumerate(rows)]


def _input_ids(
    rows: Sequence[TokenRow], strides: Sequence[int], pad_token_id: int, *, packed: bool
) -> NDArray[np.int32]:
    """INT32 ``[places]`` where packed, ``[rows, places]`` else."""
    padded = [
        (*row.ids, *[pad_token_id] * (stride - len(row.ids)))
        for row, stride in zip(rows, strides, strict=True)
    ]
    if packed:
        return np.array([token for row in padded for token in row], dtype=np.int32)
    return np.array(padded, dtype=np.int32)
