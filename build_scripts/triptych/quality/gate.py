"""The accuracy gate: an artifact ships only if it equals the reference, whatever its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.quality.artifact import RowOutputs, RunBatch, Sample
from triptych.tasks.task import Core, Thresholds
from triptych.tensors import TokenRow

Expected = tuple[NDArray[np.float32], ...]
"""What the reference computed for one row, as `Core.returns` says: a vector, logits or scores; all
classes' scores where the core returns choices (``[classes]``, or ``[tokens, classes]``) and where
it returns all of them; the logits of start and end, ``[tokens]`` each."""


@dataclass(frozen=True)
class GateResult:
    """What the gate measured.

    Attributes:
        rows: rows compared.
        max_difference: largest difference of any element from the reference, relative to the
            reference's largest element where that is above 1.
        max_neighbour_effect: largest change of any element, on the same scale, when a row is run
            alone, in a batch, in the batch reversed, or among rows of its own length.
        finite: no NaN, no infinity.
        failures: what broke a threshold, in words; empty when the artifact may ship.
        min_cosine: lowest cosine between a row and its reference; None where rows are no vectors.
        mean_cosine: mean of the same.
        label_agreement: share of rows (of tokens, where each has a class) whose best class is the
            reference's, or as good within the threshold; None where there are no classes.
    """

    rows: int
    max_difference: float
    max_neighbour_effect: float
    finite: bool
    failures: tuple[str, ...]
    min_cosine: float | None = None
    mean_cosine: float | None = None
    label_agreement: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the artifact may ship."""
        return not self.failures

    def as_dict(self) -> dict[str, object]:
        """For the lock and ``--json``."""
        return asdict(self)


def check(
    run: RunBatch,
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    thresholds: Thresholds,
    *,
    batch_size: int,
) -> GateResult:
    """Compare the artifact with the reference on `samples`, fail-closed.

    Args:
        run: runs a batch on the artifact.
        samples: the rows; the first ones are also run alone, all of them reversed and by length.
        expected: what the reference made of each.
        core: what the artifact returns.
        thresholds: what must hold.
        batch_size: rows per batch.

    Raises:
        ValueError: not one expected result a sample.
    """
    if len(samples) != len(expected):
        raise ValueError(f"{len(samples)} samples, but {len(expected)} expected results")
    try:
        runs = _runs(run, samples, expected, core, batch_size)
    except _Incomparable as fault:
        return GateResult(len(samples), math.inf, math.inf, finite=False, failures=(str(fault),))
    batched = runs.pop("in batches")
    # Differences of infinities are NaN, which fails like any other excess.
    with np.errstate(invalid="ignore", over="ignore"):
        measured = _measure(batched, runs, expected, core)
        cosines = _cosines(batched, expected, core)
    rows = [*batched, *(row for others in runs.values() for row in others)]
    finite = all(bool(np.isfinite(values).all()) for row in rows for values in row.values())
    return GateResult(
        rows=len(samples),
        max_difference=float(np.max([view.difference for view in measured])),
        max_neighbour_effect=float(np.max([view.effect for view in measured])),
        finite=finite,
        failures=tuple(_failures(measured, cosines, core, thresholds, finite=finite)),
        min_cosine=None if cosines is None else float(cosines.min()),
        mean_cosine=None if cosines is None else float(cosines.mean()),
        label_agreement=_label_agreement(batched, expected, core, thresholds),
    )


class _Incomparable(Exception):
    """Why the results cannot even be compared with the reference."""


def _runs(
    run: RunBatch,
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    size: int,
) -> dict[str, list[RowOutputs]]:
    """What each way of batching makes of the rows, in the order of `samples`."""
    if not samples:
        raise _Incomparable("there are no rows to compare")
    places = range(len(samples))
    ways = {
        "in batches": (list(places), size),
        "alone": (list(places[: 2 * size]), 1),
        "reversed": (list(places[::-1]), size),
        "by length": (sorted(places, key=lambda place: _tokens(samples[place])), size),
    }
    runs = {}
    for way, (order, rows_per_batch) in ways.items():
        rows: dict[int, RowOutputs] = {}
        for i in range(0, len(order), rows_per_batch):
            batch = order[i : i + rows_per_batch]
            rows.update(zip(batch, _run(run, [samples[p] for p in batch]), strict=True))
        for place in sorted(rows):
            fault = _fault(rows[place], samples[place], expected[place], core)
            if fault:
                raise _Incomparable(f"row {place} {way}: {fault}")
        runs[way] = [rows[place] for place in sorted(rows)]
    return runs


def _run(run: RunBatch, batch: Sequence[Sample]) -> list[RowOutputs]:
    try:
        results = run(batch)
    except Exception as error:  # an artifact that cannot run is not right, whatever the reason
        reason = " ".join(str(error).split())[:200]
        raise _Incomparable(
            f"a batch of {len(batch)} does not run: {type(error).__name__}: {reason}"
        ) from error
    if len(results) != len(batch):
        raise _Incomparable(f"a batch of {len(batch)} gives {len(results)} rows")
    return results


def _tokens(sample: Sample) -> int:
    return len(sample.ids) if isinstance(sample, TokenRow) else 0


def _fault(row: RowOutputs, sample: Sample, expected: Expected, core: Core) -> str:
    for tensor in core.outputs:
        if tensor.name not in row:
            return f"{tensor.name} is missing"
        shape = tuple(_tokens(sample) if isinstance(dim, str) else dim for dim in tensor.dims)
        if row[tensor.name].shape != shape:
            return f"{tensor.name} has the shape {list(row[tensor.name].shape)}, not {list(shape)}"
    if _chooses(core):
        return _choice_fault(row, expected, core)
    for tensor, wanted in zip(core.outputs, expected, strict=True):
        if row[tensor.name].shape != wanted.shape:
            return f"{tensor.name} has another shape than the reference, {list(wanted.shape)}"
    return ""


def _choice_fault(row: RowOutputs, expected: Expected, core: Core) -> str:
    name, classes = core.outputs[0].name, expected[0].shape[-1]
    ids, _ = _choices(row, core)
    if not np.issubdtype(ids.dtype, np.integer):
        return f"{name} is {ids.dtype}, not a number of a class"
    if ids.min() < 0 or ids.max() >= classes:
        return f"{name} has ids from {ids.min()} to {ids.max()}, but there are {classes} classes"
    if any(len(set(chosen)) < len(chosen) for chosen in ids.tolist()):
        return f"{name} names a class twice"
    return ""


def _chooses(core: Core) -> bool:
    return core.returns in ("choices", "token_choices")


def _choices(row: RowOutputs, core: Core) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and scores of the classes chosen: ``[1 or tokens, choices]``."""
    ids, scores = (row[tensor.name] for tensor in core.outputs)
    shape = (1, -1) if core.returns == "choices" else (-1, 1)
    return ids.reshape(shape), scores.reshape(shape)


@dataclass(frozen=True)
class _Measured:
    """One thing compared: its name, the difference from the reference, and that by neighbours."""

    name: str
    difference: float
    effect: float


def _measure(
    batched: Sequence[RowOutputs],
    others: Mapping[str, Sequence[RowOutputs]],
    expected: Sequence[Expected],
    core: Core,
) -> list[_Measured]:
    difference, effect, scale = [], [], []
    for index, (row, wanted) in enumerate(zip(batched, expected, strict=True)):
        views, wanted_views = _views(row, wanted, core), _wanted(row, wanted, core)
        difference.append(_distances(views, wanted_views))
        scale.append([float(np.abs(view).max()) for view in wanted_views])
        for rows in others.values():
            if index < len(rows):  # only the first ones run alone
                effect.append(_distances(_views(rows[index], wanted, core), views))
    # numpy's maximum is NaN where anything is, Python's is not.
    divisor = np.maximum(1.0, np.max(scale, axis=0))
    return [
        _Measured(name, float(difference), float(effect))
        for name, difference, effect in zip(
            _view_names(core),
            np.max(difference, axis=0) / divisor,
            np.max(effect, axis=0) / divisor,
            strict=True,
        )
    ]


def _view_names(core: Core) -> list[str]:
    if _chooses(core):
        classes, scores = (tensor.name for tensor in core.outputs)
        return [f"{scores}, best first,", f"{scores} of each {classes}"]
    return [tensor.name for tensor in core.outputs]


def _views(row: RowOutputs, expected: Expected, core: Core) -> list[NDArray[Any]]:
    """A row's results as arrays that can be compared element by element.

    Choices become their scores, best first, and the scores of all classes, those not chosen taken
    from the reference. Neither depends on the order of classes with the same score; together they
    tell a wrong class, be it under its own score or under that of the right one.
    """
    if not _chooses(core):
        return [row[tensor.name] for tensor in core.outputs]
    ids, scores = _choices(row, core)
    every = expected[0].reshape(len(ids), -1).copy()
    np.put_along_axis(every, ids.astype(np.int64), scores.astype(every.dtype), axis=1)
    return [scores, every]


def _wanted(row: RowOutputs, expected: Expected, core: Core) -> list[NDArray[Any]]:
    """The same of the reference, with as many choices as the row has."""
    if not _chooses(core):
        return list(expected)
    ids, _ = _choices(row, core)
    every = expected[0].reshape(len(ids), -1)
    return [-np.sort(-every, axis=1)[:, : ids.shape[1]], every]


def _distances(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> list[float]:
    return [float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True)]


def _cosines(
    rows: Sequence[RowOutputs], expected: Sequence[Expected], core: Core
) -> NDArray[np.float32] | None:
    if core.returns != "vector":
        return None
    vectors = np.stack([row[core.outputs[0].name] for row in rows])
    wanted = np.stack([vector for (vector,) in expected])
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1)
    cosines: NDArray[np.float32] = (vectors * wanted).sum(1) / np.maximum(norms, 1e-12)
    return cosines


def _label_agreement(
    rows: Sequence[RowOutputs], expected: Sequence[Expected], core: Core, thresholds: Thresholds
) -> float | None:
    if not (_chooses(core) or core.returns == "token_scores"):
        return None
    agrees = []
    for row, (wanted,) in zip(rows, expected, strict=True):
        if _chooses(core):
            first = _choices(row, core)[0][:, :1]
        else:
            first = row[core.outputs[0].name].argmax(-1, keepdims=True)
        every = wanted.reshape(len(first), -1)
        reached = np.take_along_axis(every, first.astype(np.int64), axis=1)[:, 0]
        agrees.append(reached >= every.max(1) - thresholds.max_difference)
    return float(np.concatenate(agrees).mean())


def _failures(
    measured: Sequence[_Measured],
    cosines: NDArray[np.float32] | None,
    core: Core,
    thresholds: Thresholds,
    *,
    finite: bool,
) -> Iterator[str]:
    # `not x <= y` rather than `x > y`: NaN must fail, too.
    limit = thresholds.max_difference
    for view in measured:
        if not view.difference <= limit:
            yield f"{view.name} differs from the reference by {view.difference:.2e}, above {limit}"
        if not view.effect <= limit:
            yield f"batch neighbours change {view.name} by {view.effect:.2e}, above {limit}"
    if cosines is not None and thresholds.min_cosine is not None:
        lowest = float(cosines.min())
        if not lowest >= thresholds.min_cosine:
            name = core.outputs[0].name
            yield f"min cosine of {name} is {lowest:.6f}, below {thresholds.min_cosine}"
    if not finite:
        yield "results are not all finite"
