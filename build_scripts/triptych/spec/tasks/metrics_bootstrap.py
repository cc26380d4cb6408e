"""The paired bootstrap: how far the difference of two figures on the same units may be chance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from triptych.spec.tasks.compare import Floats, Statistic

RESAMPLES = 2000
SEED = 20240601
LOSSES_TO_SHOW = 6
"""Units that must be lost, none won, before the interval leaves zero: as in a sign test at 5 %."""

_BLOCK = 1_000_000


def ratio(part: Floats, whole: Floats) -> Statistic:
    """Sum of `part` over sum of `whole`, ``[units]`` each; 1.0 where there is nothing at all."""

    def value(taken: Floats) -> Floats:
        parts, wholes = taken @ part, taken @ whole
        return np.divide(parts, wholes, out=np.ones_like(parts), where=wholes > 0)

    return value


def value_of(statistic: Statistic, units: int) -> float:
    return float(statistic(np.ones((1, units)))[0])


def difference_interval(
    reference: Statistic, candidate: Statistic, units: int
) -> tuple[float, float]:
    """The 95 % confidence interval of candidate minus reference.

    Both figures are computed on the same resamples of the units. Where only a few units differ,
    resampling alone takes four losses without a win for certain; so each resample also gets a few
    wins and losses by chance (one of each on average), as large as the largest effect of one unit.
    This is the resampling form of adding one win and one loss to a paired comparison.

    Args:
        reference: of the reference.
        candidate: of the candidate.
        units: how many there are to draw from, at least one.
    """
    rng = np.random.default_rng(SEED)
    differences = np.concatenate(
        [candidate(taken) - reference(taken) for taken in _resamples(rng, units)]
    )
    wins, losses = rng.poisson(1.0, (2, RESAMPLES))
    differences += _largest_effect(reference, candidate, units) * (wins - losses)
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def _resamples(rng: np.random.Generator, units: int) -> Iterator[Floats]:
    """How often each unit is drawn, ``[some, units]`` at a time, `RESAMPLES` in all."""
    block = max(1, _BLOCK // units)
    for start in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - start)
        drawn = rng.integers(units, size=(count, units)) + units * np.arange(count)[:, None]
        taken = np.bincount(drawn.ravel(), minlength=count * units)
        yield taken.reshape(count, units).astype(np.float64)


def _largest_effect(reference: Statistic, candidate: Statistic, units: int) -> float:
    """How far one unit moves the difference: seen by leaving each out, `RESAMPLES` at most."""
    whole = value_of(candidate, units) - value_of(reference, units)
    effect = abs(whole) / units
    if units == 1:
        return effect
    left_out = np.unique(np.linspace(0, units - 1, min(units, RESAMPLES)).astype(np.intp))
    block = max(1, _BLOCK // units)
    largest = 0.0
    for start in range(0, len(left_out), block):
        places = left_out[start : start + block]
        taken = np.ones((len(places), units))
        taken[np.arange(len(places)), places] = 0
        moved = np.abs(candidate(taken) - reference(taken) - whole)
        largest = max(largest, float(moved.max()))
    return effect + largest
