"""Ranks and their correlation (Spearman), of rows as they are or drawn several times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""A figure over units, from how often each unit is taken: ``[samples, units]`` to ``[samples]``."""

TIE = 1e-5
"""Scores no further apart than this are equal up to rounding: either may come first."""


def spearman(got: Floats, wanted: Floats) -> float | None:
    """Rank correlation of a candidate's values with the reference's.

    A value that differs from the reference's by no more than a tie counts as the reference's, so
    that ties there do not become an order by chance here.

    Args:
        got: the candidate's, ``[n]``.
        wanted: the reference's, ``[n]``.

    Returns:
        1.0 where all agree, 0.0 where the candidate tells nothing apart, -1.0 where a value is not
        finite; None where there is no order to keep (under two values, or a constant reference
        that the candidate does not share).
    """
    if len(wanted) < 2:
        return None
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return -1.0
    got = np.where(np.abs(got - wanted) <= tie_of(wanted), wanted, got)
    if np.array_equal(got, wanted):
        return 1.0
    if np.ptp(wanted) == 0:
        return None
    return float(rank_correlation(got, wanted)(np.ones((1, len(wanted))))[0])


def tie_of(wanted: Floats) -> float:
    """What counts as a tie among scores as large as these."""
    return TIE * max(1.0, float(np.abs(wanted).max(initial=0.0)))


def rank_correlation(some: Floats, others: Floats) -> Statistic:
    """Spearman's correlation of two values of each unit, 0.0 where either is constant.

    Equal values share their mean rank.
    """
    ranks_of_some, ranks_of_others = _ranking(some), _ranking(others)

    def correlation(taken: Floats) -> Floats:
        middle = (taken.sum(axis=1, keepdims=True) + 1) / 2
        x, y = ranks_of_some(taken) - middle, ranks_of_others(taken) - middle
        both = (taken * x * y).sum(axis=1)
        spread = np.sqrt((taken * x * x).sum(axis=1) * (taken * y * y).sum(axis=1))
        quotient: Floats = np.divide(both, spread, out=np.zeros_like(both), where=spread > 0)
        return quotient

    return correlation


def _ranking(values: Floats) -> Callable[[Floats], Floats]:
    """A function from how often each unit is taken to the mean rank of each, same shape."""
    order = np.argsort(values, kind="stable")
    begins = np.append(True, np.diff(values[order]) != 0)
    level = np.empty(len(values), dtype=np.intp)
    level[order] = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)

    def ranks(taken: Floats) -> Floats:
        sizes = np.add.reduceat(taken[:, order], first, axis=1)
        mean_ranks: Floats = (np.cumsum(sizes, axis=1) - (sizes - 1) / 2)[:, level]
        return mean_ranks

    return ranks
