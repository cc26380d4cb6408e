"""Differences of a core's outputs from the reference, and between batches of other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.gate.runs import Incomparable, RowOutputs, RunBatch, choices_of, run_rows
from triptych.core.requests import Expected, Sample
from triptych.tasks.compare import TIE
from triptych.tasks.metrics_vectors import row_cosines
from triptych.tasks.task import Core

ERROR_BATCH = 32
Pairs = Sequence[tuple[RowOutputs, Expected]]
"""Outputs of rows, each with the outputs of the reference."""


@dataclass(frozen=True)
class Measured:
    """Differences of one output, or of one view of the output.

    Attributes:
        name: Name of the output or view, for messages.
        rows: Largest difference of each row from the reference, relative to the largest absolute
            element of the reference in all rows if that is above 1.
        effect: Largest change caused by other rows in the batch, on the same scale.
    """

    name: str
    rows: NDArray[np.float64]
    effect: float

    @property
    def difference(self) -> float:
        """Largest difference of any row; NaN if the difference of any row is NaN."""
        return float(self.rows.max())


def measure(
    batched: Mapping[int, RowOutputs],
    others: Sequence[Mapping[int, RowOutputs]],
    expected: Sequence[Expected],
    core: Core,
) -> list[Measured]:
    """Measure how far rows are from the reference, and how much other batches change them.

    Args:
        batched: Outputs of every row, by index.
        others: Outputs of all or some of the rows in other batches, by index.
        expected: Outputs of the reference for each row.
        core: Core whose outputs the artifact returns.
    """
    differences, scales = [], []
    for place, wanted in enumerate(expected):
        pairs = _pairs(batched[place], wanted, core)
        differences.append([_distance(own, right) for own, right in pairs])
        scales.append([float(np.abs(right).max(initial=0)) for _, right in pairs])
    found = np.array(differences)
    # numpy's maximum is NaN if any element is NaN; Python's may not be.
    largest, scale = found.max(axis=0), np.maximum(1.0, np.max(scales, axis=0))
    effects = [
        _effects(batched[place], row, expected[place], core, float(largest.max()))
        for rows in others
        for place, row in rows.items()
    ]
    effect = np.max(effects, axis=0, initial=0.0) / scale
    return [
        Measured(name, found[:, view] / scale[view], float(effect[view]))
        for view, name in enumerate(_view_names(core))
    ]


def best_agree(pairs: Pairs, core: Core) -> NDArray[np.bool_] | None:
    """Return for each row or token whether its best class is the reference's or ties with it.

    Returns None if the core has no classes.
    """
    if not core.chooses and core.returns not in ("token_scores", "scores", "logits"):
        return None
    agrees = []
    for row, (wanted,) in pairs:
        if core.chooses:
            first = choices_of(row, core)[0][:, :1]
        else:
            values = row[core.outputs[0].name]
            first = values.reshape(-1, values.shape[-1]).argmax(-1)[:, None]
        every = wanted.reshape(len(first), -1)
        reached = np.take_along_axis(every, first.astype(np.int64), axis=1)[:, 0]
        agrees.append(reached >= every.max(1) - TIE)
    every_row: NDArray[np.bool_] = np.concatenate(agrees)
    return every_row


def cosines(pairs: Pairs, core: Core) -> NDArray[np.float64] | None:
    """Return the cosine of each row with its reference; None if the core returns no vectors."""
    if core.returns != "vector":
        return None
    vectors = np.stack([row[core.outputs[0].name] for row, _ in pairs])
    return row_cosines(vectors, np.stack([vector for _, (vector,) in pairs]))


def relative_errors(pairs: Pairs, core: Core) -> list[float]:
    """Return the norm of each row's error, divided by the norm of its reference if above 1.

    If the core chooses classes, the scores of all classes are compared. Classes that were not
    chosen have the reference's scores.
    """
    squares = [_squares(row, wanted, core) for row, wanted in pairs]
    return [float(np.sqrt(off / max(size, 1.0))) for off, size in squares]


def core_error(
    run: RunBatch, samples: Sequence[Sample], expected: Sequence[Expected], core: Core
) -> float:
    """Return the mean relative squared error of the rows; 0 means equal to the reference.

    The error is infinite if the artifact does not run or a result is not finite.
    """
    try:
        rows = run_rows(run, samples, range(len(samples)), ERROR_BATCH)
    except Incomparable:
        return float("inf")
    squares = [_squares(rows[place], wanted, core) for place, wanted in enumerate(expected)]
    errors = [off / max(size, 1e-12) for off, size in squares]
    error = float(np.mean(errors)) if errors else 0.0
    return error if np.isfinite(error) else float("inf")


def _squares(row: RowOutputs, expected: Expected, core: Core) -> tuple[float, float]:
    """Return the squared norms of a row's error and of its reference."""
    pairs = _pairs(row, expected, core)[int(core.chooses) :]
    with np.errstate(invalid="ignore", over="ignore"):
        off = sum(float(np.square(own.astype(np.float64) - right).sum()) for own, right in pairs)
        return off, sum(float(np.square(right.astype(np.float64)).sum()) for _, right in pairs)


def _view_names(core: Core) -> list[str]:
    if core.chooses:
        classes, scores = (tensor.name for tensor in core.outputs)
        return [f"{scores}, best first,", f"{scores} of each {classes}"]
    return [tensor.name for tensor in core.outputs]


def _views(row: RowOutputs, expected: Expected, core: Core) -> list[NDArray[np.float32]]:
    """Return a row's results as arrays that can be compared element by element.

    Choices become two views: their scores, best first, and the scores of all classes. Classes that
    were not chosen have the reference's scores. Neither view depends on the order of classes with
    equal scores. Together they detect a wrong class, whatever score it has.
    """
    if not core.chooses:
        return [row[tensor.name] for tensor in core.outputs]
    ids, scores = choices_of(row, core)
    every = expected[0].reshape(len(ids), -1).copy()
    np.put_along_axis(every, ids.astype(np.int64), scores.astype(every.dtype), axis=1)
    return [scores, every]


def _pairs(
    row: RowOutputs, expected: Expected, core: Core
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return each view of a row with that of the reference, cut to the row's number of choices."""
    right = list(expected)
    if core.chooses:
        ids, _ = choices_of(row, core)
        every = expected[0].reshape(len(ids), -1)
        right = [-np.sort(-every, axis=1)[:, : ids.shape[1]], every]
    return list(zip(_views(row, expected, core), right, strict=True))


def _distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    if one.dtype == np.bool_:
        return float((one != other).any())
    return float(np.abs(one - other).max(initial=0))


def _effects(
    row: RowOutputs, changed: RowOutputs, expected: Expected, core: Core, error: float
) -> list[float]:
    """Return the largest change of each view of a row by other rows in the batch.

    A class that only one of the two runs chose has no known score in the other run. Its score is
    compared with the reference's, and `error`, the artifact's largest error, is subtracted.
    """
    views, others = _views(row, expected, core), _views(changed, expected, core)
    if not core.chooses:
        return [_distance(a, b) for a, b in zip(views, others, strict=True)]
    chosen, other = _chosen(row, views[1], core), _chosen(changed, others[1], core)
    change = np.abs(views[1] - others[1]) - np.where(chosen != other, error, 0.0)
    return [_distance(views[0], others[0]), float(change.max(initial=0))]


def _chosen(row: RowOutputs, every: NDArray[np.float32], core: Core) -> NDArray[np.bool_]:
    ids, _ = choices_of(row, core)
    chosen = np.zeros(every.shape, dtype=bool)
    np.put_along_axis(chosen, ids.astype(np.int64), values=True, axis=1)
    return chosen
