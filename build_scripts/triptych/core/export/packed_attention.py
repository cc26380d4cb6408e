"""Attention of a packed batch, computed in tiles of queries (see `packing` for the terms).

For each of the N tiles, W queries are multiplied with the L keys of the tile's row. Keys beyond the
row's end get `MASK_VALUE` added to their score. Time and memory therefore grow with the tokens of
the batch, not with B * L * L.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from triptych.core.export.packed_ops import PackedOperations

NAME = "triptych_packed"
"""Name under which this attention is registered in transformers."""

MASK_VALUE = -1e4
"""Number added to the score of a key that a query must not attend to. The key's weight underflows
to exactly 0 in fp32, and fp16 can represent the number."""

_active: list[PackedOperations] = []


@contextlib.contextmanager
def packed_attention(model: Any, mode: PackedOperations) -> Iterator[None]:
    """Make a model compute attention in tiles while the context is open.

    The model's layers must look their attention function up in transformers' registry.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    _active.append(mode)
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        _active.pop()
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _configs(module: Any) -> Iterator[Any]:
    config = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation_internal"):
        yield config


def _mask(**options: Any) -> Tensor | None:
    """Return the mask that a model needs, BOOL ``[B, 1, L, L]``; None if it only masks padding."""
    from transformers import masking_utils

    plain = masking_utils.bidirectional_mask_function
    if options["mask_function"] is plain and not options.get("use_vmap"):
        return None
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = masking_utils.sdpa_mask(**{**options, **skips})
    return mask


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Return FP32 ``[B, L, heads, d]`` for queries, keys and values ``[B, heads, L, d]``."""
    mode = _active[-1]
    if s_aux is not None:
        raise ValueError("attention with sinks is not supported")
    with mode.paused():
        packed = [mode.gather(tensor, 2).squeeze(0) for tensor in (query, key, value)]
        biases = [mode.values(one) for one in (attention_mask, position_bias) if one is not None]
        result = _tiled(mode, packed, biases, scaling, softcap)
        return mode.spread(result, 1), None


def _tiled(
    mode: PackedOperations,
    packed: list[Tensor],
    biases: list[Tensor],
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Return attention as packed tokens, FP32 ``[1, T, heads, d]``.

    Heads stay the first axis from the packed tokens to the result, so that a gather along the
    second axis makes tiles without transposing their keys and values.
    """
    batch = mode.batch
    queries = _rows(packed[0], batch.token_of_query)
    keys, values = (_rows(tensor, batch.token_of_key) for tensor in packed[1:])
    if keys.shape[0] != queries.shape[0]:
        repeats = queries.shape[0] // keys.shape[0]
        keys, values = (tensor.repeat_interleave(repeats, 0) for tensor in (keys, values))
    scores = (queries * (queries.shape[-1] ** -0.5 if scaling is None else scaling)) @ keys.mT
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = batch.key_bias(MASK_VALUE)[None, :, None, :]
    for extra in biases:
        additive = torch.where(extra, 0.0, MASK_VALUE) if extra.dtype == torch.bool else extra
        bias = bias + _bias_of_tiles(mode, additive)
    weights = (scores + bias).softmax(-1)
    result = (weights @ values).flatten(1, 2).index_select(1, batch.query_of_token)
    return result.transpose(0, 1)[None]


def _rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Gather tokens ``[heads, T, d]`` by an index ``[N, M]`` into ``[heads, N, M, d]``."""
    rows = tokens.index_select(1, index.reshape(-1))
    return rows.reshape(tokens.shape[0], index.shape[0], index.shape[1], tokens.shape[2])


def _bias_of_tiles(mode: PackedOperations, bias: Tensor) -> Tensor:
    """Return a bias ``[B or 1, heads or 1, L or 1, L]`` for tiles, heads first.

    The result is ``[heads or 1, N or 1, W or 1, L]``.
    """
    batch = mode.batch
    by_head = bias.transpose(0, 1)
    shared, same = _is_one(bias.shape[0]), _is_one(bias.shape[2])
    if same:
        return by_head if shared else by_head.index_select(1, batch.row_of_tile)
    place = batch.position_of_query
    if not shared:
        place = place + batch.row_of_tile[:, None] * batch.max_length
    flat = by_head.flatten(1, 2).index_select(1, place.reshape(-1))
    return flat.reshape(flat.shape[0], batch.tile_count, batch.tile_size, flat.shape[2])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
