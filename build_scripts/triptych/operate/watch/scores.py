"""Rows of a sample against the reference: a loss for each test, the gate's metrics, the worst."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.core.gate.live import Rules, differences, is_finite, same, shape_fault
from triptych.core.gate.verify import ALIKE, MIN_ALIKE
from triptych.repository.records import GateResult
from triptych.spec.tasks.accuracy import METRICS
from triptych.spec.tasks.compare import Outputs
from triptych.spec.tasks.metrics_bootstrap import difference_interval, ratio

MEANS = (
    "label_agreement",
    "mean_cosine",
    "entity_f1",
    "exact_match",
    "answer_f1",
    "top_k_overlap",
)
"""Metrics that are a mean over rows, 1 where all is right."""

BEYOND = "rows_beyond_the_gate"
"""The share of rows that are further from the reference than any row of the gate was."""

UNSEEN = -math.log(0.001)
"""What none of n rows of the gate showed, at most so many n-ths of all rows have: said of a gate,
that is wrong once in 1,000 times."""

MIN_ALLOWED, MAX_ALLOWED = 1e-6, 0.5
SLACK = 2.0
"""How much further than the gate's worst row a row may be: answers may have been cut short and
scaled up (`dimensions`), and have other neighbors."""

LOOSE = 0.05
"""Largest difference of answers that are alike, where no limit says otherwise."""


@dataclass(frozen=True)
class RowScore:
    """One row.

    Attributes:
        badness: on the task's own scale.
        difference: largest of any number, relative as `max_difference`.
        losses: by test, from 0 to 1.
    """

    badness: float
    difference: float
    losses: Mapping[str, float]


@dataclass(frozen=True)
class Tests:
    """What is tested of each row.

    Attributes:
        allowed: test to the mean loss that is still right.
        furthest: difference from which a row is beyond the gate's; None where none is tested.
    """

    allowed: Mapping[str, float]
    furthest: float | None


@dataclass(frozen=True)
class Figure:
    """A metric of the rows of one look.

    Attributes:
        low: end of its 95 % confidence interval; None where it is no mean over rows.
        high: the other end.
        limit: the gate's; None where there is none.
        built: the gate's figure when it was built.
    """

    metric: str
    value: float
    low: float | None
    high: float | None
    limit: float | None
    built: float | None


def tests_for(rules: Rules, wanted: Sequence[Outputs], gate: GateResult) -> Tests:
    """The tests of a pipeline, whose reference answers `wanted`, built with the result `gate`."""
    unseen = min(UNSEEN / max(gate.rows, 1), MAX_ALLOWED)
    held = rules.task.compare(wanted, wanted, [""] * len(wanted)).values
    allowed = {}
    for name in MEANS:
        limit = rules.limits.get(name)
        # Functions of the pipeline's own may have taken out of the outputs what it needs.
        if limit is not None and held.get(name, 0.0) >= limit:
            allowed[name] = min(max(1 - limit, MIN_ALLOWED), MAX_ALLOWED) if limit < 1 else unseen
    if not allowed:
        allowed[ALIKE] = max(1 - MIN_ALIKE[rules.tolerance], unseen)
    if rules.hooked:
        return Tests(allowed, None)
    rows = [value for value in gate.row_differences[gate.edge_rows :] if math.isfinite(value)]
    limit = rules.limits.get("max_difference", 0.0)
    if not rows and not limit:
        return Tests(allowed, None)
    allowed[BEYOND] = unseen
    return Tests(allowed, SLACK * max([limit, *rows]))


def score_rows(
    rules: Rules, tests: Tests, got: Sequence[Outputs], wanted: Sequence[Outputs]
) -> list[RowScore]:
    """Each row; one without what is wanted of it loses all."""
    scale = _scales(wanted)
    return [
        _score(rules, tests, mine, right, scale) for mine, right in zip(got, wanted, strict=True)
    ]


def lost(tests: Tests) -> RowScore:
    """A row that was answered and should have been refused, or the reverse."""
    return RowScore(math.inf, math.inf, dict.fromkeys(tests.allowed, 1.0))


def _score(
    rules: Rules, tests: Tests, got: Outputs, wanted: Outputs, scale: Mapping[str, float]
) -> RowScore:
    if (not rules.hooked and shape_fault(got, wanted)) or not is_finite(got, rules.json_outputs):
        return lost(tests)
    found = rules.task.compare([got], [wanted], [""])
    difference = math.inf
    if not shape_fault(got, wanted):
        parts = differences(got, wanted, rules.json_outputs).items()
        difference = max([0.0, *(value / scale.get(name, 1.0) for name, value in parts)])
    losses = {}
    for name in tests.allowed:
        if name == BEYOND and tests.furthest is not None:
            losses[name] = float(not difference <= tests.furthest)
        elif name == ALIKE:
            close = difference <= rules.limits.get("max_difference", LOOSE)
            losses[name] = float(not (close and same(got, wanted)))
        else:
            losses[name] = min(max(1 - found.values[name], 0.0), 1.0)
    return RowScore(float(found.badness[0]), difference, losses)


def _scales(wanted: Sequence[Outputs]) -> dict[str, float]:
    """What differences are relative to: the reference's largest number, where that is above 1."""
    scales: dict[str, float] = {}
    for outputs in wanted:
        for name, array in outputs.items():
            if np.issubdtype(array.dtype, np.floating) and array.size:
                scales[name] = max(scales.get(name, 1.0), float(np.abs(array).max()))
    return scales


def figures_of(
    rules: Rules,
    gate: GateResult,
    scores: Sequence[RowScore],
    got: Sequence[Outputs],
    wanted: Sequence[Outputs],
    queries: Sequence[str],
) -> Iterator[Figure]:
    """The task's metrics as the gate has them; of means over rows with their intervals."""
    for name, value in rules.task.compare(got, wanted, queries).values.items():
        low = high = None
        losses = [score.losses[name] for score in scores if name in score.losses]
        if losses:
            low, high = mean_interval(losses)
            low, high = 1 - high, 1 - low
        yield Figure(name, value, low, high, rules.limits.get(name), gate.value(name))
    if all(BEYOND in score.losses for score in scores):
        losses = [score.losses[BEYOND] for score in scores]
        yield Figure(BEYOND, float(np.mean(losses)), *mean_interval(losses), None, 0.0)


def mean_interval(losses: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of losses from 0 to 1."""
    values, ones = np.array(losses, dtype=np.float64), np.ones(len(losses))
    nothing = ratio(np.zeros(len(losses)), ones)
    low, high = difference_interval(nothing, ratio(values, ones), len(values))
    return max(low, 0.0), min(high, 1.0)


def is_worse(figure: Figure) -> bool:
    """Whether a metric with a limit misses it."""
    if figure.limit is None or figure.metric not in METRICS:
        return False
    return not METRICS[figure.metric].meets(figure.value, figure.limit)
