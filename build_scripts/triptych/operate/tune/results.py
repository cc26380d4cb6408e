"""Results of `tune`: trials, outcomes, Pareto front, paired comparison of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from triptych.base.confidence import MARGIN, Ratio, paired_ratio
from triptych.serving.bench.results import (
    Bottleneck,
    Cost,
    LoadPoint,
    RateSearch,
    SloKind,
    Subject,
)
from triptych.spec.slo import AnySlo


def pareto_front(
    points: Sequence[LoadPoint],
    rate: Callable[[LoadPoint], float],
    tail: Callable[[LoadPoint], float],
) -> tuple[LoadPoint, ...]:
    """Return the Pareto front of throughput and tail latency, ascending in throughput.

    Points with errors or without answers are excluded; of equal points the first stays.

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


TrialVerdict = Literal["better", "worse", "no difference", "cannot tell", "failed"]
"""Verdict on a trial; ``no difference`` is one of less than `MARGIN`, with 95 % confidence."""

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
    """Result of `tune`, as ``tune.json`` has it."""

    subject: Subject  # its overrides are the winner's
    slo: AnySlo
    objective: str  # description of the score
    trials: tuple[Trial, ...]
    skipped: dict[str, str]  # reason by skipped field
    baseline: Outcome
    winner: Outcome  # the baseline if no trial was better
    met: bool  # whether the winner is proven to meet the SLO, or there is none
    verdict: str  # sentence about the SLO
    advice: tuple[str, ...]  # further measures, one sentence each
    stopped: str  # reason of the end of the search
    seconds: float  # total duration
    unit: ScoreUnit = REQUESTS  # unit of all scores
    slo_kind: SloKind = "none"  # verdict about the SLO; also ``none`` in earlier releases
    schema: Literal["triptych-tune/1"] = "triptych-tune/1"


LOOKS = (3, 6)
"""Numbers of rounds after which a trial is judged; the second only if the first cannot tell.

Two looks at 95 % confidence call a trial of an equal setting better, or worse, in at most 5 % of
trials, and find 80 % of gains of 10 % if a round's score varies by 4 %."""

MIN_GAIN = 0.01
"""Minimum gain that changes a setting; smaller gains are ignored even if proven."""

MIN_FIRST_ROUND_RATIO = 0.85
"""Minimum score of a trial's first round, relative to the best, to measure it again."""


def compare_scores(scores: Sequence[tuple[float, float]]) -> TrialVerdict | None:
    """Return the verdict on the second of each pair; None if another round is needed.

    Args:
        scores: Scores of the present configuration and the trial, one pair per round; all above 0.
    """
    ratio = ratio_of(scores)
    if len(scores) == 1 and ratio.value < MIN_FIRST_ROUND_RATIO:
        return "cannot tell"
    if len(scores) not in LOOKS:
        return None
    if ratio.low > 1 and ratio.value > 1 + MIN_GAIN:
        return "better"
    if ratio.high < 1:
        return "worse"
    if len(scores) < LOOKS[-1] and ratio.value > 1 + MIN_GAIN:
        return None
    return "no difference" if ratio.is_between(1 / (1 + MARGIN), 1 + MARGIN) else "cannot tell"


def ratio_of(scores: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of the second score to the first of each round."""
    return paired_ratio(*zip(*scores, strict=True))


def format_scores(scores: Sequence[tuple[float, float]]) -> str:
    """Return the ratio with its interval and the number of rounds as text."""
    ratio = ratio_of(scores)
    return str(ratio) if ratio.rounds < 2 else f"{ratio} in {ratio.rounds} rounds"
