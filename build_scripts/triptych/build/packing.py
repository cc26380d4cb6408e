"""The two layouts as torch modules around any encoder: rows packed end to end, or padded."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.errors import UserError
from triptych.model_facts import Dense, ModelFacts, Normalize

OUTSIDE = -1e4
"""Added to the attention score of a token in another row: its weight underflows to exactly 0 in
fp32, and the number itself still fits fp16."""


class SentenceHead(nn.Module):
    """Token vectors to one vector a row: pooling, then the model's own modules.

    Follows sentence-transformers' Pooling, Dense and Normalize.
    """

    def __init__(self, facts: ModelFacts, folder: Path) -> None:
        super().__init__()
        self.pooling = facts.pooling
        self.after = nn.ModuleList(
            _UnitLength() if isinstance(module, Normalize) else load_dense(module, folder)
            for module in facts.head
        )

    def forward(self, hidden: Tensor, position: Tensor, member: Tensor, length: Tensor) -> Tensor:
        """Pool `hidden` per row.

        Args:
            hidden: FP32 ``[R, N, H]``, R the rows or, where they share one sequence, 1.
            position: INT64 ``[R, N]``, each token's position in its row.
            member: BOOL ``[B, N]``, the tokens of each row.
            length: INT64 ``[B, 1]``.

        Returns:
            FP32 ``[B, dim]``.
        """
        pooled = [self._pool(mode, hidden, position, member, length) for mode in self.pooling]
        vector = torch.cat(pooled, dim=-1) if len(pooled) > 1 else pooled[0]
        for module in self.after:
            vector = module(vector)
        return vector

    @staticmethod
    def _pool(
        mode: str, hidden: Tensor, position: Tensor, member: Tensor, length: Tensor
    ) -> Tensor:
        if mode == "max":
            # A row without tokens must not become -inf.
            lowest = torch.finfo(hidden.dtype).min
            return torch.where(member[:, :, None], hidden, lowest).amax(dim=1)
        if mode == "cls":
            weight = (member & (position == 0)).to(hidden.dtype)
        elif mode == "lasttoken":
            weight = (member & (position == length - 1)).to(hidden.dtype)
        elif mode == "weightedmean":
            weight = member.to(hidden.dtype) * (position + 1).to(hidden.dtype)
            weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=1e-9)
        else:
            tokens = length.to(hidden.dtype).clamp(min=1.0)
            weight = member.to(hidden.dtype)
            weight = weight / (tokens.sqrt() if mode == "mean_sqrt_len_tokens" else tokens)
        if hidden.shape[0] == 1:
            return weight @ hidden[0]
        return (weight[:, None, :] @ hidden)[:, 0]


class _UnitLength(nn.Module):
    def forward(self, vector: Tensor) -> Tensor:
        return functional.normalize(vector, p=2.0, dim=1)


def load_dense(dense: Dense, folder: Path) -> nn.Module:
    """The layer `dense` of the model in `folder`, with its weights and activation.

    Raises:
        UserError: an activation that is not a torch.nn module.
    """
    linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
    path = folder / dense.folder
    if (path / "model.safetensors").is_file():
        from safetensors.torch import load_file

        weights = load_file(path / "model.safetensors")
    else:
        weights = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    kind = dense.activation.rsplit(".", 1)[-1]
    activation = getattr(nn, kind, None)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise UserError(
            str(path / "config.json"),
            "must name an activation of torch.nn",
            given=dense.activation,
            remedy="Choose a model with a plain activation",
        )
    return nn.Sequential(linear, activation())


class PackedEncoder(nn.Module):
    """All rows of a batch end to end as one sequence; a token attends within its row only.

    Row, position and mask are computed in the graph from `row_length` and `row_stride`, with
    standard operators only.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        accepted = inspect.signature(encoder.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.takes_types = "token_type_ids" in accepted
        self.first_position = _first_position(encoder)

    def forward(self, input_ids: Tensor, row_length: Tensor, row_stride: Tensor) -> Tensor:
        """Run the batch.

        Args:
            input_ids: INT32 ``[T]``, every row followed by its pads.
            row_length: INT32 ``[B, 1]``, tokens of each row.
            row_stride: INT32 ``[B]``, places each row takes in `input_ids`.

        Returns:
            FP32 ``[B, ...]``, what the head makes of each row.
        """
        length = row_length.long()
        end = torch.cumsum(row_stride.long(), 0)
        start = end - row_stride.long()
        place = torch.arange(input_ids.shape[0])
        row = (place[:, None] >= end[None, :]).long().sum(1)
        position = place - start[row]
        valid = position < length[row, 0]
        position = torch.where(valid, position, 0)
        attends = (row[:, None] == row[None, :]) & valid[None, :]
        extra = {}
        if self.takes_positions:
            extra["position_ids"] = position[None] + self.first_position
        if self.takes_types:
            extra["token_type_ids"] = torch.zeros_like(position)[None]
        hidden = self.encoder(
            input_ids=input_ids.long()[None],
            attention_mask=torch.where(attends, 0.0, OUTSIDE)[None, None],
            **extra,
        ).last_hidden_state
        member = (row[None, :] == torch.arange(row_length.shape[0])[:, None]) & valid[None, :]
        result: Tensor = self.head(hidden, position[None], member, length)
        return result


class BucketedEncoder(nn.Module):
    """Rows padded to one length, the mask made from `row_length`."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, input_ids: Tensor, row_length: Tensor) -> Tensor:
        """Run the batch.

        Args:
            input_ids: INT32 ``[B, L]``, rows padded on the right.
            row_length: INT32 ``[B, 1]``, tokens of each row.

        Returns:
            FP32 ``[B, ...]``, what the head makes of each row.
        """
        length = row_length.long()
        position = torch.arange(input_ids.shape[1])[None, :]
        valid = position < length
        hidden = self.encoder(
            input_ids=input_ids.long(), attention_mask=valid.long()
        ).last_hidden_state
        result: Tensor = self.head(hidden, position, valid, length)
        return result


def _first_position(encoder: nn.Module) -> int:
    """Position number of a row's first token: RoBERTa and its kin count from past the padding."""
    for name, module in encoder.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
