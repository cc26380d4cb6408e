"""Two builds' answers to the same requests: their metrics, and tests of one against the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from triptych.core.gate.live_replies import Rules
from triptych.core.gate.live_send import Reply
from triptych.core.samples import FEW_ROWS
from triptych.operate.watch.scores import (
    RowScore,
    Tests,
    lost,
    mean_interval,
    score_rows,
    tests_for,
)
from triptych.repository.records import GateResult
from triptych.spec.tasks.metrics_bootstrap import difference_interval, ratio
from triptych.spec.tasks.metrics_outputs import Outputs

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
