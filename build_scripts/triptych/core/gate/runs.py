"""Running an artifact on the same rows in several ways: in batches, alone, in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.tensors import TokenRow
from triptych.core.feeds import Sample
from triptych.core.gate.artifact import RowOutputs, RunBatch
from triptych.core.samples import Expected
from triptych.spec.tasks.task import Core

BATCH_TOKENS = 4096
"""Tokens of a batch, unless one row has as many: packed attention takes their square in memory."""

IN_BATCHES = "in batches"


class Incomparable(Exception):
    """Why results cannot even be compared with the reference."""


def run_ways(
    run: RunBatch,
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    *,
    batch_size: int,
    alone: Sequence[int],
) -> dict[str, dict[int, RowOutputs]]:
    """What each way of batching makes of the rows: way to place in `samples` to outputs.

    The first way is `IN_BATCHES`, with every row; the others are held against it.

    Args:
        run: runs a batch on the artifact.
        samples: the rows.
        expected: what the reference made of each; decides the shapes.
        core: what the artifact returns.
        batch_size: most rows of a batch.
        alone: places of the rows that are also run by themselves.

    Raises:
        Incomparable: the artifact fails, or returns what cannot be.
    """
    if not samples:
        raise Incomparable("there are no rows to compare")
    places = list(range(len(samples)))
    ways = {
        IN_BATCHES: (places, batch_size),
        "alone": (list(alone), 1),
        "reversed": (places[::-1], batch_size),
        "by length": (sorted(places, key=lambda place: tokens_of(samples[place])), batch_size),
    }
    runs = {}
    for way, (order, size) in ways.items():
        runs[way] = run_rows(run, samples, order, size)
        check_rows(runs[way], samples, expected, core, way)
    return runs


def run_rows(
    run: RunBatch, samples: Sequence[Sample], order: Sequence[int], batch_size: int
) -> dict[int, RowOutputs]:
    """Outputs of the rows at the places in `order`, batched in that order.

    Raises:
        Incomparable: the artifact fails.
    """
    rows: dict[int, RowOutputs] = {}
    for batch in _batches(samples, order, batch_size):
        rows.update(zip(batch, _run(run, [samples[place] for place in batch]), strict=True))
    return rows


def check_rows(
    rows: Mapping[int, RowOutputs],
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    way: str = IN_BATCHES,
) -> None:
    """Raise `Incomparable` where outputs by place have another form than the reference's."""
    for place in sorted(rows):
        fault = _fault(rows[place], samples[place], expected[place], core)
        if fault:
            raise Incomparable(f"row {place} {way}: {fault}")


def _batches(
    samples: Sequence[Sample], order: Sequence[int], batch_size: int
) -> Iterator[list[int]]:
    # A row that fills a batch alone still gets a short neighbour.
    room = max(BATCH_TOKENS, BATCH_TOKENS // 16 + max(map(tokens_of, samples), default=0))
    batch: list[int] = []
    tokens = 0
    for place in order:
        own = tokens_of(samples[place])
        if batch and (len(batch) == batch_size or tokens + own > room):
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += own
    if batch:
        yield batch


def _run(run: RunBatch, batch: Sequence[Sample]) -> list[RowOutputs]:
    try:
        results = run(batch)
    except Exception as error:  # an artifact that cannot run is not right, whatever the reason
        reason = " ".join(str(error).split())[:200]
        raise Incomparable(
            f"a batch of {len(batch)} does not run: {type(error).__name__}: {reason}"
        ) from error
    if len(results) != len(batch):
        raise Incomparable(f"a batch of {len(batch)} gives {len(results)} rows")
    return results


def tokens_of(sample: Sample) -> int:
    """Tokens of a row; 0 for an image."""
    return len(sample.ids) if isinstance(sample, TokenRow) else 0


def choices_of(row: RowOutputs, core: Core) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and scores of the classes chosen: ``[1 or tokens, choices]``."""
    ids, scores = (row[tensor.name] for tensor in core.outputs)
    shape = (1, -1) if core.returns == "choices" else (-1, 1)
    return ids.reshape(shape), scores.reshape(shape)


def _fault(row: RowOutputs, sample: Sample, expected: Expected, core: Core) -> str:
    for tensor in core.outputs:
        if tensor.name not in row:
            return f"{tensor.name} is missing"
        shape = tuple(tokens_of(sample) if isinstance(dim, str) else dim for dim in tensor.dims)
        if row[tensor.name].shape != shape:
            return f"{tensor.name} has the shape {list(row[tensor.name].shape)}, not {list(shape)}"
    if not core.chooses:
        for tensor, wanted in zip(core.outputs, expected, strict=True):
            if row[tensor.name].shape != wanted.shape:
                return f"{tensor.name} has another shape than the reference, {list(wanted.shape)}"
        return ""
    return _choice_fault(row, expected, core)


def _choice_fault(row: RowOutputs, expected: Expected, core: Core) -> str:
    name, classes = core.outputs[0].name, expected[0].shape[-1]
    ids, _ = choices_of(row, core)
    if not np.issubdtype(ids.dtype, np.integer):
        return f"{name} is {ids.dtype}, not a number of a class"
    if ids.min() < 0 or ids.max() >= classes:
        return f"{name} has ids from {ids.min()} to {ids.max()}, but there are {classes} classes"
    if any(len(set(chosen)) < len(chosen) for chosen in ids.tolist()):
        return f"{name} names a class twice"
    return ""
