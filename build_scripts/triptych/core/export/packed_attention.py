"""Attention of a packed batch, computed in tiles of queries (see `packing` for the terms).

For each of the N tiles, W queries are multiplied with the L keys of the tile's row. Keys beyond the
row's end get `MASK_VALUE` added to their score. Time and memory therefore grow with the tokens of
the batch, not with B * L * L.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.core.export.packed_batch import GatheredBatch, PackedBatch
from triptych.core.export.packed_ops import PackedOperations
from triptych.core.export.row_ops import MASK_VALUE, attend, collect, gather

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "triptych_packed"
"""Name under which this attention is registered in transformers."""

_active: list[PackedOperations] = []


@contextlib.contextmanager
def packed_attention(model: PreTrainedModel, mode: PackedOperations) -> Iterator[None]:
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


def _configs(module: nn.Module) -> Iterator[PreTrainedConfig]:
    config = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation_internal"):
        yield config


def _mask(**options: object) -> Tensor | None:
    """Return the mask that a model needs, BOOL ``[B, 1, L, L]``; None if it only masks padding."""
    from transformers import masking_utils

    plain = masking_utils.bidirectional_mask_function
    if options["mask_function"] is plain and not options.get("use_vmap"):
        return None
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = masking_utils.sdpa_mask(**{**options, **skips})
    return mask


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Return FP32 ``[B, L, heads, d]`` for queries, keys and values ``[B, heads, L, d]``."""
    mode = _active[-1]
    if options.get("s_aux") is not None:
        raise ValueError("attention with sinks is not supported")
    with mode.paused():
        packed = [mode.gather(tensor, 2) for tensor in (query, key, value)]
        biases = [mode.values(one) for one in (attention_mask, position_bias) if one is not None]
        biases = [
            torch.where(one, 0.0, MASK_VALUE) if one.dtype == torch.bool else one for one in biases
        ]
        if isinstance(mode.batch, GatheredBatch):
            if softcap is not None:
                raise ValueError("attention with a limit of scores is not supported")
            result = _of_rows(mode.batch, packed, biases, scaling)
        else:
            squeezed = [tensor.squeeze(0) for tensor in packed]
            result = _tiled(mode.batch, squeezed, biases, scaling, softcap)
        return mode.spread(result, 1), None


def _of_rows(
    batch: GatheredBatch, packed: list[Tensor], biases: list[Tensor], scaling: float | None
) -> Tensor:
    """Return attention as packed tokens, FP32 ``[1, T, heads, d]``, computed on padded rows.

    `packed` are FP32 ``[1, heads, T, d]``.
    """
    heads, width = packed[0].shape[1], packed[0].shape[3]
    scale = width**-0.5 if scaling is None else scaling
    rows = []
    for tensor in packed:
        if tensor.shape[1] != heads:
            tensor = tensor.repeat_interleave(heads // tensor.shape[1], 1)
        rows.append(gather(tensor.transpose(1, 2).flatten(2).squeeze(0), batch.token_of_slot, 0))
    bias = None
    for one in biases:
        bias = one if bias is None else bias + one
    if bias is not None and _is_one(bias.shape[2]):
        bias = bias.expand(-1, -1, batch.max_length, -1)
    query, key, value = rows
    padded = attend(query, key, value, batch.attended[:, 0], bias, heads, scale)
    tokens = collect(padded, batch.where)[None]
    return tokens.reshape(1, batch.token_count, heads, packed[2].shape[3])


def _tiled(
    batch: PackedBatch,
    packed: list[Tensor],
    biases: list[Tensor],
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Return attention as packed tokens, FP32 ``[1, T, heads, d]``.

    Heads stay the first axis from the packed tokens to the result, so that a gather along the
    second axis makes tiles without transposing their keys and values.
    """
    queries = gather(packed[0], batch.token_of_query, 1)
    keys, values = (gather(tensor, batch.token_of_key, 1) for tensor in packed[1:])
    if keys.shape[0] != queries.shape[0]:
        repeats = queries.shape[0] // keys.shape[0]
        keys, values = (tensor.repeat_interleave(repeats, 0) for tensor in (keys, values))
    scores = (queries * (queries.shape[-1] ** -0.5 if scaling is None else scaling)) @ keys.mT
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = batch.key_bias(MASK_VALUE)[None, :, None, :]
    for extra in biases:
        bias = bias + _bias_of_tiles(batch, extra)
    weights = (scores + bias).softmax(-1)
    result = (weights @ values).flatten(1, 2).index_select(1, batch.query_of_token)
    return result.transpose(0, 1)[None]


def _bias_of_tiles(batch: PackedBatch, bias: Tensor) -> Tensor:
    """Return a bias ``[B or 1, heads or 1, L or 1, L]`` for tiles, heads first.

    The result is ``[heads or 1, N or 1, W or 1, L]``.
    """
    by_head = bias.transpose(0, 1)
    shared, same = _is_one(bias.shape[0]), _is_one(bias.shape[2])
    if same:
        return by_head if shared else by_head.index_select(1, batch.row_of_tile)
    place = batch.position_of_query
    if not shared:
        place = place + batch.row_of_tile[:, None] * batch.max_length
    flat = by_head.flatten(1, 2).index_select(1, place.reshape(-1))
    return flat.reshape(flat.shape[0], batch.tile_count, batch.tile_size, flat.shape[2])


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1
