"""Evidence that a mean is above what is allowed, which may be looked at after every row.

For losses in [0, 1] whose mean is at most `allowed`, the capital of a bettor who stakes a fixed
share, the product of 1 + stake (loss - allowed), is a non-negative supermartingale, and so is the
mean of several such bettors. By Ville's inequality it ever reaches 1/alpha with probability alpha
at most, however often one looks and whenever one stops (Waudby-Smith and Ramdas, "Estimating means
of bounded random variables by betting", J. R. Stat. Soc. B 86, 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BETTORS = 40
MIN_STAKE, MAX_STAKE = 0.05, 0.95
"""The smallest stake, and the largest as a share of what could lose everything (1/allowed)."""


@dataclass(frozen=True)
class Evidence:
    """What the losses so far tell.

    Attributes:
        allowed: mean of the losses that is still right, above 0 and below 1.
        needed: logarithm of the capital that is an alarm.
        log_capitals: of each bettor; empty before the first loss.
        rows: losses seen.
        total: their sum.
        highest: the highest that its logarithm ever was.
        alarm_row: the row, from 1, after which it first was an alarm; None where it never was.
    """

    allowed: float
    needed: float
    log_capitals: tuple[float, ...] = ()
    rows: int = 0
    total: float = 0.0
    highest: float = 0.0
    alarm_row: int | None = None

    @property
    def mean(self) -> float | None:
        """Of the losses; None before the first."""
        return self.total / self.rows if self.rows else None

    def add(self, losses: Sequence[float] | NDArray[np.float64]) -> Evidence:
        """The evidence after more losses, each in [0, 1], in the order they came."""
        values = np.array(losses, dtype=np.float64)
        if not len(values):
            return self
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("losses must be from 0 to 1")
        before = np.array(self.log_capitals or (0.0,) * BETTORS)
        stakes = stakes_for(self.allowed)
        steps = np.log1p(stakes[None] * (values[:, None] - self.allowed)).cumsum(axis=0)
        every = before + steps
        most = every.max(axis=1)
        logs = most + np.log(np.exp(every - most[:, None]).mean(axis=1))
        reached = np.flatnonzero(logs >= self.needed)
        alarm_row = self.alarm_row
        if alarm_row is None and len(reached):
            alarm_row = self.rows + int(reached[0]) + 1
        return replace(
            self,
            log_capitals=tuple(every[-1].tolist()),
            rows=self.rows + len(values),
            total=self.total + float(values.sum()),
            highest=max(self.highest, float(logs.max())),
            alarm_row=alarm_row,
        )


def stakes_for(allowed: float) -> NDArray[np.float64]:
    """The bettors' stakes: large ones see a flood of losses at once, small ones a trickle."""
    most = MAX_STAKE / allowed
    return np.geomspace(min(MIN_STAKE, most), most, BETTORS)
