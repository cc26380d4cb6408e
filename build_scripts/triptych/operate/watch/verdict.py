"""What a replay on two builds comes to: figures of speed and cost, one verdict, in words.

Two builds' answers to the same requests: their metrics, and tests of one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from triptych.base.formatting import percent, rounded, signed_percent
from triptych.core.gate.live import Reply, Rules
from triptych.core.samples import FEW_ROWS
from triptych.operate.watch.scores import (
    RowScore,
    Tests,
    lost,
    mean_interval,
    score_rows,
    tests_for,
)
from triptych.repository.records import GateResult, plain_data
from triptych.serving.bench.comparison import Weight, change_between, core_ms, gpu_ms
from triptych.serving.bench.results import Measurement
from triptych.spec.tasks.compare import Outputs
from triptych.spec.tasks.metrics_bootstrap import difference_interval, ratio

State = Literal["right", "better", "worse", "as wrong", "cannot tell"]


@dataclass(frozen=True)
class PairFigure:
    """A metric of the task; None where it was not measured.

    Attributes:
        in_place: of the build in place, against what is wanted.
        candidate: likewise.
        between: of the candidate, against the build in place.
        limit: of the candidate's precision.
    """

    metric: str
    in_place: float | None
    candidate: float | None
    between: float
    limit: float | None


@dataclass(frozen=True)
class PairTest:
    """Mean losses of both builds, from 0 to 1, with 95 % confidence intervals.

    Attributes:
        allowed: mean loss that is still right, of the candidate's precision.
        low: end of the interval of the candidate's.
        more_low: end of the interval of what the candidate loses more, row by row.
    """

    name: str
    rows: int
    allowed: float
    in_place: float
    candidate: float
    low: float
    high: float
    more_low: float
    more_high: float

    @property
    def state(self) -> State:
        """What it tells of the candidate; few rows can show what is wrong, not what is right."""
        if self.high <= self.allowed:
            return "right" if self.rows >= FEW_ROWS else "cannot tell"
        if self.more_high < 0:
            return "better"
        if self.low > self.allowed:
            return "worse" if self.more_low > 0 else "as wrong"
        return "cannot tell"


@dataclass(frozen=True)
class Answers:
    """What became of the requests.

    Attributes:
        rows: compared.
        left_out: refused by the pipeline as it is here, or, without the original model, not
            answered by the build in place.
        unanswered: errors of the build in place, and of the candidate, among `rows`.
        reference: whether what is wanted is the original model's; else it is what the build in
            place answered.
    """

    rows: int
    left_out: int
    unanswered: tuple[int, int]
    reference: bool
    figures: tuple[PairFigure, ...]
    tests: tuple[PairTest, ...]


def compare_answers(
    rules: Rules,
    gate: GateResult,
    replies: tuple[Sequence[Reply], Sequence[Reply]],
    wanted: Sequence[Outputs | None] | None,
    queries: Sequence[str],
) -> Answers:
    """Hold both builds to what is wanted, by the candidate's limits.

    Args:
        rules: of the candidate.
        gate: its result.
        replies: of the build in place, and of the candidate, one a request.
        wanted: the original model's, None where it refuses; None where it can answer for neither.
        queries: input `text` of each request.
    """
    old, new = ([reply.outputs or {} for reply in each] for each in replies)
    right: Sequence[Outputs | None] = old if wanted is None else wanted
    kept = [place for place, outputs in enumerate(right) if outputs]
    held = [right[place] or {} for place in kept]
    mine, theirs = ([answers[place] for place in kept] for answers in (new, old))
    named = [queries[place] for place in kept]
    return Answers(
        rows=len(kept),
        left_out=len(right) - len(kept),
        unanswered=(sum(not one for one in theirs), sum(not one for one in mine)),
        reference=wanted is not None,
        figures=_figures(rules, theirs, mine, None if wanted is None else held, named),
        tests=_tests(rules, gate, theirs, mine, held),
    )


def _figures(
    rules: Rules,
    old: Sequence[Outputs],
    new: Sequence[Outputs],
    wanted: Sequence[Outputs] | None,
    queries: Sequence[str],
) -> tuple[PairFigure, ...]:
    """Of the requests that both answered."""
    both = [place for place in range(len(old)) if old[place] and new[place]]
    if not both:
        return ()
    named = [queries[place] for place in both]

    def compare(one: Sequence[Outputs], other: Sequence[Outputs] | None) -> Mapping[str, float]:
        if other is None:
            return {}
        mine, right = [one[place] for place in both], [other[place] for place in both]
        return rules.task.compare(mine, right, named).values

    first, second, between = compare(old, wanted), compare(new, wanted), compare(new, old)
    return tuple(
        PairFigure(name, first.get(name), second.get(name), value, rules.limits.get(name))
        for name, value in between.items()
    )


def _tests(
    rules: Rules,
    gate: GateResult,
    old: Sequence[Outputs],
    new: Sequence[Outputs],
    wanted: Sequence[Outputs],
) -> tuple[PairTest, ...]:
    if not wanted:
        return ()
    tests = tests_for(rules, wanted, gate)
    scores = [_score(rules, tests, answers, wanted) for answers in (old, new)]
    ones = np.ones(len(wanted))
    found = []
    for name, allowed in tests.allowed.items():
        before, after = (np.array([score.losses[name] for score in each]) for each in scores)
        more = difference_interval(ratio(before, ones), ratio(after, ones), len(wanted))
        means = float(before.mean()), float(after.mean())
        interval = mean_interval(after.tolist())
        found.append(PairTest(name, len(wanted), allowed, *means, *interval, *more))
    return tuple(found)


def _score(
    rules: Rules, tests: Tests, answers: Sequence[Outputs], wanted: Sequence[Outputs]
) -> list[RowScore]:
    """Each row; one without an answer loses all."""
    given = [mine or right for mine, right in zip(answers, wanted, strict=True)]
    scores = score_rows(rules, tests, given, wanted)
    return [one if mine else lost(tests) for one, mine in zip(scores, answers, strict=True)]


Word = Literal["take it", "keep the old one", "cannot tell"]

MATTERS = 0.05
"""Share by which latency or cost must have grown to be a reason, however sure it is."""


@dataclass(frozen=True)
class Speed:
    """A figure of latency or cost, lower better; of every round, in order.

    Attributes:
        relative: share of the median in place that the candidate's is above it.
        weight: whether that is more than the rounds are apart; see `bench.comparison.Change`.
    """

    name: str
    in_place: tuple[float, ...]
    candidate: tuple[float, ...]
    medians: tuple[float, float]
    relative: float
    weight: Weight


@dataclass(frozen=True)
class Shadow:
    """What the replay found.

    Attributes:
        builds: id of the build in place, and of the candidate.
        precisions: likewise.
        source: of the requests, ``sample`` or ``traffic``.
        load: that was offered; empty where none was.
        reasons: of the verdict, in words.
        errors: under load, of the build in place and of the candidate; with any, `speeds` is empty.
        notes: what else a user should know.
    """

    pipeline: str
    builds: tuple[str, str]
    precisions: tuple[str, str]
    source: str
    load: str
    verdict: Word
    reasons: tuple[str, ...]
    answers: Answers
    speeds: tuple[Speed, ...]
    errors: tuple[tuple[str, ...], tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.verdict == "take it"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``; what is no number is null."""
        fields = {**asdict(self), "passed": self.passed}
        states = [test.state for test in self.answers.tests]
        for test, state in zip(fields["answers"]["tests"], states, strict=True):
            test["state"] = state
        plain: dict[str, Any] = plain_data(fields)
        return plain


_FIGURES: tuple[tuple[str, Callable[[Measurement], float | None]], ...] = (
    ("p50 ms", lambda one: one.p50_us / 1e3),
    ("p99 ms", lambda one: one.p99_us / 1e3),
    ("core ms a request", core_ms),
    ("GPU ms a request", gpu_ms),
)


def speeds_of(before: Sequence[Measurement], after: Sequence[Measurement]) -> tuple[Speed, ...]:
    """Latency and cost of both builds; none where a round has no figures, but errors."""
    if not before or any(one.errors for one in (*before, *after)):
        return ()
    found = []
    for name, read in _FIGURES:
        old = [value for one in before if (value := read(one)) is not None]
        new = [value for one in after if (value := read(one)) is not None]
        if len(old) == len(before) and len(new) == len(after):
            change = change_between(name, old, new, "lower")
            medians, relative = (change.before, change.after), change.relative or 0.0
            found.append(Speed(name, tuple(old), tuple(new), medians, relative, change.weight))
    return tuple(found)


def judge(
    answers: Answers, speeds: Sequence[Speed], errors: Sequence[str]
) -> tuple[Word, list[str]]:
    """The verdict with its reasons: nothing may be clearly worse, and the answers must be right.

    Args:
        answers: compared.
        speeds: none where none were measured.
        errors: of the candidate under load.
    """
    against = [*_wrong(answers), *(f"under load it failed: {kind}" for kind in errors)]
    against += [
        f"{one.name}: {_both(one)}, more than the rounds are apart"
        for one in speeds
        if one.weight == "worse" and one.relative > MATTERS
    ]
    if against:
        return "keep the old one", against
    if open_ends := [*_unsure(answers, speeds)]:
        return "cannot tell", open_ends
    return "take it", [*_in_favor(answers, speeds)]


def _wrong(answers: Answers) -> Iterator[str]:
    for test in answers.tests:
        if answers.reference and test.state == "worse":
            yield f"{_losses(test)}: worse than the one in place"
        elif answers.reference and test.state == "as wrong":
            yield f"{_losses(test)}: wrong, and no better than the one in place"
    # An error of a request that the other build answers.
    old, new = answers.unanswered
    if new > old:
        yield f"{new} of {answers.rows} requests got no answer, of the one in place {old}"


def _unsure(answers: Answers, speeds: Sequence[Speed]) -> Iterator[str]:
    if answers.rows < FEW_ROWS:
        yield f"{answers.rows} rows are too few: {FEW_ROWS} or more tell"
    for test in answers.tests:
        if test.rows < FEW_ROWS or test.state in ("right", "better"):
            continue
        if answers.reference:
            yield f"{_losses(test)}: more rows would tell"
        else:
            yield f"{_losses(test)}: another model, so only rows with the truth say which is right"
    if any(one.weight == "one round: cannot tell" for one in speeds):
        yield "one round says nothing of the noise of latency and cost: measure more, or none"


def _in_favor(answers: Answers, speeds: Sequence[Speed]) -> Iterator[str]:
    to = "the original model" if answers.reference else "the one in place"
    if all(test.in_place == test.candidate for test in answers.tests):
        yield f"no difference in the answers to {answers.rows} rows, held to {to}"
    else:
        yield f"the answers to {answers.rows} rows keep their limits, or are better: held to {to}"
    if speeds:
        found = [f"{one.name} {_both(one)}" for one in speeds if one.weight == "better"]
        yield "; ".join(found) or f"no latency or cost is clearly higher by {percent(MATTERS)}"


def _losses(test: PairTest) -> str:
    return (
        f"{test.name}: the mean loss is {test.candidate:.4g} ({test.low:.4g} to {test.high:.4g}),"
        f" {test.in_place:.4g} in place, {test.allowed:.2g} is allowed"
    )


def _both(one: Speed) -> str:
    old, new = one.medians
    return f"{rounded(new)} instead of {rounded(old)} ({signed_percent(one.relative)})"


def describe_shadow(found: Shadow) -> Iterator[tuple[str, str]]:
    """The lines that show it, each with its style."""
    answers = found.answers
    old, new = (
        f"{build[:12]} ({precision})"
        for build, precision in zip(found.builds, found.precisions, strict=True)
    )
    yield f"{found.pipeline}: candidate {new} beside {old}, {answers.rows} rows", "bold"
    columns = ("metric", "in place", "candidate", "between", "limit")
    yield "  {:28} {:>10} {:>10} {:>10} {:>10}".format(*columns), ""
    for figure in answers.figures:
        values = (figure.in_place, figure.candidate, figure.between, figure.limit)
        cells = ["-" if value is None else f"{value:.6g}" for value in values]
        yield "  {:28} {:>10} {:>10} {:>10} {:>10}".format(figure.metric, *cells), ""
    for test in answers.tests:
        style = {"worse": "red", "as wrong": "red", "cannot tell": "yellow"}.get(test.state, "")
        yield f"  {_losses(test)}: {test.state}", style
    for one in found.speeds:
        spans = [
            f"{rounded(middle)} ({rounded(min(values))} to {rounded(max(values))})"
            for middle, values in zip(one.medians, (one.in_place, one.candidate), strict=True)
        ]
        words = f"{signed_percent(one.relative)}, {one.weight}"
        yield f"  {one.name:18} {spans[0]:>28} {spans[1]:>28}  {words}", ""
    if answers.left_out:
        yield f"  left out: {answers.left_out} rows that get no answer to compare with", "yellow"
    for kind in found.errors[0]:
        yield f"  in place, failed under load: {kind}", "yellow"
    for note in found.notes:
        yield f"  note: {note}", "yellow"
    style = {"take it": "green", "keep the old one": "red"}.get(found.verdict, "yellow")
    yield f"{found.verdict}: {'; '.join(found.reasons)}", style
