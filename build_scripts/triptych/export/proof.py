"""How a model is run in a layout, chosen by proof: random rows must come out as they do alone.

No model is known by name, here or anywhere: what is tried is a mask, a reading, a way to run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triptych.errors import UserError
from triptych.export.heads import (
    ROW_READINGS,
    LogitsReader,
    OwnHead,
    Reading,
    Rows,
    SentenceHead,
    logits_of,
)
from triptych.export.packing import (
    MASKS,
    BucketedEncoder,
    CannotPack,
    PackedEncoder,
    hidden_of,
    takes,
)
from triptych.model.facts import ModelFacts
from triptych.tasks.task import Core

TOLERANCE = 1e-4
"""Largest difference between a row in a batch and alone, relative to the largest element."""

SMALLEST_SCALE = 1e-2
LENGTHS = (23, 5, 11)
LONGEST = 600
LONGEST_TABLE = 2048
UNICODE = 0x3000
"""Ids that models of bytes or characters, which have no vocabulary, surely know."""

READINGS: Mapping[str, tuple[Reading, ...]] = {
    "row": ROW_READINGS,
    "mask": ("mask",),
    "tokens": ("all",),
}
"""What a head may read, by `Core.reads`."""


class ProbeRow(NamedTuple):
    """A random row, and what the model computes for it alone and unpadded.

    Attributes:
        ids: INT64 ``[N]``.
        first_segment: tokens before the second segment.
        hidden: FP32 ``[N, H]``, of the encoder; None for a model without a part that is its
            encoder.
        logits: of the model with its head, ``[K]`` or ``[N, K]``; None where there is no head.
        scale: largest element of the logits of all rows: a single one may happen to be near 0.
    """

    ids: Tensor
    first_segment: int
    hidden: Tensor | None
    logits: Tensor | None
    scale: float = 0.0


class TextCore(nn.Module):
    """An encoder in one of the layouts, and a head."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, *batch: Tensor | None) -> Tensor:
        hidden, rows = self.encoder(*batch)
        result: Tensor = self.head(hidden, rows)
        return result


def prove_text_core(
    model: Any, facts: ModelFacts, core: Core, folder: Path, *, packed: bool
) -> TextCore:
    """The model in a layout, run in the first of the known ways that gives the right results.

    Raises:
        CannotPack: packed, and none does.
        UserError: bucketed, and none does.
    """
    window = getattr(model.config, "sliding_window", None) or 0
    samples = _draw(model, facts, core, window)
    head = _head(model, facts, core, folder, samples)
    segments = facts.segments
    if packed:
        if head is None:
            raise CannotPack("its head does not run on its encoder's token vectors alone")
        packed_encoder = _pack(model.base_model, samples, segments, window)
        chosen = TextCore(packed_encoder, head)
        if _farthest(chosen, _packed_batch(samples), samples) >= TOLERANCE:
            raise CannotPack("its head mixes the tokens of neighbouring rows")
        return chosen
    ways: list[tuple[Any, Callable[[Any], Tensor], nn.Module]] = []
    if head is not None:
        ways.append((model.base_model, hidden_of, head))
    if core.reads != "pooled":
        ways.append((model, logits_of, LogitsReader(READINGS[core.reads][0], facts.mask_token_id)))
    batch = _padded_batch(samples, facts.pad_token_id)
    for module, read, after in ways:
        firsts: list[int | None] = [None]
        if takes(module, "position_ids"):
            firsts.insert(0, _first_position(model.base_model, samples[0].ids))
        for first in firsts:
            encoder = BucketedEncoder(module, read, segments, first_position=first)
            way = TextCore(encoder, after)
            if _farthest(way, batch, samples) < TOLERANCE:
                return way
    raise UserError(
        "model.source",
        "must be a model whose result for a text does not depend on the padding beside it",
        given=f"{facts.architecture}, whose results do",
        remedy="Choose another model",
    )


def _draw(model: Any, facts: ModelFacts, core: Core, window: int) -> list[ProbeRow]:
    """Random rows of different lengths; one goes beyond the window of local attention."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    names = ("pad", "mask", "bos", "eos", "cls", "sep", "decoder_start")
    special = {getattr(config, f"{name}_token_id", None) for name in names}
    special |= {facts.pad_token_id, facts.mask_token_id}
    vocabulary = getattr(config, "vocab_size", None) or UNICODE
    plain = torch.tensor([index for index in range(vocabulary) if index not in special])
    limit = min(facts.max_length, LONGEST)
    samples = []
    for length in (max(LENGTHS[0], window + 9 if window else 0), *LENGTHS[1:]):
        size = min(length, limit)
        ids = plain[torch.randint(len(plain), (size,), generator=generator)]
        # Some heads look for special tokens; what of that is seen here is not missed later.
        for place, kinds in ((0, ("cls", "bos")), (size // 2 - 1, ("sep",)), (-1, ("eos", "sep"))):
            ids[place] = _special(config, kinds, vocabulary, int(ids[place]))
        if core.reads == "mask":
            ids[size // 2] = torch.tensor(facts.mask_token_id)
        samples.append(_alone(model, facts, core, ids))
    logits = [sample.logits for sample in samples if sample.logits is not None]
    scale = max((float(value.abs().max()) for value in logits), default=0.0)
    return [sample._replace(scale=scale) for sample in samples]


def _special(config: Any, kinds: Sequence[str], vocabulary: int, otherwise: int) -> int:
    """The first of these special tokens that the config has an id for."""
    known = (getattr(config, f"{kind}_token_id", None) for kind in kinds)
    fitting = (token for token in known if isinstance(token, int) and 0 <= token < vocabulary)
    return next(fitting, otherwise)


def _alone(model: Any, facts: ModelFacts, core: Core, ids: Tensor) -> ProbeRow:
    first_segment = len(ids) // 2 if facts.segments > 1 else len(ids)
    types = (torch.arange(len(ids)) >= first_segment).long()[None]

    def inputs(module: Any) -> dict[str, Tensor]:
        typed = facts.segments > 1 and takes(module, "token_type_ids")
        return {"input_ids": ids[None]} | ({"token_type_ids": types} if typed else {})

    hidden, logits = None, None
    try:
        if core.reads == "pooled":
            hidden = hidden_of(model(**inputs(model)))[0]
        else:
            logits = logits_of(model(**inputs(model)))[0]
            if core.reads == "mask":
                logits = logits[ids == facts.mask_token_id][0]
    except Exception as error:
        raise UserError(
            "model.source",
            "must be an encoder that runs on token ids alone",
            given=f"{facts.architecture}: {' '.join(str(error).split())[:300]}",
            remedy="Choose another model",
        ) from error
    base = model.base_model
    if base is not model:
        # An encoder-decoder, say, has no such result of its own: it is run with its own head.
        with contextlib.suppress(Exception):
            hidden = hidden_of(base(**inputs(base)))[0]
    return ProbeRow(ids, first_segment, hidden, logits)


def _head(
    model: Any, facts: ModelFacts, core: Core, folder: Path, samples: Sequence[ProbeRow]
) -> nn.Module | None:
    """The head that computes the model's logits from its encoder's token vectors, if one does."""
    if core.reads == "pooled":
        return SentenceHead(facts, folder)
    if model.base_model is model:
        return None
    for reading in READINGS[core.reads]:
        head = OwnHead(model, reading, facts.mask_token_id)
        try:
            if all(_head_distance(head, sample) < TOLERANCE for sample in samples):
                return head
        except Exception:  # any that a model raises at vectors in place of ids
            continue
    return None


def _head_distance(head: nn.Module, sample: ProbeRow) -> float:
    if sample.hidden is None:
        return float("inf")
    size = len(sample.ids)
    member = torch.ones((1, size), dtype=torch.bool)
    rows = Rows(sample.ids[None], torch.arange(size)[None], member, torch.tensor([[size]]))
    return _distance(head(sample.hidden[None], rows)[0], sample.logits, sample.scale)


def _pack(encoder: Any, samples: Sequence[ProbeRow], segments: int, window: int) -> PackedEncoder:
    """The encoder for packed rows, by the first of the known masks that gives the same results.

    Raises:
        CannotPack: none does.
    """
    first_position = _first_position(encoder, samples[0].ids)
    positions = getattr(encoder.config, "max_position_embeddings", None) or 0
    if not takes(encoder, "position_ids") and positions <= LONGEST_TABLE:
        # Its positions may come from a table, by place: a batch must be able to outgrow that.
        samples = [*samples] * (positions // sum(len(sample.ids) for sample in samples) + 1)
    smallest, refusal = float("inf"), ""
    for mask in MASKS:
        packed = PackedEncoder(
            encoder, segments, mask=mask, window=window, first_position=first_position
        )
        try:
            hidden, rows = packed(*_packed_batch(samples))
        except Exception as error:  # any that a model raises at a kind of mask it does not know
            refusal = refusal or f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            continue
        difference = max(
            _distance(hidden[0, member], sample.hidden)
            for member, sample in zip(rows.member, samples, strict=True)
        )
        if difference < TOLERANCE:
            return packed
        smallest = min(smallest, difference)
    if smallest == float("inf"):
        raise CannotPack(f"it takes no mask that keeps rows apart ({refusal})")
    raise CannotPack(f"rows that share a sequence differ by {smallest:.0e} from rows alone")


def _packed_batch(samples: Sequence[ProbeRow]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows end to end with pads between them, as `PackedEncoder` takes them."""
    parts = [
        torch.cat((sample.ids, samples[0].ids[: index + 1])) for index, sample in enumerate(samples)
    ]
    strides = torch.tensor([len(part) for part in parts], dtype=torch.int32)
    lengths, firsts = _columns(samples)
    return torch.cat(parts).to(torch.int32), lengths, strides, firsts


def _padded_batch(samples: Sequence[ProbeRow], pad_token_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows padded to one length, as `BucketedEncoder` takes them."""
    rows = [sample.ids.to(torch.int32) for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    return (ids, *_columns(samples))


def _columns(samples: Sequence[ProbeRow]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([[len(sample.ids)] for sample in samples], dtype=torch.int32)
    firsts = torch.tensor([[sample.first_segment] for sample in samples], dtype=torch.int32)
    return lengths, firsts


def _distance(result: Tensor, expected: Tensor | None, scale: float = 0.0) -> float:
    """Largest difference, relative to `scale` or the largest element expected if that is above."""
    if expected is None or result.shape != expected.shape:
        return float("inf")
    largest = max(float(expected.abs().max()), scale, SMALLEST_SCALE)
    difference = float((result - expected).abs().max()) / largest
    return float("inf") if difference != difference else difference


def _first_position(encoder: Any, ids: Tensor) -> int:
    """Position number of a row's first token: RoBERTa and its kin count from past the padding."""
    seen: list[int] = []

    def note(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and not arguments[0].is_floating_point():
            seen.append(int(arguments[0].flatten()[0]))

    hooks = [
        module.register_forward_pre_hook(note)
        for name, module in encoder.named_modules()
        if name.endswith("position_embeddings")
    ]
    try:
        encoder(input_ids=ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0] if seen else 0


def _farthest(chosen: TextCore, batch: Sequence[Tensor], samples: Sequence[ProbeRow]) -> float:
    """Largest difference of a row in the batch from itself alone; infinite where it fails."""
    try:
        hidden, rows = chosen.encoder(*batch)
        result = chosen.head(hidden, rows)
    except Exception:  # any that a model raises at padding it does not expect
        return float("inf")
    largest = 0.0
    for index, sample in enumerate(samples):
        member = rows.member[index]
        share = 0 if len(hidden) == 1 else index
        if sample.logits is None:
            difference = _distance(hidden[share, member], sample.hidden)
        else:
            found = result[share, member] if sample.logits.dim() == 2 else result[index]
            difference = _distance(found, sample.logits, sample.scale)
        largest = max(largest, difference)
    return largest
