"""Operators that ONNX has and torch lacks: lookups by several indices, and attention of rows.

The exporter writes each as one node; run as usual, torch computes the same. See `packing` for B, L
and T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MASK_VALUE = -1e4
"""Number added to the score of a key that a query must not attend to. The key's weight underflows
to exactly 0 in fp32, and fp16 can represent the number."""


def gather(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """Return the entries of an axis at an index of any shape, whose axes replace that axis.

    Negative indices count from the end.
    """
    if torch.compiler.is_exporting():
        shape = (*tensor.shape[:axis], *index.shape, *tensor.shape[axis + 1 :])
        return _node("Gather", (tensor, index), shape, axis=axis)
    return tensor[(slice(None),) * axis + (index.long(),)]


def collect(rows: Tensor, where: Tensor) -> Tensor:
    """Return ``[T, ...]`` of ``[B, L, ...]``: the slots at `where`, INT64 ``[T, 2]``."""
    if torch.compiler.is_exporting():
        return _node("GatherND", (rows, where), (where.shape[0], *rows.shape[2:]))
    return rows[where[:, 0], where[:, 1]]


def place(values: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """Return ``[S, ...]`` with ``values[i]`` at ``index[i]``, and 0 elsewhere.

    Args:
        values: Values ``[T, ...]``.
        index: INT64 ``[T, 1]``; negative indices count from the end.
        tokens: Tensor ``[S]``.
    """
    result = values.new_zeros((tokens.shape[0], *values.shape[1:]))
    if torch.compiler.is_exporting():
        return _node("ScatterND", (result, index, values), result.shape)
    result[index[:, 0]] = values
    return result


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    bias: Tensor | None,
    heads: int,
    scale: float,
) -> Tensor:
    """Return the attention of padded rows, ``[B, L, heads * d]``, for three tensors like it.

    Args:
        length: Number of keys of each row that count, INT32 ``[B]``.
        bias: Numbers added to the scores, ``[B or 1, heads or 1, L, L]``.
    """
    if torch.compiler.is_exporting():
        return _node(
            "com.microsoft::MultiHeadAttention",
            (query, key, value, None, length, bias),
            (*query.shape[:2], value.shape[2]),
            version=1,
            num_heads=heads,
            scale=scale,
            mask_filter_value=MASK_VALUE,
        )
    q, k, v = (
        each.reshape(*each.shape[:2], heads, -1).transpose(1, 2) for each in (query, key, value)
    )
    inside = torch.arange(key.shape[1])[None, :] < length[:, None]
    mask = torch.where(inside, 0.0, MASK_VALUE)[:, None, None, :]
    result = functional.scaled_dot_product_attention(
        q, k, v, mask if bias is None else mask + bias, scale=scale
    )
    return result.transpose(1, 2).flatten(2)


def _node(
    name: str,
    inputs: Sequence[Tensor | None],
    shape: Sequence[int | torch.SymInt],
    *,
    version: int | None = None,
    **attributes: Any,
) -> Tensor:
    first = inputs[0]
    assert first is not None
    result: Tensor = torch.onnx.ops.symbolic(
        name, inputs, attributes, dtype=first.dtype, shape=shape, version=version
    )
    return result
