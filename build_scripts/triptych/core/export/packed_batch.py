"""Index tensors of a batch of packed tokens; see `packing` for the terms."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from triptych.core.export.row_ops import gather
from triptych.runtime.packing_spans import MULTIPLE


class PackedBatch:
    """Index tensors of one batch, all INT64.

    Args:
        length: Number of tokens of each row, INT32 ``[B, 1]``.
        offset: Distance of each row's first token from its position if every row had `stride`
            tokens, INT32 ``[B, 1]``.
        stride: Number of tokens of the row's request divided by its rows, INT32 ``[B]``.
        longest: Tensor ``[L]``. Its size is a multiple of 16 that no row exceeds.
        tile: Tensor ``[W]``. Its size is the number of queries in a tile.
        tiles: Tensor ``[N]``. Its size is at least the number of tiles of all rows.
        tokens: Token ids of all rows, with pad tokens between requests, INT32 ``[T]``.
        attended: Number of keys of each row, INT32 ``[B, 1]``; None for all its tokens.
    """

    def __init__(
        self,
        tokens: Tensor,
        length: Tensor,
        offset: Tensor,
        stride: Tensor,
        longest: Tensor,
        tile: Tensor,
        tiles: Tensor,
        attended: Tensor | None = None,
    ) -> None:
        self.tokens = tokens
        self.length = length.long()
        self.attended = self.length if attended is None else attended.long()
        self.token_count = tokens.shape[0]
        self.row_count = length.shape[0]
        self.max_length = longest.shape[0]
        self.tile_size = tile.shape[0]
        self.tile_count = tiles.shape[0]
        strides = stride.long()
        self._start = _sums_before(strides) + offset.long()[:, 0]
        self._last = _at_least_0(self.length[:, 0] - 1)

    @cached_property
    def _row_of_token(self) -> Tensor:
        """Row of each token, ``[T]``; a pad token belongs to the row before it."""
        place = torch.arange(self.token_count)
        return _at_least_0((place[:, None] >= self._start[None, :]).long().sum(1) - 1)

    @cached_property
    def position_of_token(self) -> Tensor:
        """Position of each token in its row, ``[T]``; a pad token has the row's last position."""
        row = self._row_of_token
        position = torch.arange(self.token_count) - self._start.index_select(0, row)
        return torch.minimum(_at_least_0(position), self._last.index_select(0, row))

    @cached_property
    def slot_of_token(self) -> Tensor:
        """Index of each token among the B * L padded slots, ``[T]``."""
        return self._row_of_token * self.max_length + self.position_of_token

    @cached_property
    def token_of_slot(self) -> Tensor:
        """Index of the token in each padded slot, ``[B, L]``.

        Slots beyond a row's end repeat its last token, so that they contain no infinity and no NaN.
        """
        position = torch.minimum(torch.arange(self.max_length)[None, :], self._last[:, None])
        return self._at_most_last(self._start[:, None] + position)

    @cached_property
    def _first_tile(self) -> Tensor:
        """Number of tiles before each row's first tile, ``[B]``."""
        # `//` would round toward minus infinity, which takes five more operators.
        return _sums_before(torch.div(self._last, self.tile_size, rounding_mode="trunc") + 1)

    @cached_property
    def row_of_tile(self) -> Tensor:
        """Row of each tile, ``[N]``."""
        tile = torch.arange(self.tile_count)
        return (tile[:, None] >= self._first_tile[None, :]).long().sum(1) - 1

    @cached_property
    def position_of_query(self) -> Tensor:
        """Position in its row of each query of a tile, ``[N, W]``, at most the row's last."""
        row = self.row_of_tile
        tile = torch.arange(self.tile_count) - self._first_tile.index_select(0, row)
        within = tile * self.tile_size
        position = within[:, None] + torch.arange(self.tile_size)[None, :]
        return torch.minimum(position, self._last.index_select(0, row)[:, None])

    @cached_property
    def token_of_query(self) -> Tensor:
        """Index of the token of each query, ``[N, W]``."""
        first = self._start.index_select(0, self.row_of_tile)[:, None]
        token = first + self.position_of_query
        return self._at_most_last(token)

    @cached_property
    def token_of_key(self) -> Tensor:
        """Index of the token of each key of a tile's row, ``[N, L]``."""
        return self.token_of_slot.index_select(0, self.row_of_tile)

    @cached_property
    def query_of_token(self) -> Tensor:
        """Index of each token among the N * W queries of all tiles, ``[T]``."""
        first = self._first_tile.index_select(0, self._row_of_token) * self.tile_size
        return first + self.position_of_token

    def _at_most_last(self, index: Tensor) -> Tensor:
        """Return token indices limited to the batch's last token: a row may have no token."""
        return torch.minimum(index, torch.full((), self.token_count - 1))

    def row_max(self, tokens: Tensor) -> Tensor:
        """Return the largest value of the tokens of each row, ``[B, K]`` for ``[T, K]``.

        It is that of the row's tiles, so that short rows cost no more beside a long one.
        """
        of_tiles = gather(tokens, self.token_of_query, 0).amax(1)
        # A tile has a multiple of this number of tokens.
        begin = torch.arange(self.max_length)[None, ::MULTIPLE]
        position = torch.minimum(begin, self._last[:, None])
        tile = torch.div(position, self.tile_size, rounding_mode="trunc")
        largest: Tensor = gather(of_tiles, self._first_tile[:, None] + tile, 0).amax(1)
        return largest

    def key_bias(self, outside: float) -> Tensor:
        """Return the bias of the keys of each tile, FP32 ``[N, L]``.

        It is 0 for the keys of the tile's row and `outside` for keys beyond them.
        """
        inside = torch.arange(self.max_length)[None, :] < self.attended
        return torch.where(inside, 0.0, outside).index_select(0, self.row_of_tile)


def _at_least_0(index: Tensor) -> Tensor:
    """Return the larger of each index and 0.

    Uses Max, because TensorRT has no Clip of INT64.
    """
    return torch.maximum(index, torch.zeros((), dtype=torch.int64))


def _sums_before(counts: Tensor) -> Tensor:
    """Return the sum of all counts before each one, INT64 ``[B]``."""
    index = torch.arange(counts.shape[0])
    return torch.where(index[None, :] < index[:, None], counts[None, :], 0).sum(1)


class GatheredBatch:
    """Index tensors of one batch whose attention is computed on padded rows (see `places`).

    Args:
        padded_ids: Token ids of padded rows, ``[B, L]``.
        length: Number of tokens of each row, INT32 ``[B, 1]``.
        spread: Index of the token in each padded slot, INT32 ``[B, L]``; negative ones count from
            the end. Slots beyond a row's end hold any tokens.
        where: Row and position of each token, INT64 ``[T, 2]``. There are no pad tokens.
        attended: Number of keys of each row, INT32 ``[B, 1]``; None for all its tokens.
    """

    def __init__(
        self,
        padded_ids: Tensor,
        length: Tensor,
        spread: Tensor,
        where: Tensor,
        attended: Tensor | None = None,
    ) -> None:
        self.length = length
        self.attended = length if attended is None else attended
        self.where = where
        self.token_of_slot = spread
        self.token_count = where.shape[0]
        # The exporter knows these sizes by the ids alone, which the model gets.
        self.row_count, self.max_length = padded_ids.shape

    def row_max(self, tokens: Tensor) -> Tensor:
        """Return the largest value of the tokens of each row, ``[B, K]`` for ``[T, K]``."""
        inside = torch.arange(self.max_length)[None, :] < self.length
        rows = gather(tokens, self.token_of_slot, 0)
        lowest = torch.finfo(rows.dtype).min
        return torch.where(inside[:, :, None], rows, lowest).amax(1)
