"""The accuracy gate: an artifact ships only if it equals the reference, whatever its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.tasks.task import Thresholds

Vectors = NDArray[np.float32]
RunBatch = Callable[[Sequence[Sequence[int]]], Vectors]
"""Runs one batch of token-id rows on the artifact: FP32 ``[rows, dim]``."""


@dataclass(frozen=True)
class GateResult:
    """What the gate measured.

    Attributes:
        rows: rows compared.
        min_cosine: lowest cosine between a row and its reference.
        mean_cosine: mean of the same.
        max_difference: largest difference of any element, relative to the largest element of the
            reference where that is above 1.
        max_neighbour_effect: largest change of any element, on the same scale, when a row is run
            alone, in a batch, in the batch reversed, or among rows of another length.
        finite: no NaN, no infinity.
        failures: what broke a threshold, in words; empty when the artifact may ship.
    """

    rows: int
    min_cosine: float
    mean_cosine: float
    max_difference: float
    max_neighbour_effect: float
    finite: bool
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the artifact may ship."""
        return not self.failures

    def as_dict(self) -> dict[str, object]:
        """For the lock and ``--json``."""
        return asdict(self)


def check_embeddings(
    run: RunBatch,
    rows: Sequence[Sequence[int]],
    reference: Vectors,
    thresholds: Thresholds,
    *,
    batch_size: int,
) -> GateResult:
    """Compare the artifact with the reference on `rows` (token ids), fail-closed.

    Args:
        run: runs a batch on the artifact.
        rows: the samples; the first ones are also run alone, reversed and shuffled.
        reference: FP32 ``[rows, dim]``.
        thresholds: what must hold.
        batch_size: rows per batch.
    """
    batched = _in_batches(run, rows, batch_size)
    alone = np.concatenate([run([row]) for row in rows[: 2 * batch_size]])
    backwards = _in_batches(run, rows[::-1], batch_size)[::-1]
    order = np.argsort([len(row) for row in rows], kind="stable")
    by_length = np.empty_like(batched)
    by_length[order] = _in_batches(run, [rows[i] for i in order], batch_size)
    cosine = (batched * reference).sum(1) / np.maximum(
        np.linalg.norm(batched, axis=1) * np.linalg.norm(reference, axis=1), 1e-12
    )
    scale = max(1.0, float(np.abs(reference).max()))

    def largest(a: Vectors, b: Vectors) -> float:
        return float(np.abs(a - b).max()) / scale

    effect = max(
        largest(alone, batched[: len(alone)]),
        largest(backwards, batched),
        largest(by_length, batched),
    )
    difference = largest(batched, reference)
    finite = bool(np.isfinite(batched).all())
    checks = {
        f"min cosine {cosine.min():.6f} is below {thresholds.min_cosine}": cosine.min()
        >= thresholds.min_cosine,
        f"max difference {difference:.2e} is above {thresholds.max_difference}": difference
        <= thresholds.max_difference,
        f"batch neighbours change a row by {effect:.2e}, more than {thresholds.max_difference}": (
            effect <= thresholds.max_difference
        ),
        "results are not all finite": finite,
    }
    return GateResult(
        rows=len(rows),
        min_cosine=float(cosine.min()),
        mean_cosine=float(cosine.mean()),
        max_difference=difference,
        max_neighbour_effect=effect,
        finite=finite,
        # `not holds` rather than a reversed comparison: NaN must fail, too.
        failures=tuple(message for message, holds in checks.items() if not holds),
    )


def _in_batches(run: RunBatch, rows: Sequence[Sequence[int]], size: int) -> Vectors:
    return np.concatenate([run(rows[i : i + size]) for i in range(0, len(rows), size)])
