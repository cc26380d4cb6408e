"""Verdict on a replay: compare the answers, latency and cost of two builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import median
from typing import Any, Literal

import numpy as np

from triptych.base.confidence import MARGIN, Ratio, paired_ratio
from triptych.base.formatting import amount, percent, rounded
from triptych.core.gate.live import AnswerRules, LiveResponse
from triptych.core.requests import MIN_RECOMMENDED_ROWS
from triptych.operate.monitor.scores import (
    LossTests,
    RowScore,
    choose_tests,
    full_loss,
    mean_interval,
    score_rows,
)
from triptych.repository.records import GateResult, plain_data
from triptych.serving.bench.comparison import core_ms_per_request, gpu_ms_per_request
from triptych.serving.bench.results import Measurement
from triptych.tasks.compare import Outputs
from triptych.tasks.labeled import difference_interval, ratio

State = Literal["within limit", "better", "worse", "over limit", "inconclusive"]


@dataclass(frozen=True)
class MetricPair:
    """A metric of the task for both builds; None if it was not measured."""

    metric: str
    active: float | None  # Metric of the active build, compared with the expected answers
    candidate: float | None  # Metric of the candidate, compared with the expected answers
    between: float  # Metric of the candidate, compared with the active build
    limit: float | None  # Limit for the candidate's precision


@dataclass(frozen=True)
class PairTest:
    """Mean losses of both builds, from 0 to 1, with 95 % confidence intervals."""

    name: str
    rows: int
    allowed: float  # Maximum mean loss for the candidate's precision
    active: float
    candidate: float
    low: float  # Lower bound of the candidate's mean loss
    high: float  # Upper bound of the candidate's mean loss
    more_low: float  # Lower bound of the candidate's additional loss, paired by row
    more_high: float  # Upper bound of the candidate's additional loss

    @property
    def state(self) -> State:
        """State of the candidate. Few rows can prove a loss over the limit, not one within it."""
        if self.high <= self.allowed:
            return "within limit" if self.rows >= MIN_RECOMMENDED_ROWS else "inconclusive"
        if self.more_high < 0:
            return "better"
        if self.low > self.allowed:
            return "worse" if self.more_low > 0 else "over limit"
        return "inconclusive"


@dataclass(frozen=True)
class Answers:
    """Compared answers to the replayed requests."""

    rows: int  # Number of requests compared
    # Number of requests that the pipeline refuses. Without the original model, requests that the
    # active build did not answer.
    left_out: int
    # Number of errors of the active build and of the candidate, among `rows`.
    unanswered: tuple[int, int]
    # Whether the expected answers are the original model's. Otherwise they are the active build's.
    reference: bool
    metrics: tuple[MetricPair, ...]  # Metrics of the task for both builds
    tests: tuple[PairTest, ...]


def compare_answers(
    rules: AnswerRules,
    gate: GateResult,
    responses: tuple[Sequence[LiveResponse], Sequence[LiveResponse]],
    expected: Sequence[Outputs | None] | None,
    queries: Sequence[str],
) -> Answers:
    """Compare both builds with the expected answers, by the candidate's limits.

    Args:
        rules: AnswerRules of the candidate.
        gate: Gate result of the candidate.
        responses: Responses of the active build and of the candidate, one per request.
        expected: Answers of the original model, None for requests that it refuses. None as a whole
            if a build is of another model.
        queries: Input `text` of each request.
    """
    old, new = ([response.outputs or {} for response in each] for each in responses)
    wanted: Sequence[Outputs | None] = old if expected is None else expected
    kept = [index for index, outputs in enumerate(wanted) if outputs]
    right = [wanted[index] or {} for index in kept]
    candidate, active = ([answers[index] for index in kept] for answers in (new, old))
    kept_queries = [queries[index] for index in kept]
    reference = None if expected is None else right
    return Answers(
        rows=len(kept),
        left_out=len(wanted) - len(kept),
        unanswered=(sum(not row for row in active), sum(not row for row in candidate)),
        reference=expected is not None,
        metrics=_compute_metrics(rules, active, candidate, reference, kept_queries),
        tests=_test_losses(rules, gate, active, candidate, right),
    )


def _compute_metrics(
    rules: AnswerRules,
    old: Sequence[Outputs],
    new: Sequence[Outputs],
    expected: Sequence[Outputs] | None,
    queries: Sequence[str],
) -> tuple[MetricPair, ...]:
    """Return the metrics over the requests that both builds answered."""
    both = [index for index in range(len(old)) if old[index] and new[index]]
    if not both:
        return ()
    both_queries = [queries[index] for index in both]

    def compare(
        actual: Sequence[Outputs], expected: Sequence[Outputs] | None
    ) -> Mapping[str, float]:
        if expected is None:
            return {}
        rows = [actual[index] for index in both], [expected[index] for index in both]
        return rules.task.compare(*rows, both_queries).values

    first, second, between = compare(old, expected), compare(new, expected), compare(new, old)
    return tuple(
        MetricPair(name, first.get(name), second.get(name), value, rules.limits.get(name))
        for name, value in between.items()
    )


def _test_losses(
    rules: AnswerRules,
    gate: GateResult,
    old: Sequence[Outputs],
    new: Sequence[Outputs],
    expected: Sequence[Outputs],
) -> tuple[PairTest, ...]:
    if not expected:
        return ()
    tests = choose_tests(rules, expected, gate)
    scores = [_score(rules, tests, answers, expected) for answers in (old, new)]
    ones = np.ones(len(expected))
    results = []
    for name, allowed in tests.allowed.items():
        before, after = (np.array([score.losses[name] for score in each]) for each in scores)
        more = difference_interval(ratio(before, ones), ratio(after, ones), len(expected))
        means = float(before.mean()), float(after.mean())
        interval = mean_interval(after.tolist())
        results.append(PairTest(name, len(expected), allowed, *means, *interval, *more))
    return tuple(results)


def _score(
    rules: AnswerRules, tests: LossTests, answers: Sequence[Outputs], expected: Sequence[Outputs]
) -> list[RowScore]:
    """Return the score of each row; a row without an answer has full loss."""
    given = [answer or right for answer, right in zip(answers, expected, strict=True)]
    scores = score_rows(rules, tests, given, expected)
    return [
        score if answer else full_loss(tests) for score, answer in zip(scores, answers, strict=True)
    ]


Decision = Literal["promote", "reject", "inconclusive"]
MAX_ROUNDS = 1000
"""Maximum number of rounds of a comparison."""


@dataclass(frozen=True)
class Speed:
    """A latency or cost of both builds, measured in turns in every round; lower is better."""

    name: str
    active: tuple[float, ...]
    candidate: tuple[float, ...]
    ratio: Ratio  # Candidate over active build

    @property
    def medians(self) -> tuple[float, float]:
        return median(self.active), median(self.candidate)

    @property
    def state(self) -> State:
        """State of the candidate, whose latencies and costs may be `MARGIN` higher."""
        if self.ratio.high < 1:
            return "better"
        sides: dict[str, State] = {"below": "within limit", "above": "over limit"}
        return sides.get(self.ratio.side_of(1 + MARGIN), "inconclusive")

    def __str__(self) -> str:
        """Return text such as ``p50 ms 1.02 times (0.97 to 1.08 with 95 % confidence)``."""
        return f"{self.name} {self.ratio}"


@dataclass(frozen=True)
class ReplayComparison:
    """Result of a replay on two builds."""

    pipeline: str
    builds: tuple[str, str]  # Ids of the active build and the candidate
    precisions: tuple[str, str]  # Precisions of the active build and the candidate
    source: str  # Source of the requests: ``sample`` or ``traffic``
    load: str  # Load of the measurements; empty without measurements
    rounds: int  # Number of measurements per build
    seconds: float  # Duration of all measurements
    verdict: Decision
    reasons: tuple[str, ...]  # Reasons for the verdict
    answers: Answers
    speeds: tuple[Speed, ...]
    # Errors under load of the active build and the candidate. With errors, `speeds` is empty.
    errors: tuple[tuple[str, ...], tuple[str, ...]]
    notes: tuple[str, ...]  # Further texts for the user

    @property
    def passed(self) -> bool:
        return self.verdict == "promote"

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``; values that are not finite are null."""
        fields = {**asdict(self), "passed": self.passed}
        states = [test.state for test in self.answers.tests]
        for test, state in zip(fields["answers"]["tests"], states, strict=True):
            test["state"] = state
        for fields_of_speed, speed in zip(fields["speeds"], self.speeds, strict=True):
            fields_of_speed |= {"state": speed.state, "medians": speed.medians}
        plain: dict[str, object] = plain_data(fields)
        return plain


_SPEED_METRICS: tuple[tuple[str, Callable[[Measurement], float | None]], ...] = (
    ("p50 ms", lambda result: result.p50_us / 1e3),
    ("p99 ms", lambda result: result.p99_us / 1e3),
    ("core ms per request", core_ms_per_request),
    ("GPU ms per request", gpu_ms_per_request),
)


def compare_speeds(
    before: Sequence[Measurement], after: Sequence[Measurement]
) -> tuple[Speed, ...]:
    """Return latency and cost of both builds; empty if a round has errors."""
    if not before or any(result.errors for result in (*before, *after)):
        return ()
    speeds = []
    for name, read in _SPEED_METRICS:
        old, new = (
            tuple(value for result in side if (value := read(result))) for side in (before, after)
        )
        if len(old) == len(before) and len(new) == len(after):
            speeds.append(Speed(name, old, new, paired_ratio(old, new)))
    return tuple(speeds)


def judge(
    answers: Answers,
    speeds: Sequence[Speed],
    errors: tuple[Sequence[str], Sequence[str]],
    round_s: float = 0.0,
) -> tuple[Decision, list[str]]:
    """Return the verdict and its reasons.

    A candidate is promoted if its answers are within the limits and no latency or cost is more than
    `MARGIN` higher, each with 95 % confidence. It is rejected if one of these is disproved.

    Args:
        answers: Compared answers.
        speeds: Latency and cost; empty if not measured.
        errors: Errors under load of the active build and the candidate.
        round_s: Duration of a round of both builds, in seconds.
    """
    against = [*_find_losses(answers), *(f"failed under load: {kind}" for kind in errors[1])]
    limit = percent(MARGIN)
    slower = [speed for speed in speeds if speed.state == "over limit"]
    against += [f"{speed}: more than {limit} higher" for speed in slower]
    if against:
        return "reject", against
    doubts = [*_find_doubts(answers), *_find_slow_doubts(speeds, round_s)]
    if errors[0]:
        doubts.append("the active build failed under load, so latency and cost were not compared")
    if doubts:
        return "inconclusive", doubts
    return "promote", [*_find_advantages(answers, speeds)]


def _find_losses(answers: Answers) -> Iterator[str]:
    for test in answers.tests:
        if answers.reference and test.state == "worse":
            yield f"{_format_loss(test)}: worse than the active build"
        elif answers.reference and test.state == "over limit":
            yield f"{_format_loss(test)}: over the limit, and no better than the active build"
    old, new = answers.unanswered
    if new > old:
        yield f"{new} of {answers.rows} requests failed; {old} failed on the active build"


def _find_doubts(answers: Answers) -> Iterator[str]:
    if answers.rows < MIN_RECOMMENDED_ROWS:
        yield f"{answers.rows} rows are too few: at least {MIN_RECOMMENDED_ROWS} are needed"
    for test in answers.tests:
        if test.rows < MIN_RECOMMENDED_ROWS or test.state in ("within limit", "better"):
            continue
        if answers.reference:
            yield f"{_format_loss(test)}: more rows are needed"
        else:
            yield f"{_format_loss(test)}: the models differ, so only labeled rows can decide"


def _find_slow_doubts(speeds: Sequence[Speed], round_s: float) -> Iterator[str]:
    """Yield each latency or cost that may be over the limit, and what it takes to know."""
    for speed in speeds:
        if speed.state != "inconclusive":
            continue
        needed = speed.ratio.rounds_to_tell(1 + MARGIN)
        if needed is None:
            yield "one round does not show the noise of latency and cost: use --max-rounds 30, or 0"
            return
        doubt = f"{speed} may be more than {percent(MARGIN)} higher"
        if needed > MAX_ROUNDS:
            yield f"{doubt}: it is too close to the limit, or the rounds vary too much"
        else:
            needed = max(needed, speed.ratio.rounds + 1)
            time = f" ({amount(ceil(needed * round_s / 60), 'minute')})" if round_s else ""
            yield f"{doubt}: about {needed} rounds{time} are needed, use --max-rounds {needed}"


def _find_advantages(answers: Answers, speeds: Sequence[Speed]) -> Iterator[str]:
    base = "the original model" if answers.reference else "the active build"
    if all(test.active == test.candidate for test in answers.tests):
        yield f"no difference in the answers to {answers.rows} rows, compared with {base}"
    else:
        yield f"{answers.rows} rows are within the limits or better, compared with {base}"
    if speeds:
        yield f"no latency or cost is more than {percent(MARGIN)} higher, with 95 % confidence"
    yield from (f"{speed}: better" for speed in speeds if speed.state == "better")


def _format_loss(test: PairTest) -> str:
    return (
        f"{test.name}: mean loss {test.candidate:.4g} ({test.low:.4g} to {test.high:.4g}),"
        f" active build {test.active:.4g}, limit {test.allowed:.2g}"
    )


def format_comparison(result: ReplayComparison) -> Iterator[tuple[str, str]]:
    """Yield the lines of a comparison, each with its style."""
    answers = result.answers
    old, new = (
        f"{build[:12]} ({precision})"
        for build, precision in zip(result.builds, result.precisions, strict=True)
    )
    yield f"{result.pipeline}: candidate {new} compared with {old}, {answers.rows} rows", "bold"
    columns = ("metric", "active", "candidate", "between", "limit")
    yield "  {:28} {:>10} {:>10} {:>10} {:>10}".format(*columns), ""
    for pair in answers.metrics:
        values = (pair.active, pair.candidate, pair.between, pair.limit)
        cells = ["-" if value is None else f"{value:.6g}" for value in values]
        yield "  {:28} {:>10} {:>10} {:>10} {:>10}".format(pair.metric, *cells), ""
    for test in answers.tests:
        style = {"worse": "red", "over limit": "red", "inconclusive": "yellow"}.get(test.state, "")
        yield f"  {_format_loss(test)}: {test.state}", style
    if result.rounds:
        load = f"{amount(result.rounds, 'round')} of {result.load} on each build"
        yield f"  {load}, {result.seconds:.0f} s", ""
    for speed in result.speeds:
        spans = [
            f"{rounded(middle)} ({rounded(min(values))} to {rounded(max(values))})"
            for middle, values in zip(speed.medians, (speed.active, speed.candidate), strict=True)
        ]
        style = {"over limit": "red", "inconclusive": "yellow"}.get(speed.state, "")
        yield (
            f"  {speed.name:18} {spans[0]:>24} {spans[1]:>24}  {speed.ratio}, {speed.state}",
            style,
        )
    if answers.left_out:
        yield f"  excluded: {answers.left_out} rows without an answer to compare with", "yellow"
    for kind in result.errors[0]:
        yield f"  active build, failed under load: {kind}", "yellow"
    for note in result.notes:
        yield f"  note: {note}", "yellow"
    style = {"promote": "green", "reject": "red"}.get(result.verdict, "yellow")
    yield f"{result.verdict}: {'; '.join(result.reasons)}", style
