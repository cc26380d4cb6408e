"""Differences of a core's outputs from the reference, and between batches of other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.gate.runs import Incomparable, RunBatch, run_rows
from triptych.core.requests import Sample
from triptych.tasks.metrics_vectors import row_cosines
from triptych.tasks.results import Expected, RowOutputs, distance
from triptych.tasks.task import Core

ERROR_BATCH = 32
Pairs = Sequence[tuple[RowOutputs, Expected]]
"""Outputs of rows, each with the outputs of the reference."""


@dataclass(frozen=True)
class Measured:
    """Differences of one output, or of one view of the output."""

    name: str  # Name of the output or view, for messages
    # Largest difference of each row from the reference, relative to the largest absolute element of
    # the reference in all rows if that is above 1.
    rows: NDArray[np.float64]
    effect: float  # Largest change caused by other rows in the batch, on the same scale

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
    results, differences, scales = core.results, [], []
    for place, wanted in enumerate(expected):
        pairs = results.pairs(batched[place], wanted)
        differences.append([distance(own, right) for own, right in pairs])
        scales.append([float(np.abs(right).max(initial=0)) for _, right in pairs])
    found = np.array(differences)
    # numpy's maximum is NaN if any element is NaN; Python's may not be.
    largest, scale = found.max(axis=0), np.maximum(1.0, np.max(scales, axis=0))
    effects = [
        results.effects(batched[place], row, expected[place], float(largest.max()))
        for rows in others
        for place, row in rows.items()
    ]
    effect = np.max(effects, axis=0, initial=0.0) / scale
    return [
        Measured(name, found[:, view] / scale[view], float(effect[view]))
        for view, name in enumerate(results.views)
    ]


def best_agree(pairs: Pairs, core: Core) -> NDArray[np.bool_] | None:
    """Return for each row or token whether its best class is the reference's or ties with it.

    Returns None if the core has no classes.
    """
    results = core.results
    agrees = [results.agrees(row, wanted) for row, wanted in pairs]
    known = [each for each in agrees if each is not None]
    return np.concatenate(known) if known else None


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
    results = core.results
    squares = [results.squares(row, wanted) for row, wanted in pairs]
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
    results = core.results
    squares = [results.squares(rows[place], wanted) for place, wanted in enumerate(expected)]
    errors = [off / max(size, 1e-12) for off, size in squares]
    error = float(np.mean(errors)) if errors else 0.0
    return error if np.isfinite(error) else float("inf")
