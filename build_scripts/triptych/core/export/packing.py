"""Text models as torch modules for both layouts: padded rows and packed tokens.

A batch has B rows; row ``b`` has ``length[b]`` tokens, at most L. Per token a layer computes H
numbers.

- **Padded** (length bucketing): token ids are ``[B, L]`` and vectors ``[B, L, H]``. Shorter rows
  are filled with pad tokens, which cost as much time as other tokens.
- **Packed** (sequence packing): the rows of all requests lie end to end, as token ids ``[T]`` and
  vectors ``[1, T, H]``. T is the sum of the lengths, plus a few pad tokens between requests.
- **Tiled** (only within attention): each row is cut into tiles of W queries, so that N tiles hold
  all tokens, ``[N, W, ...]``. Each tile attends to the keys of its own row alone, ``[N, L, ...]``.

Triton joins packed requests without knowing their rows. A request of R rows and S tokens (pad
tokens included) sends for each row its length, a stride of S / R and an offset. The offset is the
distance of the row's first token from the position it would have if all rows had the stride's
length. The sum of all strides before a row, plus its offset, is the index of its first token in the
whole batch.

`PackedCore` runs a model written for padded rows on packed tokens: `PackedBatch` computes the
indices between the three arrangements, `packed_ops` lets token-wise operations compute on packed
tokens, `packed_attention` computes attention in tiles, and `to_onnx` adds the operators that
choose W and N to the exported graph. `layout_check` accepts a way to run a model only after
comparing its results with those of single rows.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.core.export.packed_attention import packed_attention
from triptych.core.export.packed_batch import GatheredBatch, PackedBatch
from triptych.core.export.packed_ops import PackedOperations
from triptych.core.export.row_ops import place
from triptych.tasks.heads import RowMembership, weighted

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


Result = Tensor | tuple[Tensor, ...]
"""Result of a head, or the results of several heads."""


class CannotPack(Exception):
    """Raised if the model cannot be run on packed tokens; the message gives the reason."""


class PositionIds(NamedTuple):
    """Numbering of the tokens of a row."""

    # Number of the first token. RoBERTa and its family start behind the id of the padding.
    first: int = 0
    # Token id that is not counted anywhere in a row and has its own id as its number; None if every
    # token counts.
    skipped: int | None = None

    def numbers(self, ids: Tensor, position: Tensor, valid: Tensor) -> Tensor:
        """Return ``position_ids``, INT64 ``[B or 1, L]``.

        Args:
            ids: INT64 ``[B, L]``.
            position: Position of each slot in its row, INT64 ``[1, L]``.
            valid: Whether a slot holds a token of its row, BOOL ``[B, L]``.
        """
        if self.skipped is None:
            return position + self.first
        counted = valid & (ids != self.skipped)
        # `cumsum` is avoided: TensorRT runs it as a loop, which neither fuses with neighboring
        # operators nor fits a CUDA graph. INT32 takes at most a quarter of the memory of a layer's
        # scores.
        before = position < position.T
        earlier = (before & counted[..., None, :]).sum(-1, dtype=torch.int32)
        return torch.where(counted, earlier.long() + self.first, self.skipped)


class PaddedEncoder(nn.Module):
    """A model on rows padded to one length, its mask computed from the rows' lengths.

    Args:
        encoder: Model, with or without its own head.
        read: Function that returns the result from the model's output.
        segments: Number of segments of a row.
        counting: Numbering of the positions that the model is given; None leaves it to the model.
            RoBERTa and its family count by a running sum, which TensorRT runs as a loop.
        around: Context manager in which the model runs.
    """

    def __init__(
        self,
        encoder: PreTrainedModel,
        read: Callable[[ModelOutput], Tensor],
        segments: int,
        *,
        counting: PositionIds | None = None,
        around: Callable[[PreTrainedModel], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.read = read
        # A model without a table of token types, such as GPT-2, may look them up as words.
        typed = segments > 1 or getattr(encoder.config, "type_vocab_size", None)
        self.takes_types = bool(typed) and takes(encoder, "token_type_ids")
        self.segments = segments
        self.counting = counting
        self.around = around

    def forward(
        self,
        input_ids: Tensor,
        row_length: Tensor,
        first_segment: Tensor | None = None,
        position: Tensor | None = None,
        attended_length: Tensor | None = None,
    ) -> tuple[Tensor, RowMembership]:
        """Return the model's result for each token, and the membership of the tokens.

        The result is FP32 ``[B, L, H]``, or the logits of a model with its own head.

        Args:
            input_ids: INT32 or INT64 ``[B, L]``, rows padded on the right.
            row_length: INT32 ``[B, 1]``, tokens of each row.
            first_segment: INT32 ``[B, 1]``, tokens of each row before its second segment.
            position: Position of each slot, INT32 ``[1, L]``; computed if it is left out.
            attended_length: INT32 ``[B, 1]``, tokens of each row that its tokens attend to; all if
                it is left out.
        """
        # The packed layout finds the packed form of `ids` by the tensor's identity.
        ids = input_ids if input_ids.dtype == torch.int64 else input_ids.long()
        length = row_length.long()
        if position is None:
            position = torch.arange(input_ids.shape[1])[None, :]
            valid = position < length
        else:
            valid = position < row_length
            position = position.long()
        extra = dict(self._types(position.expand(ids.shape), first_segment))
        if self.counting is not None:
            extra["position_ids"] = self.counting.numbers(ids, position, valid)
        mask = valid if attended_length is None else position < attended_length
        with self.around(self.encoder):
            output = self.encoder(input_ids=ids, attention_mask=mask.long(), **extra)
        return self.read(output), RowMembership(ids, position, valid, length)

    def _types(self, position: Tensor, first_segment: Tensor | None) -> Mapping[str, Tensor]:
        """Return ``token_type_ids`` like `position`, where the model takes them."""
        if not self.takes_types:
            return {}
        if first_segment is None or self.segments < 2:
            return {"token_type_ids": torch.zeros_like(position)}
        return {"token_type_ids": (position >= first_segment).long()}


class TextCore(nn.Module):
    """Model on padded rows, with a head."""

    def __init__(self, encoder: PaddedEncoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(
        self,
        input_ids: Tensor,
        row_length: Tensor,
        first_segment: Tensor | None = None,
        prompt_length: Tensor | None = None,
        attended_length: Tensor | None = None,
        position: Tensor | None = None,
    ) -> Result:
        """Return the head's result, ``[B, K]`` or ``[B, L, K]``.

        `prompt_length` has the number of tokens at each row's beginning that are not pooled,
        ``[B, 1]``. See `PaddedEncoder` for the other arguments.
        """
        hidden, rows = self.encoder(input_ids, row_length, first_segment, position, attended_length)
        if prompt_length is not None:
            rows = rows._replace(prompt=prompt_length.long())
        result: Result = self.head(hidden, rows)
        return result


class PackedCore(nn.Module):
    """A text core whose token-wise operations compute on packed tokens.

    Args:
        core: Model and head on padded rows.
        per_token: Whether each result of the head has an entry for each token.
        tiled: Whether attention is computed in tiles of queries; else by the model's own code, on
            padded rows.
    """

    def __init__(self, core: TextCore, *, per_token: Sequence[bool], tiled: bool) -> None:
        super().__init__()
        self.core = core
        self.per_token = per_token
        self.tiled = tiled

    def forward(  # noqa: PLR0913  (inputs of the graph)
        self,
        input_ids: Tensor,
        row_length: Tensor,
        row_offset: Tensor,
        row_stride: Tensor,
        longest: Tensor,
        tile: Tensor,
        tiles: Tensor,
        first_segment: Tensor | None = None,
        prompt_length: Tensor | None = None,
        attended_length: Tensor | None = None,
    ) -> Result:
        """Return the head's result, ``[B, K]`` or ``[1, T, K]``.

        See `PackedBatch` and `TextCore` for the arguments.
        """
        sizes = (longest, tile, tiles)
        batch = PackedBatch(input_ids, row_length, row_offset, row_stride, *sizes, attended_length)
        mode = PackedOperations(batch)
        ids = mode.spread(input_ids.long()[None], 1)
        with mode, self._attention(mode):
            result: Result = self.core(
                ids, row_length, first_segment, prompt_length, attended_length
            )
        return self._parts(result, mode.gather, mode.values)

    def _parts(
        self,
        result: Result,
        of_tokens: Callable[[Tensor], Tensor],
        of_rows: Callable[[Tensor], Tensor],
    ) -> Result:
        """Return each result of the head in the layout's form."""
        several = result if isinstance(result, tuple) else (result,)
        parts = tuple(
            (of_tokens if own else of_rows)(part)
            for part, own in zip(several, self.per_token, strict=True)
        )
        return parts if isinstance(result, tuple) else parts[0]

    def _attention(self, mode: PackedOperations) -> AbstractContextManager[None]:
        return packed_attention(self.core.encoder.encoder, mode) if self.tiled else nullcontext()


class GatheredCore(PackedCore):
    """A text core on packed tokens whose attention is computed on padded rows, for a GPU.

    With `tiled`, attention is one operator; else the model's own code computes it.
    """

    def forward(  # noqa: PLR0913  (inputs of the graph)
        self,
        input_ids: Tensor,
        row_length: Tensor,
        padded_ids: Tensor,
        positions: Tensor,
        spread: Tensor,
        where: Tensor,
        place_of_token: Tensor,
        first_segment: Tensor | None = None,
        prompt_length: Tensor | None = None,
        attended_length: Tensor | None = None,
    ) -> Result:
        """Return the head's result, ``[B, K]``, or ``[1, S, K]`` with an entry for each id.

        Args:
            input_ids: Token ids of all rows with pad tokens between requests, INT32 ``[S]``.
            row_length: See `TextCore`.
            padded_ids: Token ids of padded rows, INT32 ``[B, L]``.
            positions: Numbers from 0, INT32 ``[L]``.
            spread: See `GatheredBatch`.
            where: See `GatheredBatch`.
            place_of_token: Index of each token among the ids, INT64 ``[T, 1]``.
            first_segment: See `TextCore`.
            prompt_length: See `TextCore`.
            attended_length: See `PaddedEncoder`.
        """
        batch = GatheredBatch(padded_ids, row_length, spread, where, attended_length)
        mode = PackedOperations(batch)
        others = (first_segment, prompt_length, attended_length)
        with mode, self._attention(mode):
            result: Result = self.core(padded_ids, row_length, *others, positions[None, :])

        def placed(part: Tensor) -> Tensor:
            return place(mode.gather(part)[0], place_of_token, input_ids)[None]

        return self._parts(result, placed, mode.values)


def hidden_of(output: ModelOutput) -> Tensor:
    """Return the token vectors of a model's output, FP32 ``[B, L, H]``."""
    hidden: Tensor = output.last_hidden_state
    return hidden


def takes(model: PreTrainedModel, name: str) -> bool:
    """Check that a model's `forward` has the parameter `name`."""
    return name in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute's value while the context is open."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def without_fixed_length(model: PreTrainedModel) -> Iterator[None]:
    """Keep the sequence length out of Python code while the context is open.

    An exported graph would contain the length as a constant. DeBERTa cuts its table of relative
    positions to the length; the full table gives the same result.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "compute_attention_span"):
                full_span = _replaced(module, "compute_attention_span", lambda _q, _k, span: span)
                stack.enter_context(full_span)
        yield


@contextlib.contextmanager
def last_picked(model: PreTrainedModel) -> Iterator[None]:
    """Make a model that selects vectors by a mask over tokens select the last one of each row.

    The heads of BART and its family read the last end-of-sequence token in this way: they select
    all tokens that the mask marks, the same number in each row, and use the last one. Rows with
    different numbers of marked tokens could not share a batch. The graph would have a NonZero,
    which fails for a row without marked tokens and which TensorRT does not support.
    """
    checks = {sys.modules[type(module).__module__] for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for module in checks:
            if hasattr(module, "torch_compilable_check"):
                unchecked = _replaced(module, "torch_compilable_check", lambda *_, **__: None)
                stack.enter_context(unchecked)
        stack.enter_context(_PickLast())
        yield


class _PickLast(TorchFunctionMode):
    """Replaces ``values[mask]`` by the vector at each row's last marked token.

    With values FP32 ``[B, N, H]`` and mask BOOL ``[B, N]``, the result is ``[B, H]``; it is 0 in
    rows without a marked token.
    """

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        arguments: Sequence[Any] = (),
        options: Mapping[str, object] | None = None,
    ) -> object:
        mask = arguments[1] if function is Tensor.__getitem__ else None
        if isinstance(mask, tuple) and mask[1:] == (slice(None),):
            mask = mask[0]
        if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 2):
            return function(*arguments, **(options or {}))
        values = arguments[0]
        place = torch.arange(mask.shape[1], dtype=torch.int32)
        last = torch.where(mask, place, -1).amax(1, keepdim=True)
        return weighted((place == last).to(values.dtype), values)
