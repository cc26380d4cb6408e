"""Ratios of repeated measurements with confidence intervals, and the verdicts that they allow.

Measurements vary by factors, so the logarithms of the rounds are averaged. The interval of their
mean is Student's t: of the differences of rounds that were measured in turns, or of two separate
samples (B. L. Welch, "The generalization of 'Student's' problem when several different population
variances are involved", Biometrika 34, 1947). Of 10 or more rounds in turns, the lowest and highest
fifth are left out, because other work on the machine mostly causes them (J. W. Tukey and D. H.
McLaughlin, "Less vulnerable confidence and significance procedures for location based on a single
sample", Sankhya A 25, 1963).

A verdict needs the whole interval on one side of a limit, as in a test of non-inferiority
(D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach",
J. Pharmacokinet. Biopharm. 15, 1987). An interval across the limit proves neither side. A wrong
verdict has a probability of at most 2.5 % each time that rounds are evaluated.

The number of rounds is chosen by the noise of the first ones and not by their mean, so that it
does not favor a verdict (C. Stein, "A two-sample test for a linear hypothesis whose power is
independent of the variance", Ann. Math. Stat. 16, 1945).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, sqrt
from statistics import NormalDist, fmean, variance
from typing import Literal

from triptych.base.formatting import amount, rounded

CONFIDENCE = 0.95
MARGIN = 0.10
"""Relative increase of a latency or cost that a comparison of two builds must be able to detect."""

POWER = 0.9
"""Probability with which the recommended number of rounds decides about equal builds."""

MIN_NOISE = 0.01
"""Minimum assumed standard deviation of a round, because a few rounds may agree by chance."""

TRIMMED_SHARE = 0.2
"""Share of the rounds, at each end, that is left out of a mean."""

MIN_TRIMMED_ROUNDS = 10
"""Minimum number of rounds from which some are left out; fewer show too little of the noise."""

Side = Literal["below", "above", "open"]


@dataclass(frozen=True)
class Ratio:
    """Ratio of a metric to another, or to a limit."""

    value: float  # Geometric mean over the rounds
    # Bounds of the 95 % confidence interval; None after a single round.
    bounds: tuple[float, float] | None
    rounds: int  # Number of rounds, the smaller one of two samples
    # Standard deviation of the logarithm of one round; None after a single round.
    noise: float | None

    @property
    def low(self) -> float:
        """Lower bound of the interval; 0 after a single round."""
        return 0.0 if self.bounds is None else self.bounds[0]

    @property
    def high(self) -> float:
        """Upper bound of the interval; infinite after a single round."""
        return inf if self.bounds is None else self.bounds[1]

    def __str__(self) -> str:
        """Return text such as ``1.02 times (0.97 to 1.08 with 95 % confidence)``."""
        if self.bounds is None:
            return f"{rounded(self.value)} times in {amount(self.rounds, 'round')}"
        interval = f"{rounded(self.low)} to {rounded(self.high)}"
        return f"{rounded(self.value)} times ({interval} with {100 * CONFIDENCE:g} % confidence)"

    @property
    def brief(self) -> str:
        """Text such as ``1.02 (0.97 to 1.08)``, for a column whose head names the confidence."""
        if self.bounds is None:
            return f"{rounded(self.value)} ({amount(self.rounds, 'round')})"
        return f"{rounded(self.value)} ({rounded(self.low)} to {rounded(self.high)})"

    def side_of(self, limit: float) -> Side:
        """Return the side of `limit` on which the whole interval lies; `open` if on both."""
        if self.high <= limit:
            return "below"
        return "above" if self.low > limit else "open"

    def is_between(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high

    def rounds_to_tell(self, limit: float) -> int | None:
        """Return how many rounds show the side of `limit`, if the ratio stays as it is.

        The result is None after a single round.
        """
        distance = max(self.value / limit, limit / self.value)
        return self.rounds_needed(max(distance, 1 + MIN_NOISE) - 1)

    def rounds_needed(self, margin: float = MARGIN) -> int | None:
        """Return how many rounds detect a change by `margin`; None after a single round."""
        if self.noise is None:
            return None
        deviations = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
        return max(2, ceil((deviations * self.noise / log(1 + margin)) ** 2))


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Return `after` over `before`, measured in turns in the same rounds.

    Raises:
        ValueError: A value is not above 0, or the numbers of rounds differ or are 0.
    """
    return limit_ratio([log(new) - log(old) for old, new in zip(before, after, strict=True)])


def limit_ratio(logarithms: Sequence[float]) -> Ratio:
    """Return the ratio with the given logarithm in each round, at least one."""
    rounds = len(logarithms)
    trimmed = int(TRIMMED_SHARE * rounds) if rounds >= MIN_TRIMMED_ROUNDS else 0
    inner = sorted(logarithms)[trimmed : rounds - trimmed]
    mean = fmean(inner)
    if rounds < 2:
        return Ratio(exp(mean), None, rounds, None)
    winsorized = [inner[0]] * trimmed + inner + [inner[-1]] * trimmed
    noise = max(sqrt(variance(winsorized)) / (1 - 2 * trimmed / rounds), MIN_NOISE)
    half = student_quantile(len(inner) - 1) * noise / sqrt(rounds)
    return Ratio(exp(mean), (exp(mean - half), exp(mean + half)), rounds, noise)


def separate_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Return `after` over `before`, measured in separate runs.

    The interval covers the noise within the runs, not a change of the machine between them.

    Raises:
        ValueError: A value is not above 0, or a side has no rounds.
    """
    sides = [[log(value) for value in values] for values in (before, after)]
    rounds = min(map(len, sides))
    mean = fmean(sides[1]) - fmean(sides[0])
    if rounds < 2:
        return Ratio(exp(mean), None, rounds, None)
    variances = [max(variance(side), MIN_NOISE**2 / 2) for side in sides]
    parts = [spread / len(side) for spread, side in zip(variances, sides, strict=True)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True)
    )
    half = student_quantile(int(freedom)) * sqrt(sum(parts))
    noise = sqrt(sum(variances))
    return Ratio(exp(mean), (exp(mean - half), exp(mean + half)), rounds, noise)


def student_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with `freedom` degrees, at least 1."""
    from scipy.special import stdtrit  # takes a quarter of a second

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
