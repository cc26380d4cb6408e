"""Results of `tune`: trials, outcomes, Pareto front, paired comparison of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import mean, stdev
from typing import Literal

from pydantic import JsonValue

from triptych.serving.bench.results import Bottleneck, Cost, LoadPoint, RateSearch, Subject
from triptych.spec.slo import AnySlo


def _rate(point: LoadPoint) -> float:
    return point.median("throughput_per_s")


def _tail(point: LoadPoint) -> float:
    return point.median("p99_us")


def pareto_front(
    points: Sequence[LoadPoint],
    rate: Callable[[LoadPoint], float] = _rate,
    tail: Callable[[LoadPoint], float] = _tail,
) -> tuple[LoadPoint, ...]:
    """Return the Pareto front of throughput and p99, ascending in throughput.

    Medians of the rounds are compared. Points with errors or without answers are excluded; of equal
    points the first stays.

    Args:
        points: Points in any order.
        rate: Function that returns a point's throughput (higher is better).
        tail: Function that returns a point's tail latency (lower is better).
    """
    usable = [point for point in points if not point.errors and point.median("requests") > 0]
    ranked = sorted(usable, key=lambda point: (-rate(point), tail(point)))
    front: list[LoadPoint] = []
    for point in ranked:
        if not front or tail(point) < tail(front[-1]):
            front.append(point)
    return tuple(reversed(front))


TrialVerdict = Literal["better", "worse", "no difference", "failed"]
ScoreUnit = Literal["requests/s", "tokens/s"]
REQUESTS: ScoreUnit = "requests/s"


@dataclass(frozen=True)
class Trial:
    """One change of the best configuration, measured in turns with it."""

    number: int  # number from 1; the baseline has none
    change: dict[str, JsonValue]  # new values by field (dotted)
    before: dict[str, JsonValue]  # previous values by field
    reason: str  # reason of the trial
    verdict: TrialVerdict  # only `better` replaces the best configuration
    says: str  # details of the verdict
    score: float | None  # median of the rounds; None after a failure
    against: float | None  # score of the best configuration, in the same rounds
    rounds: int  # number of rounds
    points: tuple[LoadPoint, ...]  # measurements, ascending in load
    seconds: float  # total duration


@dataclass(frozen=True)
class Outcome:
    """Result of one side of the final comparison."""

    overrides: dict[str, JsonValue]  # changes of the spec; empty for the baseline
    score: float  # median of the rounds
    points: tuple[LoadPoint, ...]  # closed loops, ascending in clients
    bottleneck: Bottleneck  # bottleneck at the highest throughput
    rate: RateSearch | None = None  # None without a latency SLO, and for streamed answers
    cost: Cost | None = None  # None without a price


@dataclass(frozen=True)
class TuneResult:
    subject: Subject  # its overrides are the winner's
    slo: AnySlo
    objective: str  # description of the score
    trials: tuple[Trial, ...]
    skipped: dict[str, str]  # reason by skipped field
    baseline: Outcome
    winner: Outcome  # the baseline if no trial was better
    met: bool  # whether the winner meets the SLO
    verdict: str  # sentence about the SLO
    advice: tuple[str, ...]  # further measures, one sentence each
    stopped: str  # reason of the end of the search
    seconds: float  # total duration
    unit: ScoreUnit = REQUESTS  # unit of all scores
    schema: Literal["triptych-tune/1"] = "triptych-tune/1"


MAX_ROUNDS = 5
MIN_GAIN = 0.01
"""Minimum gain that changes a setting; smaller gains are ignored even if significant."""

MIN_FIRST_ROUND_RATIO = 0.85
"""Minimum score of a trial's first round, relative to the best, to measure it again."""

_MIN_SPREAD = 0.01
"""Minimum assumed noise of a round, because two rounds may agree by chance."""

_T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}
"""One-sided 95 % quantile of Student's t, by the number of rounds.

Testing after every round finds a false gain in about 10 % of pairs of equal configurations, and
finds 90 % of gains of 10 % if a round's score varies by 4 % (both from a simulation)."""


def gain(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the relative gain of the second score over the first, with its uncertainty.

    Args:
        scores: Scores of the present configuration and the trial, one pair per round; all above 0.

    Returns:
        Geometric mean of the ratios minus 1, and half the width of its 90 % confidence interval
        (infinite after one round).
    """
    ratios = [log(other / present) for present, other in scores]
    if len(ratios) < 2:
        return exp(ratios[0]) - 1, float("inf")
    rounds = min(len(ratios), max(_T))
    half = _T[rounds] * max(stdev(ratios), _MIN_SPREAD) / sqrt(len(ratios))
    return exp(mean(ratios)) - 1, half


def compare_scores(scores: Sequence[tuple[float, float]]) -> TrialVerdict | None:
    """Return the verdict on the second of each pair; None if another round is needed."""
    share, half = gain(scores)
    if share < MIN_FIRST_ROUND_RATIO - 1:
        return "worse"
    if share - half > 0 and share > MIN_GAIN:
        return "better"
    if share + half < 0:
        return "worse"
    if len(scores) >= MAX_ROUNDS or share + half < MIN_GAIN:
        return "no difference"
    return None


def format_scores(scores: Sequence[tuple[float, float]]) -> str:
    """Return the gain with its interval as text."""
    share, half = gain(scores)
    rounds = f"{len(scores)} round" + ("s" if len(scores) > 1 else "")
    if half == float("inf"):
        return f"{share:+.1%} in {rounds}"
    return f"{share:+.1%} ± {half:.1%} in {rounds}"
