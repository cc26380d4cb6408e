"""Find a way to run a model in a layout, and check it by comparing numbers.

Random rows are computed one by one, without padding or packing. Each known way to run the model
computes the same rows in one batch, padded or packed. The first way whose results equal those of
the single rows is used. No model is recognized by its name: the ways differ in masks, in the tokens
that a head reads, and in the numbering of positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from triptych.base.errors import UserError
from triptych.core.export.packing import (
    CannotPack,
    GatheredCore,
    PackedCore,
    PaddedEncoder,
    PositionIds,
    TextCore,
    hidden_of,
    last_picked,
    takes,
)
from triptych.models.info import ModelInfo
from triptych.runtime.packing_spans import MULTIPLE, count_slots
from triptych.tasks.heads import (
    ROW_READINGS,
    LogitsReader,
    OwnHead,
    Reading,
    RowMembership,
    logits_of,
)
from triptych.tasks.task import Core

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

TOLERANCE = 1e-4
"""Maximum difference between a row in a batch and the row alone, relative to the largest element.
"""

MIN_SCALE = 1e-2
LENGTHS = (23, 5, 11, 4)
"""Lengths of the rows. The head of a short one shows what a convolution reads beyond its end."""
SPECIAL: Mapping[int, Mapping[int, tuple[str, ...]]] = {
    5: {-2: ("eos", "sep"), -1: ("pad",)},
    11: {2: ("eos", "sep"), 6: ("pad",)},
}
"""Positions of further special tokens, by row length. None are in the middle, where a mask is."""
LONGEST = 600
UNICODE = 0x3000
"""Number of ids that models of bytes or characters, which have no vocabulary, certainly know."""

READINGS: Mapping[str, tuple[Reading, ...]] = {
    "row": ROW_READINGS,
    "mask": ("mask",),
    "tokens": ("all",),
}
"""Tokens that a head may read, by `Core.reads`."""


ModuleLayout = Literal["bucketed", "packed", "gathered"]
"""Layout of a module: ``gathered`` is packed, with attention on padded rows."""

ContextFactory = Callable[["PreTrainedModel"], AbstractContextManager[None]]
"""Function of the model that returns the context manager in which the model runs."""


class ProbeRow(NamedTuple):
    """A random row, and the model's result for it alone and unpadded."""

    ids: Tensor  # Token ids, INT64 ``[N]``
    first_segment: int  # Number of tokens before the second segment
    # Token vectors of the encoder, FP32 ``[N, H]``; None for a model without a separate encoder.
    hidden: Tensor | None
    # Result of the model with its head, ``[K]`` or ``[N, K]``; None for a model without a head.
    logits: Tensor | None
    # Largest element of the logits of all rows. A single row's logits may all be near 0.
    scale: float = 0.0


def find_text_core(
    model: PreTrainedModel,
    info: ModelInfo,
    core: Core,
    head: nn.Module | None,
    layout: ModuleLayout,
) -> nn.Module:
    """Return the model in a layout, in the first known way that gives right results.

    Ways that are also right for rows with further special tokens are preferred.

    Args:
        model: Model, as `Core.auto_class` loads it.
        core: Computation of the core.
        head: Head of the task on the vectors of tokens; None for the model's own head.

    Raises:
        CannotPack: The layout is packed, and no way gives right results.
        UserError: The layout is bucketed, and no way gives right results.
    """
    with contextlib.suppress(CannotPack, UserError):
        return _find(model, info, core, head, layout, special=True)
    return _find(model, info, core, head, layout, special=False)


def _find(
    model: PreTrainedModel,
    info: ModelInfo,
    core: Core,
    head: nn.Module | None,
    layout: ModuleLayout,
    *,
    special: bool,
) -> nn.Module:
    window = getattr(model.config, "sliding_window", None) or 0
    samples = _draw(model, info, core, window, special=special)
    packed = layout != "bucketed"
    batch: Sequence[Tensor]
    batch = _packed_batch(samples) if packed else _padded_batch(samples, info.pad_token_id)
    starts = _starts(batch) if packed else None
    if layout == "gathered":
        batch = _gathered_batch(batch)
    smallest = float("inf")
    for text_core in _ways(model, info, core, head, samples):
        for tiled in (True, False) if packed else (False,):
            probed = text_core
            if core.has_task_head:  # compare all token vectors: a pooled result shows less
                probed = TextCore(text_core.encoder, _TokenVectors())
            difference = _farthest(
                _in_layout(
                    probed, (True,) if core.has_task_head else core.per_token, layout, tiled
                ),
                batch,
                samples,
                starts=starts,
            )
            if difference < TOLERANCE:
                return _in_layout(text_core, core.per_token, layout, tiled)
            smallest = min(smallest, difference)
    if packed:
        raise CannotPack(f"rows of a batch differ by {smallest:.0e} from the same rows alone")
    raise UserError(
        "model.source",
        "is a model whose result for a text depends on the padding of the batch",
        given=f"{info.architecture}{_mixing(model)}",
        remedy="Choose another model",
    )


def _mixing(model: nn.Module) -> str:
    """Return the part of a model that reads neighboring tokens without a mask; empty if unknown."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            return f", whose convolution `{name}` reads neighboring tokens without a mask"
    return ""


class _TokenVectors(nn.Module):
    """Head that returns the vectors of all tokens."""

    def forward(self, hidden: Tensor, rows: RowMembership) -> Tensor:
        return hidden


def _in_layout(
    text_core: TextCore, per_token: Sequence[bool], layout: ModuleLayout, tiled: bool
) -> nn.Module:
    if layout == "gathered":
        return GatheredCore(text_core, per_token=per_token, tiled=tiled)
    if layout == "packed":
        return PackedCore(text_core, per_token=per_token, tiled=tiled)
    return text_core


def _ways(
    model: PreTrainedModel,
    info: ModelInfo,
    core: Core,
    head: nn.Module | None,
    samples: Sequence[ProbeRow],
) -> Iterator[TextCore]:
    """Yield the known ways to run the model and its head on padded rows, the cheapest first."""
    head = head or _own_head(model, info, core, samples)
    ways: list[
        tuple[PreTrainedModel, Callable[[ModelOutput], Tensor], nn.Module, ContextFactory]
    ] = []
    if head is not None:
        ways.append((model.base_model, hidden_of, head, nullcontext))
    if not core.has_task_head:
        reader = LogitsReader(READINGS[core.reads][0], info.mask_token_id)
        ways += [(model, logits_of, reader, around) for around in (last_picked, nullcontext)]
    for module, read, after, around in ways:
        countings: list[PositionIds | None] = [None]
        if takes(module, "position_ids"):
            countings.insert(0, _counting(model.base_model, samples[0].ids))
        for counting in countings:
            encoder = PaddedEncoder(module, read, info.segments, counting=counting, around=around)
            yield TextCore(encoder, after)


def _draw(
    model: PreTrainedModel, info: ModelInfo, core: Core, window: int, *, special: bool
) -> list[ProbeRow]:
    """Return random rows of different lengths; one is longer than the window of local attention.

    With `special`, rows also contain tokens that end or fill a row, as a text may that contains
    them.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config
    names = ("pad", "mask", "bos", "eos", "cls", "sep", "decoder_start")
    aside = {getattr(config, f"{name}_token_id", None) for name in names}
    aside |= {info.pad_token_id, info.mask_token_id}
    vocabulary = getattr(config, "vocab_size", None) or UNICODE
    plain = torch.tensor([index for index in range(vocabulary) if index not in aside])
    limit = min(info.max_length, LONGEST)
    samples = []
    for length in (max(LENGTHS[0], window + 9 if window else 0), *LENGTHS[1:]):
        size = min(length, limit)
        ids = plain[torch.randint(len(plain), (size,), generator=generator)]
        # Some heads search for special tokens, so rows must contain them to show differences.
        for place, kinds in ((0, ("cls", "bos")), (size // 2 - 1, ("sep",)), (-1, ("eos", "sep"))):
            ids[place] = _special(config, kinds, vocabulary, int(ids[place]))
        for place in SPECIAL.get(length, ()) if special and size == length else ():
            ids[place] = _special(config, SPECIAL[length][place], vocabulary, int(ids[place]))
        if core.reads == "mask":
            ids[size // 2] = torch.tensor(info.mask_token_id)
        samples.append(_alone(model, info, core, ids))
    logits = [sample.logits for sample in samples if sample.logits is not None]
    scale = max((float(value.abs().max()) for value in logits), default=0.0)
    return [sample._replace(scale=scale) for sample in samples]


def _special(
    config: PreTrainedConfig, kinds: Sequence[str], vocabulary: int, otherwise: int
) -> int:
    """Return the first of these special tokens that the config has an id for; else `otherwise`."""
    known = (getattr(config, f"{kind}_token_id", None) for kind in kinds)
    fitting = (token for token in known if isinstance(token, int) and 0 <= token < vocabulary)
    return next(fitting, otherwise)


def _alone(model: PreTrainedModel, info: ModelInfo, core: Core, ids: Tensor) -> ProbeRow:
    first_segment = len(ids) // 2 if info.segments > 1 else len(ids)
    types = (torch.arange(len(ids)) >= first_segment).long()[None]

    def inputs(module: PreTrainedModel) -> dict[str, Tensor]:
        typed = info.segments > 1 and takes(module, "token_type_ids")
        return {"input_ids": ids[None]} | ({"token_type_ids": types} if typed else {})

    hidden, logits = None, None
    try:
        if core.has_task_head:
            base = model.base_model
            hidden = hidden_of(base(**inputs(base)))[0]
        else:
            logits = logits_of(model(**inputs(model)))[0]
            if core.reads == "mask":
                logits = logits[ids == info.mask_token_id][0]
    except Exception as error:
        raise UserError(
            "model.source",
            "is a model that needs more inputs than token ids",
            given=f"{info.architecture}: {' '.join(str(error).split())[:300]}",
            remedy="Choose another model",
        ) from error
    base = model.base_model
    if base is not model and hidden is None:
        # A model without such a result, such as an encoder-decoder, is run with its own head.
        with contextlib.suppress(Exception):
            hidden = hidden_of(base(**inputs(base)))[0]
    return ProbeRow(ids, first_segment, hidden, logits)


def _own_head(
    model: PreTrainedModel, info: ModelInfo, core: Core, samples: Sequence[ProbeRow]
) -> nn.Module | None:
    """Return the model's own head, if it computes the model's logits from its encoder's vectors.

    None if it does not.
    """
    if model.base_model is model:
        return None
    for reading in READINGS[core.reads]:
        head = OwnHead(model, reading, info.mask_token_id)
        try:
            if all(_head_distance(head, sample) < TOLERANCE for sample in samples):
                return head
        except Exception:  # a model may raise anything if it gets vectors in place of ids
            continue
    return None


def _head_distance(head: nn.Module, sample: ProbeRow) -> float:
    if sample.hidden is None:
        return float("inf")
    size = len(sample.ids)
    member = torch.ones((1, size), dtype=torch.bool)
    rows = RowMembership(sample.ids[None], torch.arange(size)[None], member, torch.tensor([[size]]))
    return _distance(head(sample.hidden[None], rows)[0], sample.logits, sample.scale)


def _packed_batch(samples: Sequence[ProbeRow]) -> tuple[Tensor, ...]:
    """Return the rows end to end with pad tokens, as arguments of `PackedCore`.

    The first two rows belong to one request, so they follow each other without a pad.
    """
    lengths, firsts = _columns(samples)
    first, second, *others = (sample.ids for sample in samples)
    pads = samples[0].ids[:3]
    stride = -(-(len(first) + len(second)) // 2)
    fill = pads[: 2 * stride - len(first) - len(second)]
    tokens = [first, second, fill] + [torch.cat((ids, pads)) for ids in others]
    strides = [stride, stride] + [len(ids) + len(pads) for ids in others]
    offsets = [0, len(first) - stride] + [0] * len(others)
    longest = count_slots(max(len(sample.ids) for sample in samples))
    tiles = sum(-(-len(sample.ids) // MULTIPLE) for sample in samples)
    sizes = [torch.zeros(size, dtype=torch.int32) for size in (longest, MULTIPLE, tiles)]
    columns = torch.tensor(strides, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)
    return (
        torch.cat(tokens).to(torch.int32),
        lengths,
        columns[1][:, None],
        columns[0],
        *sizes,
        firsts,
    )


def _gathered_batch(packed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arguments of `GatheredCore` for those of `PackedCore`."""
    ids, lengths, *_, firsts = packed
    positions = torch.arange(int(lengths.max()), dtype=torch.int32)
    where = (positions < lengths).nonzero()
    spread = positions + lengths.cumsum(0) - lengths
    places = torch.tensor(_starts(packed))[:, None] + positions
    padded = ids[places.clamp(max=len(ids) - 1)]
    in_batch = (spread % int(lengths.sum())).to(torch.int32)
    place_of_token = places[where[:, 0], where[:, 1]][:, None]
    return ids, lengths, padded, positions, in_batch, where, place_of_token, firsts


def _padded_batch(samples: Sequence[ProbeRow], pad_token_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows padded to one length, as arguments of `PaddedEncoder`."""
    rows = [sample.ids.to(torch.int32) for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    return (ids, *_columns(samples))


def _columns(samples: Sequence[ProbeRow]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([[len(sample.ids)] for sample in samples], dtype=torch.int32)
    firsts = torch.tensor([[sample.first_segment] for sample in samples], dtype=torch.int32)
    return lengths, firsts


def _distance(result: Tensor, expected: Tensor | None, scale: float = 0.0) -> float:
    """Return the largest difference, relative to `scale` or to the largest expected element.

    The larger of the two is used.
    """
    if expected is None or result.shape != expected.shape:
        return float("inf")
    largest = max(float(expected.abs().max()), scale, MIN_SCALE)
    difference = float((result - expected).abs().max()) / largest
    return float("inf") if difference != difference else difference


def _counting(encoder: PreTrainedModel, ids: Tensor) -> PositionIds:
    """Return the numbering of a row's tokens, from the encoder's lookups in its position table."""
    # MPNet skips the id of its embeddings' padding, whatever the config says.
    pad = getattr(encoder.get_input_embeddings(), "padding_idx", None)
    if pad is None:
        pad = getattr(encoder.config, "pad_token_id", None)
    row = ids.clone()
    if pad is not None:
        row[1] = pad
    seen: list[list[int]] = []

    def note(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and not arguments[0].is_floating_point():
            seen.append(arguments[0].flatten().tolist())

    hooks = [
        module.register_forward_pre_hook(note)
        for name, module in encoder.named_modules()
        if name.endswith("position_embeddings")
    ]
    try:
        encoder(input_ids=row[None])
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        return PositionIds()
    first = seen[0][0]
    return PositionIds(first, pad if seen[0][:4] == [first, pad, first + 1, first + 2] else None)


def _starts(batch: Sequence[Tensor]) -> list[int]:
    """Return the index of each row's first token in a packed batch."""
    offset, stride = batch[2][:, 0], batch[3]
    starts: list[int] = (stride.cumsum(0) - stride + offset).tolist()
    return starts


def _farthest(
    way: nn.Module,
    batch: Sequence[Tensor],
    samples: Sequence[ProbeRow],
    *,
    starts: Sequence[int] | None,
) -> float:
    """Return the largest difference between a row in the batch and the row alone.

    The difference is infinite if the model fails on the batch. `starts` are the indices of the
    rows' first tokens in a packed batch.
    """
    try:
        result = way(*batch)
    except Exception:  # a model may raise anything for padding that it does not expect
        return float("inf")
    largest = 0.0
    for index, sample in enumerate(samples):
        expected = sample.hidden if sample.logits is None else sample.logits
        found, size = result[0 if starts and result.dim() == 3 else index], len(sample.ids)
        if expected is not None and expected.dim() == 2:
            start = starts[index] if starts else 0
            found = found[start : start + size]
        largest = max(largest, _distance(found, expected, sample.scale))
    return largest
