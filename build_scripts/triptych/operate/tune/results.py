"""What `tune` found: every trial with its evidence, what won, and what that is worth.

Which points no other point beats in throughput and in tail latency both.

Whether a promise is kept, by how much, and what would help where it is not.

Whether a setting is better than another: paired rounds until the difference beats its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import mean, stdev
from typing import Literal

from pydantic import JsonValue

from triptych.base.formatting import rounded
from triptych.serving.bench.results import Bottleneck, Cost, Point, RateSearch, Subject
from triptych.spec.plan import Plan
from triptych.spec.slo import AnySlo, Slo


def _rate(point: Point) -> float:
    return point.median("throughput_per_s")


def _tail(point: Point) -> float:
    return point.median("p99_us")


def pareto_front(
    points: Sequence[Point],
    rate: Callable[[Point], float] = _rate,
    tail: Callable[[Point], float] = _tail,
) -> tuple[Point, ...]:
    """The points with more throughput than any that have as little p99, ascending in throughput.

    Medians of the rounds are compared. A point with errors, or without an answer, is none to
    choose; of two that are equal the first stays.

    Args:
        points: in any order.
        rate: of a point, the more the better.
        tail: of a point, the less the better.
    """
    usable = [point for point in points if not point.errors and point.median("requests") > 0]
    ranked = sorted(usable, key=lambda point: (-rate(point), tail(point)))
    front: list[Point] = []
    for point in ranked:
        if not front or tail(point) < tail(front[-1]):
            front.append(point)
    return tuple(reversed(front))


TrialVerdict = Literal["better", "worse", "no difference", "failed"]
ScoreUnit = Literal["requests/s", "tokens/s"]
REQUESTS: ScoreUnit = "requests/s"


@dataclass(frozen=True)
class Trial:
    """One change against the best settings so far, measured in turns with them."""

    number: int  # from 1; the baseline is no trial
    change: dict[str, JsonValue]  # dotted key of the spec to its new value
    before: dict[str, JsonValue]  # the same keys to their values in the best settings so far
    reason: str  # why it was worth a try: what the last measurement showed
    verdict: TrialVerdict  # only `better` takes the place of the best settings so far
    says: str  # the figures behind the verdict, or what failed
    score: float | None  # median of its rounds, in the result's unit; None where it failed
    against: float | None  # of the best settings, in the same rounds
    rounds: int  # that it took to tell
    points: tuple[Point, ...]  # of the trial, ascending in load
    seconds: float  # that it took altogether


@dataclass(frozen=True)
class Outcome:
    """One setting, measured at length in turns with the other one."""

    overrides: dict[str, JsonValue]  # all that differs from the spec; empty for the baseline
    score: float  # what tuning maximizes, in the result's unit; median of the rounds
    points: tuple[Point, ...]  # closed loops, ascending in clients
    bottleneck: Bottleneck  # at the load where throughput no longer grows
    rate: RateSearch | None = None  # None where no latency is promised, and of streamed answers
    cost: Cost | None = None  # where a price was given


@dataclass(frozen=True)
class TuneResult:
    subject: Subject  # its overrides are the winner's
    slo: AnySlo
    objective: str  # what the score is, in a sentence
    trials: tuple[Trial, ...]
    skipped: dict[str, str]  # key of the spec to why it was not worth a trial
    baseline: Outcome
    winner: Outcome  # the baseline where nothing was better
    met: bool  # whether the winner holds all of `slo`
    verdict: str  # by how much it does, or what is missing; a sentence
    advice: tuple[str, ...]  # what else would help, a sentence each; some where it is not met
    stopped: str  # why the search ended
    seconds: float  # that it took altogether
    unit: ScoreUnit = REQUESTS  # of all scores
    schema: Literal["triptych-tune/1"] = "triptych-tune/1"


def describe_outcome(slo: Slo, winner: Outcome) -> tuple[bool, str]:
    """Whether the winner keeps the promise, and the sentence that says so with its figures."""
    if slo.is_empty:
        return True, f"nothing is promised; {winner.score:.0f}/s at the highest load"
    if winner.rate is None:
        wanted = slo.throughput or 0.0
        return winner.score >= wanted, against(winner.score, wanted)
    rate = winner.rate.highest_per_s
    limits = slo.model_copy(update={"throughput": None})
    if not rate:
        return False, f"{limits} does not hold at any rate that was tried"
    said = f"{limits} holds up to {rate:.0f}/s (Poisson)"
    if winner.rate.lowest_broken_per_s is not None:
        said += f" and breaks at {winner.rate.lowest_broken_per_s:.0f}/s"
    if slo.throughput is None:
        return True, said
    return rate >= slo.throughput, f"{said}: {against(rate, slo.throughput)}"


def against(found: float, wanted: float) -> str:
    """How far a rate is above or below the promised one, requests a second."""
    side = "above" if found >= wanted else "below"
    return f"{rounded(found)}/s, {abs(found / wanted - 1):.0%} {side} the {wanted:g}/s promised"


def advice(plan: Plan, slo: Slo, winner: Outcome) -> tuple[str, ...]:
    """What would help where tuning alone does not."""
    found = [f"{winner.bottleneck.says} {winner.bottleneck.remedy}".strip()]
    core = plan.spec.core
    if core.precision == "fp32":
        found.append(
            "A lower precision computes faster: `--set core.precision=auto` tries those that pass "
            "the accuracy gate."
        )
    sustained = winner.score if winner.rate is None else winner.rate.highest_per_s
    if slo.throughput is not None and 0 < sustained < slo.throughput:
        count = ceil(slo.throughput / sustained)
        found.append(f"{count} such machines behind a load balancer reach {slo.throughput:g}/s.")
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone and not sustained and slo.strain(alone.typical.latencies_us) > 1:
        found.append(
            f"Not even a lone client is answered in time (p99 {alone.median('p99_us') / 1e3:.1f}"
            " ms): no batching can help, only a faster core or shorter texts."
        )
    lengths = plan.lengths
    if lengths is not None and lengths.quantile(0.99) > 4 * lengths.mean:
        found.append(
            f"A hundredth of the rows has {lengths.quantile(0.99)} tokens or more, "
            f"{lengths.mean:.0f} on average: a lower tokenizer.max_length cuts the tail."
        )
    if core.device == "cpu":
        found.append("A GPU, or more cores.")
    return tuple(found)


MAX_ROUNDS = 5
MIN_GAIN = 0.01
"""A smaller gain is not worth another number in a config, even a proven one."""

LOST = 0.85
"""A setting this far behind in its first round is not measured again."""

_MIN_SPREAD = 0.01
"""Two rounds may agree by chance: no less than this is taken for the noise of one."""

_T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}
"""Student's t for 95 % on one side, by the number of rounds.

Looking after every round finds a gain in about one of ten pairs of equal settings, and nine of ten
gains of a tenth, where a round's score varies by 4 %; both were counted in a simulation."""


def gain(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How much higher the second of each pair is, as a share, and the half width of its interval.

    Args:
        scores: of the present and of the other setting, a pair a round; all above 0.

    Returns:
        Geometric mean of the ratios minus 1, and what to add and take away for 90 % confidence;
        infinite after one round.
    """
    ratios = [log(other / present) for present, other in scores]
    if len(ratios) < 2:
        return exp(ratios[0]) - 1, float("inf")
    rounds = min(len(ratios), max(_T))
    half = _T[rounds] * max(stdev(ratios), _MIN_SPREAD) / sqrt(len(ratios))
    return exp(mean(ratios)) - 1, half


def compare_scores(scores: Sequence[tuple[float, float]]) -> TrialVerdict | None:
    """The verdict on the second of each pair; None where another round may tell more."""
    share, half = gain(scores)
    if share < LOST - 1:
        return "worse"
    if share - half > 0 and share > MIN_GAIN:
        return "better"
    if share + half < 0:
        return "worse"
    if len(scores) >= MAX_ROUNDS or share + half < MIN_GAIN:
        return "no difference"
    return None


def describe(scores: Sequence[tuple[float, float]]) -> str:
    """The gain with its interval, in words."""
    share, half = gain(scores)
    rounds = f"{len(scores)} round" + ("s" if len(scores) > 1 else "")
    if half == float("inf"):
        return f"{share:+.1%} in {rounds}"
    return f"{share:+.1%} ± {half:.1%} in {rounds}"
