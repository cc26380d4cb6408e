"""Sequential test of a mean loss against its limit, valid after every row.

The test multiplies bets against the hypothesis that the mean of losses in [0, 1] is at most
`allowed`. The wealth of one bet size is the product of 1 + bet (loss - allowed) over all losses.
Under the hypothesis, this wealth and the mean wealth of several bet sizes are non-negative
supermartingales. By Ville's inequality, the probability that the mean wealth ever reaches 1/alpha
is at most alpha, however often it is evaluated and whenever the test stops. The mean wealth is the
evidence (an e-value). Source: Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", J. R. Stat. Soc. B 86, 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BET_SIZES = 40
MIN_BET, MAX_BET = 0.05, 0.95
"""Smallest bet, and largest bet as a share of 1/allowed, the bet that can lose all wealth."""


@dataclass(frozen=True)
class SequentialEvidence:
    """Evidence that the mean loss is above its limit.

    Attributes:
        allowed: Maximum mean loss of a correct pipeline, above 0 and below 1.
        needed: Natural logarithm of the wealth that raises an alarm.
        log_wealth: Natural logarithm of the wealth of each bet size; empty before the first loss.
        rows: Number of losses.
        total: Sum of the losses.
        highest: Highest natural logarithm of the mean wealth so far.
        alarm_row: Number of the row, from 1, that raised the alarm; None without an alarm.
    """

    allowed: float
    needed: float
    log_wealth: tuple[float, ...] = ()
    rows: int = 0
    total: float = 0.0
    highest: float = 0.0
    alarm_row: int | None = None

    @property
    def mean(self) -> float | None:
        """Mean loss; None before the first loss."""
        return self.total / self.rows if self.rows else None

    def add(self, losses: Sequence[float] | NDArray[np.float64]) -> SequentialEvidence:
        """Return the evidence after more losses, each in [0, 1], in order of arrival."""
        values = np.array(losses, dtype=np.float64)
        if not len(values):
            return self
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("losses must be from 0 to 1")
        before = np.array(self.log_wealth or (0.0,) * BET_SIZES)
        bets = choose_bets(self.allowed)
        steps = np.log1p(bets[None] * (values[:, None] - self.allowed)).cumsum(axis=0)
        every = before + steps
        largest = every.max(axis=1)
        logs = largest + np.log(np.exp(every - largest[:, None]).mean(axis=1))
        reached = np.flatnonzero(logs >= self.needed)
        alarm_row = self.alarm_row
        if alarm_row is None and len(reached):
            alarm_row = self.rows + int(reached[0]) + 1
        return replace(
            self,
            log_wealth=tuple(every[-1].tolist()),
            rows=self.rows + len(values),
            total=self.total + float(values.sum()),
            highest=max(self.highest, float(logs.max())),
            alarm_row=alarm_row,
        )


def choose_bets(allowed: float) -> NDArray[np.float64]:
    """Return the bet sizes: large ones detect frequent losses fast, small ones rare losses."""
    largest = MAX_BET / allowed
    return np.geomspace(min(MIN_BET, largest), largest, BET_SIZES)
