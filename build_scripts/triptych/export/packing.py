"""The two layouts as torch modules around any encoder: rows packed end to end, or padded."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.export.heads import Rows, weighted

OUTSIDE = -1e4
"""Added to the attention score of a token in another row: its weight underflows to exactly 0 in
fp32, and the number itself still fits fp16."""


class CannotPack(Exception):
    """No way is known to keep this model's rows apart in one sequence; the message says why."""


class Counting(NamedTuple):
    """How an encoder numbers the tokens of a row.

    Attributes:
        first: number of the first one: RoBERTa and its kin count from past the padding.
        skipped: token that is not counted, wherever it stands, and has its own id for a number.
    """

    first: int = 0
    skipped: int | None = None

    def numbers(self, ids: Tensor, position: Tensor, valid: Tensor, before: Tensor) -> Tensor:
        """``position_ids``, INT64 ``[..., N]``.

        Args:
            ids: INT64 ``[..., N]``.
            position: of each token in its row, INT64 ``[..., N]``; 0 where it is not `valid`.
            valid: BOOL ``[..., N]``, false for what fills up.
            before: BOOL ``[..., N, N]``, true where the second token is an earlier one of the
                first one's row.
        """
        if self.skipped is None:
            return position + self.first
        counted = valid & (ids != self.skipped)
        # Not `cumsum`: TensorRT runs that as a loop, which neither fuses with what is around it nor
        # fits a CUDA graph. In INT32, a quarter of the memory of the layer's scores at most.
        earlier = (before & counted[..., None, :]).sum(-1, dtype=torch.int32)
        return torch.where(counted, earlier.long() + self.first, self.skipped)


class _Encoder(nn.Module):
    """An encoder, and which of the usual inputs it takes."""

    def __init__(self, encoder: Any, read: Callable[[Any], Tensor], segments: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.read = read
        self.takes_positions = takes(encoder, "position_ids")
        # Without a table of token types a model may take them for words, as GPT-2.
        typed = segments > 1 or getattr(encoder.config, "type_vocab_size", None)
        self.takes_types = bool(typed) and takes(encoder, "token_type_ids")
        self.segments = segments

    def types(self, position: Tensor, first_segment: Tensor | None) -> Mapping[str, Tensor]:
        """``token_type_ids`` like `position`, where the encoder takes them."""
        if not self.takes_types:
            return {}
        if first_segment is None or self.segments < 2:
            return {"token_type_ids": torch.zeros_like(position)}
        return {"token_type_ids": (position >= first_segment).long()}


class PackedEncoder(_Encoder):
    """All rows of a batch end to end as one sequence; a token attends within its row only.

    Row, position and mask are computed in the graph from `row_length` and `row_stride`, with
    standard operators only.
    """

    def __init__(
        self, encoder: Any, segments: int, *, mask: Mask, window: int, counting: Counting
    ) -> None:
        super().__init__(encoder, hidden_of, segments)
        self.mask = mask
        self.window = window
        self.counting = counting

    def forward(
        self,
        input_ids: Tensor,
        row_length: Tensor,
        row_stride: Tensor,
        first_segment: Tensor | None = None,
    ) -> tuple[Tensor, Rows]:
        """What the encoder outputs for each token, FP32 ``[1, T, H]``, and where the rows are.

        Args:
            input_ids: INT32 ``[T]``, every row followed by its pads.
            row_length: INT32 ``[B, 1]``, tokens of each row.
            row_stride: INT32 ``[B]``, places each row takes in `input_ids`.
            first_segment: INT32 ``[B, 1]``, tokens of each row before its second segment.
        """
        ids, length = input_ids.long()[None], row_length.long()
        stride = row_stride.long()
        rows = torch.arange(row_stride.shape[0])
        # The sum of all rows up to each one: no `cumsum`, see `Counting`.
        end = torch.where(rows[None, :] <= rows[:, None], stride[None, :], 0).sum(1)
        start = end - stride
        place = torch.arange(input_ids.shape[0])
        row = (place[:, None] >= end[None, :]).long().sum(1)
        position = place - start[row]
        valid = position < length[row, 0]
        position = torch.where(valid, position, 0)
        same_row = row[:, None] == row[None, :]
        extra = {}
        if self.takes_positions:
            before = same_row & (place[:, None] > place[None, :])
            extra["position_ids"] = self.counting.numbers(ids, position[None], valid[None], before)
        extra |= self.types(position[None], None if first_segment is None else first_segment[row].T)
        attends = Attends(same_row & valid[None, :], place, self.window)
        with self.mask(self.encoder, attends) as mask:
            output = self.encoder(input_ids=ids, attention_mask=mask, **extra)
        member = (row[None, :] == rows[:, None]) & valid[None, :]
        return self.read(output), Rows(ids, position[None], member, length)


class BucketedEncoder(_Encoder):
    """Rows padded to one length, the mask computed from `row_length`.

    Positions are numbered by `counting`, or left to the encoder where that is None. RoBERTa and its
    kin count them by a running sum, which TensorRT runs as a loop.

    The encoder runs while the context `around` of it is open.
    """

    def __init__(
        self,
        encoder: Any,
        read: Callable[[Any], Tensor],
        segments: int,
        *,
        counting: Counting | None = None,
        around: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(encoder, read, segments)
        self.counting = counting
        self.around = around

    def forward(
        self, input_ids: Tensor, row_length: Tensor, first_segment: Tensor | None = None
    ) -> tuple[Tensor, Rows]:
        """What the encoder outputs for each token, and where the rows are.

        Arguments as `PackedEncoder` takes them, but for `input_ids`: INT32 ``[B, L]``, rows padded
        on the right. The output is FP32 ``[B, L, H]``, or logits of a model with its own head.
        """
        ids, length = input_ids.long(), row_length.long()
        position = torch.arange(input_ids.shape[1])[None, :]
        valid = position < length
        extra = dict(self.types(position.expand(ids.shape), first_segment))
        if self.counting is not None:
            before = position < position.T
            extra["position_ids"] = self.counting.numbers(ids, position, valid, before)
        with self.around(self.encoder):
            output = self.encoder(input_ids=ids, attention_mask=valid.long(), **extra)
        return self.read(output), Rows(ids, position, valid, length)


def hidden_of(output: Any) -> Tensor:
    hidden: Tensor = output.last_hidden_state
    return hidden


def takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


class Attends(NamedTuple):
    """Which tokens may attend to which.

    Attributes:
        allowed: BOOL ``[T, T]``, the tokens of the same row.
        place: INT64 ``[T]``, counts through the sequence.
        window: farthest token that a layer of local attention sees.
    """

    allowed: Tensor
    place: Tensor
    window: int


Mask = Callable[[Any, Attends], AbstractContextManager[Any]]
"""One form of the ``attention_mask`` that keeps rows apart, to be passed while the context is open.
"""


def _additive(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, OUTSIDE)[None, None]


def _added(encoder: Any, attends: Attends) -> AbstractContextManager[Any]:
    return nullcontext(_additive(attends.allowed))


def _added_by_layer_type(
    encoder: Any, attends: Attends, within: Callable[[Tensor, int], Tensor] = operator.le
) -> AbstractContextManager[Any]:
    """A mask for each type of layer; local ones see tokens `within` the window."""
    everywhere, place = attends.allowed, attends.place
    local = everywhere & within((place[:, None] - place[None, :]).abs(), attends.window)
    return nullcontext(
        {
            kind: _additive(local if "sliding" in kind else everywhere)
            for kind in sorted(set(encoder.config.layer_types))
        }
    )


def _boolean(encoder: Any, attends: Attends) -> AbstractContextManager[Any]:
    # A pad sees itself at least, or its vector would not be a number.
    itself = attends.place[:, None] == attends.place[None, :]
    return nullcontext((attends.allowed | itself)[None, None])


def _added_causal(encoder: Any, attends: Attends) -> AbstractContextManager[Any]:
    before = attends.place[:, None] >= attends.place[None, :]
    return nullcontext(_additive(attends.allowed & before))


def _per_row_of_ones(encoder: Any, attends: Attends) -> AbstractContextManager[Any]:
    return nullcontext(attends.allowed.long()[None])


@contextlib.contextmanager
def _built_by_encoder(encoder: Any, attends: Attends) -> Iterator[Any]:
    """For encoders that build their mask from a plain one by a method: it returns this one."""
    builders = [module for module in encoder.modules() if hasattr(module, "get_attention_mask")]
    if not builders:
        raise ValueError("no layer makes a mask")
    with contextlib.ExitStack() as stack:
        for module in builders:
            mask = attends.allowed[None, None]
            own = _replaced(module, "get_attention_mask", lambda _, mask=mask: mask)
            stack.enter_context(own)
        yield torch.ones_like(attends.place)[None]


MASKS: tuple[Mask, ...] = (
    _added,
    _boolean,
    _added_by_layer_type,
    functools.partial(_added_by_layer_type, within=operator.lt),
    _built_by_encoder,
    _added_causal,
    _per_row_of_ones,
)
"""In the order they are tried."""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value while the context is open."""
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
def any_length(model: Any) -> Iterator[None]:
    """Keep a model from computing with the sequence's length in Python, which fixes it in a graph.

    DeBERTa cuts its table of relative positions to the length; the full table gives the same.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "compute_attention_span"):
                full_span = _replaced(module, "compute_attention_span", lambda _q, _k, span: span)
                stack.enter_context(full_span)
        yield


@contextlib.contextmanager
def last_picked(model: Any) -> Iterator[None]:
    """Where a model picks vectors by a mask over tokens, let it pick the last one of each row.

    The heads of BART and its kin read the last end-of-sequence token so: they take all that the
    mask marks, as many of each row, and keep a row's last one. Rows with an unequal number of them
    cannot share a batch then, and a graph has a NonZero, which fails on a row with none and is
    nothing that TensorRT takes.
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
    """``values[mask]``, of FP32 ``[B, N, H]`` and BOOL ``[B, N]``, is ``[B, H]``; 0 where none."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        mask = arguments[1] if function is Tensor.__getitem__ else None
        if isinstance(mask, tuple) and mask[1:] == (slice(None),):
            mask = mask[0]
        if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 2):
            return function(*arguments, **(options or {}))
        values = arguments[0]
        place = torch.arange(mask.shape[1], dtype=torch.int32)
        last = torch.where(mask, place, -1).amax(1, keepdim=True)
        return weighted((place == last).to(values.dtype), values)
