"""How to quantise a layer's input so that its output stays right: shift, scales and range.

A few elements of a transformer's activations are far larger than the others, always the same ones;
on one scale for all, the others would lose their precision. Each element is shifted to the middle
of its own range and divided by a power of that range, and the weights take the inverse, as in
SmoothQuant (Xiao et al., 2022) and Outlier Suppression+ (Wei et al., 2023). Which power, and which
range of the result, is tried: the one with the smallest error of the layer's own output wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.precision.activations import Activations
from triptych.core.precision.rounding import LEVELS, round_nearest, scale_of

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]

POWERS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of an element's range: 0 leaves all elements on one scale, 1 gives each its own."""

SHARES = (1.5, 1.25, 1.1, 1.0, 0.9, 0.8, 0.7)
"""Of the largest magnitude seen: above 1, for vectors that calibration did not show."""

PERCENTILES = (99.99, 99.9)
_METHODS = (
    *(f"{share:.0%} of max" for share in SHARES),
    *(f"percentile {percentile}" for percentile in PERCENTILES),
    "entropy",
)
JUDGED_VECTORS = 1024
"""Enough to tell good ranges from bad ones."""
_SHARE_JUDGED = 6

_SMALLEST = np.float32(1e-4)
_BINS = 2048


@dataclass(frozen=True)
class Smoothing:
    """The choice for one value.

    Attributes:
        shift: FP32 ``[K]``, taken off each element.
        scale: FP32 ``[K]``, divides each element then.
        power: of the element's range that the scale is.
        range: largest magnitude of the result that is not cut off; None for one a vector.
        method: how the range was found.
        error: of the layer's output, as a share of its length, mean over the vectors: what follows
            a layer mostly scales each vector to its own size, and a rare one must not outweigh
            all others.
    """

    shift: Vector
    scale: Vector
    power: float
    range: float | None
    method: str
    error: float


def find_smoothing(activations: Activations, weight: Matrix, *, dynamic: bool) -> Smoothing:
    """The shift, scales and range with the smallest error of ``x W``.

    Each choice is fitted on most of the vectors and judged on the others, so that a range too
    tight for what was not seen shows.

    Args:
        activations: of the layer's input.
        weight: FP32 ``[K, N]``, of all layers that read it, side by side.
        dynamic: each vector has the range that it needs.
    """
    fitted, judged = _split(activations.vectors)
    wanted = judged @ weight
    trials = (_Trial(power, fitted, judged, weight, wanted) for power in POWERS)
    first = "per vector" if dynamic else "max"
    error, _, trial = min((trial.error(first), trial.power, trial) for trial in trials)
    others = () if dynamic else _METHODS
    error, method = min([(error, first), *((trial.error(other), other) for other in others)])
    shift, scale = _shift_and_scale(activations, trial.power)
    smooth = np.abs((activations.vectors - shift) / scale)
    # The largest is of all rows, those too whose vectors were not kept.
    largest = float(((activations.high - shift) / scale).max())
    limit = _range(smooth, largest, method)
    return Smoothing(shift, scale, trial.power, limit, method, error)


def _split(vectors: Matrix) -> tuple[Activations, Matrix]:
    """Vectors to choose by, and others to judge by; the same ones where there are too few."""
    if len(vectors) < _SHARE_JUDGED:
        return Activations.of(vectors), vectors
    judged = np.arange(len(vectors)) % _SHARE_JUDGED == 0
    most = -(-int(judged.sum()) // JUDGED_VECTORS)
    return Activations.of(vectors[~judged]), vectors[judged][::most]


def _shift_and_scale(activations: Activations, power: float) -> tuple[Vector, Vector]:
    shift = (activations.low + activations.high) / 2
    reach = np.maximum((activations.high - activations.low) / 2, _SMALLEST)
    return shift, reach ** np.float32(power)


class _Trial:
    """One power, with all that does not depend on the range."""

    def __init__(
        self, power: float, fitted: Activations, judged: Matrix, weight: Matrix, wanted: Matrix
    ) -> None:
        self.power = power
        shift, scale = _shift_and_scale(fitted, power)
        self._fitted = np.abs((fitted.vectors - shift) / scale)
        self._judged = (judged - shift) / scale
        scaled = weight * scale[:, None]
        self._weight = round_nearest(scaled) * scale_of(scaled)
        self._wanted = wanted - (shift / scale) @ self._weight
        tiny = np.finfo(np.float32).tiny
        self._length = np.maximum(np.linalg.norm(wanted, axis=1), tiny)

    def error(self, method: str) -> float:
        """Of the layer's output, with the range that `method` finds."""
        limit = _range(self._fitted, float(self._fitted.max()), method)
        lost = quantised(self._judged, limit) @ self._weight - self._wanted
        return float((np.linalg.norm(lost, axis=1) / self._length).mean())


def quantised(smooth: Matrix, limit: float | None) -> Matrix:
    """What is left of smoothed vectors after INT8, on one scale or (None) on one a vector."""
    if limit is None:
        step = np.maximum(np.abs(smooth).max(1, keepdims=True), _SMALLEST) / LEVELS
        result: Matrix = np.rint(smooth / step) * step
        return result
    step = np.float32(limit / LEVELS)
    kept: Matrix = np.clip(np.rint(smooth / step), -LEVELS - 1, LEVELS) * step
    return kept


def _range(magnitudes: Matrix, largest: float, method: str) -> float | None:
    kind, _, rest = method.partition(" ")
    if method == "per vector":
        return None
    if kind == "percentile":
        limit = float(np.percentile(magnitudes, float(rest)))
    elif kind == "entropy":
        limit = _least_divergence(magnitudes, largest)
    else:
        limit = largest * (float(kind.rstrip("%")) / 100 if rest else 1.0)
    return max(limit, float(_SMALLEST))


def _least_divergence(magnitudes: Matrix, largest: float) -> float:
    """The range whose INT8 histogram differs least from the full one (Kullback-Leibler)."""
    counts, edges = np.histogram(magnitudes, bins=_BINS, range=(0.0, max(largest, 1e-12)))
    best, lowest = largest, np.inf
    for kept in range(_BINS // 4, _BINS + 1, _BINS // 32):
        fine = counts[:kept].astype(np.float64)
        fine[-1] += counts[kept:].sum()
        level = np.arange(kept) * (LEVELS + 1) // kept
        filled = counts[:kept] > 0
        sums = np.bincount(level, counts[:kept], LEVELS + 1)
        places = np.maximum(np.bincount(level, filled, LEVELS + 1), 1)
        coarse = np.where(filled, (sums / places)[level], 0.0) + 1e-9
        share, coarse_share = fine / fine.sum(), coarse / coarse.sum()
        there = share > 0
        divergence = float((share[there] * np.log(share[there] / coarse_share[there])).sum())
        if divergence < lowest:
            best, lowest = float(edges[kept]), divergence
    return best
