"""Heads as torch modules: from the vectors of tokens to logits or vectors.

Shapes: B rows of a batch, N tokens (the padded length, or all tokens of a packed batch), H numbers
per token, K results. R is B for padded rows, and 1 if the rows share one packed axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from triptych.base.errors import UserError
from triptych.models.checks import check_finite
from triptych.models.info import Dense, HeadModule, LogitScore, ModelInfo, Normalize, Truncate

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

Reading = Literal["cls", "mean", "lasttoken", "lastword", "max", "mask", "all"]
"""Tokens that a head reads. ``lasttoken`` is the last token of a row; ``lastword`` is the last
token that is not the model's pad token, which a text may contain; ``mask`` is the mask token;
``all`` is every token."""

ROW_READINGS: tuple[Reading, ...] = ("cls", "mean", "lasttoken", "lastword", "max")
"""Readings that are tried for a model's own head of one result per row, in this order."""


class RowMembership(NamedTuple):
    """Assignment of the tokens in a tensor ``[R, N, ...]`` to the B rows of a batch."""

    ids: Tensor  # Token ids, INT64 ``[R, N]``
    position: Tensor  # Position of each token in its row, INT64 ``[R or 1, N]``
    member: Tensor  # Whether a token belongs to a row, BOOL ``[B, N]``
    length: Tensor  # Number of tokens of each row, INT64 ``[B, 1]``
    # Number of tokens at the beginning of each row that are not pooled, ``[B, 1]``; None if all are
    # pooled.
    prompt: Tensor | None = None


def pool(mode: str, hidden: Tensor, rows: RowMembership) -> Tensor:
    """Pool ``[R, N, H]`` to one vector per row ``[B, H]``, by a mode of sentence-transformers.

    ``sum`` adds the tokens of a row.
    """
    member, position, length = rows.member, rows.position, rows.length
    count = length
    first: Tensor | int = 0
    if rows.prompt is not None:
        member = member & (position >= rows.prompt)
        count = length - rows.prompt
        first = torch.where(count > 0, rows.prompt, 0)
    if mode == "max":
        # A row without tokens must not become -inf.
        lowest = torch.finfo(hidden.dtype).min
        return torch.where(member[:, :, None], hidden, lowest).amax(dim=1)
    if mode == "cls":
        weight = (rows.member & (position == first)).to(hidden.dtype)
    elif mode == "lasttoken":
        weight = (member & (position == length - 1)).to(hidden.dtype)
    elif mode == "weightedmean":
        weight = member.to(hidden.dtype) * (position + 1).to(hidden.dtype)
        weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=1e-9)
    elif mode == "sum":
        weight = member.to(hidden.dtype)
    else:
        tokens = count.to(hidden.dtype).clamp(min=1.0)
        weight = member.to(hidden.dtype)
        weight = weight / (tokens.sqrt() if mode == "mean_sqrt_len_tokens" else tokens)
    return weighted(weight, hidden)


def weighted(weight: Tensor, hidden: Tensor) -> Tensor:
    """Sum ``[R, N, H]`` over each row's tokens with weights ``[B, N]``; return ``[B, H]``."""
    if hidden.shape[0] == 1:
        return weight @ hidden[0]
    return (weight[:, None, :] @ hidden)[:, 0]


class SentenceHead(nn.Module):
    """Head of sentence-transformers, from token vectors to one vector per row.

    It consists of Pooling, Dense and Normalize modules, and a truncation.
    """

    def __init__(self, info: ModelInfo, folder: Path) -> None:
        super().__init__()
        self.pooling = info.pooling
        self.after = nn.ModuleList(_load_module(module, folder) for module in info.head)

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        """Return FP32 ``[B, dim]`` for FP32 ``[R, N, H]``."""
        modes = self.pooling
        if modes == ("mean",) and isinstance(next(iter(self.after), None), UnitLength):
            modes = ("sum",)  # the length of the vector does not matter
        pooled = [pool(mode, hidden, rows) for mode in modes]
        vector = torch.cat(pooled, dim=-1) if len(pooled) > 1 else pooled[0]
        for module in self.after:
            vector = module(vector)
        return vector


def _load_module(module: HeadModule, folder: Path) -> nn.Module:
    if isinstance(module, Normalize):
        return UnitLength()
    if isinstance(module, Truncate):
        return _First(module.size)
    if isinstance(module, LogitScore):
        return _TokenLogit(module, folder)
    return load_dense(module, folder)


class _TokenLogit(nn.Module):
    """Logit of a token of the vocabulary, less that of another one: FP32 ``[B, 1]``."""

    def __init__(self, score: LogitScore, folder: Path) -> None:
        super().__init__()
        from triptych.models.loading import load_model

        head = load_model(folder, "AutoModelForCausalLM").get_output_embeddings()
        ids = [score.true_id] if score.false_id is None else [score.true_id, score.false_id]
        bias = getattr(head, "bias", None)
        self.logits = nn.Linear(head.in_features, len(ids), bias=bias is not None)
        with torch.no_grad():
            self.logits.weight.copy_(head.weight[ids])
            if bias is not None:
                self.logits.bias.copy_(bias[ids])

    def forward(self, vector: Tensor) -> Tensor:
        logits: Tensor = self.logits(vector)
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] > 1 else logits


class UnitLength(nn.Module):
    """Scaling of each vector to length 1."""

    def forward(self, vector: Tensor) -> Tensor:
        # `functional.normalize` also expands the length to the size of the vectors.
        length: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        return vector / length.clamp(min=1e-12)


class _First(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, vector: Tensor) -> Tensor:
        return vector[..., : self.size]


class SeveralHeads(nn.Module):
    """Heads that read the same vectors of tokens.

    Args:
        of_row: Head of a row.
        of_tokens: Modules on the vector of each token.
    """

    def __init__(self, of_row: nn.Module, of_tokens: Sequence[nn.Module]) -> None:
        super().__init__()
        self.of_row = of_row
        self.of_tokens = nn.ModuleList(of_tokens)

    def forward(self, hidden: Tensor, rows: RowMembership) -> tuple[Tensor, ...]:
        """Return FP32 ``[B, K]``, and ``[R, N, K]`` of each module, for FP32 ``[R, N, H]``."""
        return self.of_row(hidden, rows), *(module(hidden) for module in self.of_tokens)


class TowerHead(nn.Module):
    """Head of the text side of a model of texts and images: the projection of the end of a text.

    That is the first token which ends it, or the last token of a model that reads the padding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.is_padded = not hasattr(model, "text_projection")
        self.projection: nn.Module = model.head if self.is_padded else model.text_projection
        # As in transformers: the first of the tokens with the highest id, for older configs.
        self.eos_token_id = None if model.config.eos_token_id == 2 else model.config.eos_token_id

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        """Return FP32 ``[B, dim]`` for FP32 ``[R, N, H]``."""
        if self.is_padded:
            padded: Tensor = self.projection(pool("lasttoken", hidden, rows))
            return padded
        end: Tensor | int | None = self.eos_token_id
        if end is None:
            end = torch.where(rows.member, rows.ids, -1).amax(1, keepdim=True)
        ends = rows.member & (rows.ids == end)
        first = -torch.where(ends, -rows.position, -(2**31)).amax(1, keepdim=True)
        weight = (ends & (rows.position == first)).to(hidden.dtype)
        vector: Tensor = self.projection(weighted(weight, hidden))
        return vector


class TokenHead(nn.Module):
    """Head of a model with a vector for each token: Dense and Normalize modules."""

    def __init__(self, info: ModelInfo, folder: Path) -> None:
        super().__init__()
        self.after = nn.Sequential(*(_load_module(module, folder) for module in info.head))

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        """Return FP32 ``[R, N, dim]`` for FP32 ``[R, N, H]``."""
        vectors: Tensor = self.after(hidden)
        return vectors


def load_dense(dense: Dense, folder: Path) -> nn.Module:
    """Return the layer with its weights from a model's folder, followed by its activation.

    Raises:
        UserError: The activation is not a torch.nn module.
    """
    linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
    path = folder / dense.folder
    if (path / "model.safetensors").is_file():
        from safetensors.torch import load_file

        weights = load_file(path / "model.safetensors")
    else:
        weights = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    linear.load_state_dict(_part(weights, "linear."))
    check_finite(linear)
    activation = getattr(nn, dense.activation.rsplit(".", 1)[-1], None)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise UserError(
            str(path / "config.json"),
            "names an activation that torch.nn does not have",
            given=dense.activation,
            remedy="Choose a model whose activation is a torch.nn module",
        )
    layer = nn.Sequential(linear, activation())
    if not dense.residual:
        return layer
    residual: nn.Module = nn.Identity()
    if dense.in_features != dense.out_features:
        residual = nn.Linear(dense.in_features, dense.out_features, bias=False)
        residual.load_state_dict(_part(weights, "residual."))
        check_finite(residual)
    return _Sum(layer, residual)


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights of a layer; one without a prefix is the linear layer."""
    names = {name: name if "." in name else f"linear.{name}" for name in weights}
    return {
        named.removeprefix(prefix): weights[name]
        for name, named in names.items()
        if named.startswith(prefix)
    }


class _Sum(nn.Module):
    """Sum of the results of two modules."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one = one
        self.other = other

    def forward(self, vector: Tensor) -> Tensor:
        result: Tensor = self.one(vector) + self.other(vector)
        return result


class OwnHead(nn.Module):
    """A model's own head, applied only to the tokens that it reads."""

    def __init__(self, model: PreTrainedModel, reading: Reading, mask_token_id: int | None) -> None:
        super().__init__()
        self.reading = reading
        self.mask_token_id = mask_token_id
        # The head is everything the model does after its encoder. The model itself is called with a
        # replacement for the encoder. The shallow copy leaves the caller's model unchanged.
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)
        setattr(self.model, model.base_model_prefix, _Encoded(model.base_model))
        self.pad_token_id = getattr(model.config, "pad_token_id", None)
        if self.pad_token_id is None:
            # Some heads reject a batch if it is None, although their input has no padding.
            self.model.config = copy.copy(model.config)
            self.model.config.pad_token_id = 0

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        """Return logits, FP32 ``[B, K]`` or per token ``[R, N, K]``, for FP32 ``[R, N, H]``."""
        if self.reading == "all":
            return logits_of(self.model(inputs_embeds=hidden))
        if self.reading != "mask":
            if self.reading == "lastword":
                read = self._last_word(hidden, rows)
            else:
                read = pool(self.reading, hidden, rows)
            return logits_of(self.model(inputs_embeds=read[:, None]))
        read = _at_mask(hidden, rows, self.mask_token_id)
        return logits_of(self.model(inputs_embeds=read[:, None]))[:, 0]

    def _last_word(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        words = rows.member & (rows.ids != self.pad_token_id)
        index = torch.where(words, rows.position, 0)
        last = index.amax(1, keepdim=True)
        return weighted((rows.member & (rows.position == last)).to(hidden.dtype), hidden)


class VocabularyHead(nn.Module):
    """The head of a model of masked words, pooled to one number per row and word of the vocabulary.

    The logits of all tokens for all words would need gigabytes. The words are therefore computed
    in tiles, and each tile is pooled before the next one.

    Args:
        model: Model with its head.
        pool: Function of the logits of a tile, FP32 ``[R, N, W]``, and the membership of the
            tokens, which returns FP32 ``[B, W]``.
        tile: Number of words in a tile.

    Raises:
        UserError: The model has no linear layer from vectors to words.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: Callable[[Tensor, RowMembership], Tensor],
        tile: int,
    ) -> None:
        super().__init__()
        words = model.get_output_embeddings()
        if not isinstance(words, nn.Linear):
            raise UserError(
                "model.source",
                "must have a linear layer from vectors to the words of its vocabulary",
                given=type(model).__name__,
                remedy="Choose another model",
            )
        self.words = words
        # A copy with the same weights, in which the layer before the words is the last one.
        shared: dict[int, object] = {id(weight): weight for weight in model.parameters()}
        shared |= {id(buffer): buffer for buffer in model.buffers()}
        last = copy.deepcopy(model, {**shared, id(words): nn.Identity()})
        self.before = OwnHead(last, "all", None)
        self.pool = pool
        self.tile = tile

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        """Return FP32 ``[B, vocabulary]`` for FP32 ``[R, N, H]``."""
        read = self.before(hidden, rows)
        # Slots beyond a row's end repeat its first token, which changes no maximum.
        read = torch.where(rows.member[:, :, None], read, read[:, :1])
        weight, bias = self.words.weight, self.words.bias
        tiles = []
        for start in range(0, len(weight), self.tile):
            part = slice(start, start + self.tile)
            logits = nn.functional.linear(read, weight[part], None if bias is None else bias[part])
            tiles.append(self.pool(logits, rows))
        return torch.cat(tiles, dim=-1)


class LogitsReader(nn.Module):
    """Selects what the task reads from the logits of a model that runs with its own head."""

    def __init__(self, reading: Reading, mask_token_id: int | None) -> None:
        super().__init__()
        self.reading = reading
        self.mask_token_id = mask_token_id

    def forward(self, logits: Tensor, rows: RowMembership) -> Tensor:
        """Return ``[B, K]`` at the mask token if the task reads it; else the logits unchanged."""
        if self.reading != "mask":
            return logits
        return _at_mask(logits, rows, self.mask_token_id)


def _at_mask(values: Tensor, rows: RowMembership, mask_token_id: int | None) -> Tensor:
    """Return ``[B, K]`` of ``[R, N, K]`` at each row's mask token; 0 in rows without one."""
    masked = rows.member & (rows.ids == mask_token_id)
    return weighted(masked.to(values.dtype), values)


class _Encoded(nn.Module):
    """Replacement for a model's encoder that returns the embeddings it receives."""

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Some heads use the encoder's word embeddings.
            return getattr(super().__getattr__("base"), name)

    def forward(self, *unused: object, inputs_embeds: Tensor, **more: object) -> ModelOutput:
        # This output class has every field that a head reads.
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=inputs_embeds, pooler_output=self._pooled(inputs_embeds)
        )

    def _pooled(self, hidden: Tensor) -> Tensor | None:
        pooler = getattr(self.base, "pooler", None)
        if not isinstance(pooler, nn.Linear):
            return None if pooler is None else pooler(hidden)
        # ALBERT and BigBird apply the rest of the pooler in the encoder.
        named = (getattr(self.base, name, None) for name in ("pooler_activation", "activation"))
        activation = next((function for function in named if function is not None), nn.Identity())
        pooled: Tensor = activation(pooler(hidden[:, 0]))
        return pooled


def logits_of(output: ModelOutput) -> Tensor:
    """Return the logits of a model's output; start and end logits as a last axis of size 2.

    Raises:
        ValueError: The output has no logits.
    """
    if getattr(output, "start_logits", None) is not None:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"{type(output).__name__} has no logits")
    return logits
