"""Losses and metrics of sampled rows, compared with the reference, and tests of mean losses.

A sequential test compares a mean loss with its limit and is valid after every row. It multiplies
bets against the hypothesis that the mean of losses in [0, 1] is at most `allowed`. The wealth of
one bet size is the product of 1 + bet (loss - allowed) over all losses. Under the hypothesis, this
wealth and the mean wealth of several bet sizes are non-negative supermartingales. By Ville's
inequality, the probability that the mean wealth ever reaches 1/alpha is at most alpha, however
often it is evaluated and whenever the test stops. The mean wealth is the evidence
(an e-value). Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", J. R. Stat. Soc. B 86, 2024, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from triptych.base.confidence import CONFIDENCE
from triptych.client.plain import without_padding
from triptych.core.gate.live import AnswerRules, differences, is_finite, same, shape_fault
from triptych.core.gate.verify import ANSWER_AGREEMENT, MIN_ANSWER_AGREEMENT
from triptych.repository.records import GateResult
from triptych.tasks.accuracy import is_met
from triptych.tasks.compare import Outputs
from triptych.tasks.labeled import difference_interval, ratio

ROW_MEAN_METRICS = (
    "label_agreement",
    "mean_cosine",
    "entity_f1",
    "exact_match",
    "answer_f1",
    "top_k_overlap",
    "exact",
    "top1",
    "iou",
)
"""Metrics that are a mean over rows, 1 if all rows are correct. Those of an own model follow the
name of an output and a dot."""

ROWS_BEYOND_GATE = "rows_beyond_the_gate"
"""Share of rows with a larger difference from the reference than every row of the gate."""

MAX_UNSEEN_ROWS = -math.log(0.001)
"""Upper bound on n times the share of rows with a property that none of n gate rows had.

With a larger share p, n rows lack the property with a probability below 0.001, because (1 - p)^n is
at most exp(-pn).
"""

MIN_ALLOWED, MAX_ALLOWED = 1e-6, 0.5
DIFFERENCE_FACTOR = 2.0
"""Allowed difference of a row, as a multiple of the gate's largest difference.

Live answers may be truncated and rescaled (`dimensions`) and share a batch with other rows.
"""

DEFAULT_MAX_DIFFERENCE = 0.05
"""Maximum difference of equal answers if the pipeline has no limit."""


@dataclass(frozen=True)
class RowScore:
    """Error of one row."""

    row_error: float  # Error on the task's own scale
    difference: float  # Largest difference of any number, relative like `max_difference`
    losses: Mapping[str, float]  # Loss of each test, from 0 (correct) to 1


@dataclass(frozen=True)
class LossTests:
    """Tests of the rows of a pipeline."""

    allowed: Mapping[str, float]  # Maximum mean loss of a correct pipeline, by test
    # Largest difference that `ROWS_BEYOND_GATE` allows; None without that test.
    max_difference: float | None


@dataclass(frozen=True)
class MetricValue:
    """A metric of the rows of one monitoring run."""

    metric: str
    value: float
    # Lower bound of the 95 % confidence interval; None if the metric is not a mean.
    low: float | None
    high: float | None  # Upper bound of the interval; None if the metric is not a mean
    limit: float | None  # Limit of the gate; None without a limit
    built: float | None  # Value in the gate of the build


def choose_tests(rules: AnswerRules, expected: Sequence[Outputs], gate: GateResult) -> LossTests:
    """Choose the tests of a pipeline from the reference's answers and the gate's result."""
    unseen = min(MAX_UNSEEN_ROWS / max(gate.rows, 1), MAX_ALLOWED)
    values = rules.task.compare(expected, expected, [""] * len(expected)).values
    allowed = {}
    means = [name for name in rules.limits if name.rpartition(".")[2] in ROW_MEAN_METRICS]
    for name in sorted(means, key=lambda name: ROW_MEAN_METRICS.index(name.rpartition(".")[2])):
        limit = rules.limits[name]
        # Hooks may have removed the outputs that the metric needs.
        if values.get(name, 0.0) >= limit:
            allowed[name] = min(max(1 - limit, MIN_ALLOWED), MAX_ALLOWED) if limit < 1 else unseen
    if not allowed:
        allowed[ANSWER_AGREEMENT] = max(1 - MIN_ANSWER_AGREEMENT[rules.tolerance], unseen)
    if rules.hooked:
        return LossTests(allowed, None)
    rows = [value for value in gate.row_differences[gate.edge_case_rows :] if math.isfinite(value)]
    limit = rules.limits.get("max_difference", 0.0)
    if not rows and not limit:
        return LossTests(allowed, None)
    allowed[ROWS_BEYOND_GATE] = unseen
    return LossTests(allowed, DIFFERENCE_FACTOR * max([limit, *rows]))


def score_rows(
    rules: AnswerRules, tests: LossTests, actual: Sequence[Outputs], expected: Sequence[Outputs]
) -> list[RowScore]:
    """Return the score of each row; a row without the expected outputs has full loss."""
    scale = _compute_scales(expected)
    return [
        _score(rules, tests, without_padding(each), without_padding(right), scale)
        for each, right in zip(actual, expected, strict=True)
    ]


def full_loss(tests: LossTests) -> RowScore:
    """Return the score of a row that was wrongly answered or wrongly refused."""
    return RowScore(math.inf, math.inf, dict.fromkeys(tests.allowed, 1.0))


def _score(
    rules: AnswerRules,
    tests: LossTests,
    actual: Outputs,
    expected: Outputs,
    scale: Mapping[str, float],
) -> RowScore:
    if (not rules.hooked and shape_fault(actual, expected)) or not is_finite(
        actual, rules.json_outputs
    ):
        return full_loss(tests)
    comparison = rules.task.compare([actual], [expected], [""])
    difference = math.inf
    if not shape_fault(actual, expected):
        parts = differences(actual, expected, rules.json_outputs).items()
        difference = max([0.0, *(value / scale.get(name, 1.0) for name, value in parts)])
    losses = {}
    for name in tests.allowed:
        if name == ROWS_BEYOND_GATE and tests.max_difference is not None:
            losses[name] = float(not difference <= tests.max_difference)
        elif name == ANSWER_AGREEMENT:
            close = difference <= rules.limits.get("max_difference", DEFAULT_MAX_DIFFERENCE)
            losses[name] = float(not (close and same(actual, expected)))
        else:
            losses[name] = min(max(1 - comparison.values[name], 0.0), 1.0)
    return RowScore(float(comparison.badness[0]), difference, losses)


def _compute_scales(expected: Sequence[Outputs]) -> dict[str, float]:
    """Return each output's scale: the reference's largest absolute value, at least 1."""
    scales: dict[str, float] = {}
    for outputs in expected:
        for name, array in outputs.items():
            if np.issubdtype(array.dtype, np.floating) and array.size:
                scales[name] = max(scales.get(name, 1.0), float(np.abs(array).max()))
    return scales


def compute_metrics(
    rules: AnswerRules,
    gate: GateResult,
    scores: Sequence[RowScore],
    actual: Sequence[Outputs],
    expected: Sequence[Outputs],
    queries: Sequence[str],
) -> Iterator[MetricValue]:
    """Yield the task's metrics as in the gate, with intervals for means over rows."""
    for name, value in rules.task.compare(actual, expected, queries).values.items():
        low = high = None
        losses = [score.losses[name] for score in scores if name in score.losses]
        if losses:
            low, high = mean_interval(losses)
            low, high = 1 - high, 1 - low
        yield MetricValue(name, value, low, high, rules.limits.get(name), gate.value(name))
    if all(ROWS_BEYOND_GATE in score.losses for score in scores):
        losses = [score.losses[ROWS_BEYOND_GATE] for score in scores]
        yield MetricValue(
            ROWS_BEYOND_GATE, float(np.mean(losses)), *mean_interval(losses), None, 0.0
        )


def mean_interval(losses: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of losses from 0 to 1."""
    values, ones = np.array(losses, dtype=np.float64), np.ones(len(losses))
    zero = ratio(np.zeros(len(losses)), ones)
    low, high = difference_interval(zero, ratio(values, ones), len(values))
    return max(low, 0.0), min(high, 1.0)


def is_worse(metric: MetricValue) -> bool:
    """Return whether a metric misses its limit."""
    return metric.limit is not None and not is_met(metric.metric, metric.value, metric.limit)


BET_SIZES = 40
MIN_BET, MAX_BET = 0.05, 0.95
"""Smallest bet, and largest bet as a share of 1/allowed, the bet that can lose all wealth."""


@dataclass(frozen=True)
class SequentialEvidence:
    """Evidence that the mean loss is above its limit."""

    allowed: float  # Maximum mean loss of a correct pipeline, above 0 and below 1
    needed: float  # Natural logarithm of the wealth that raises an alarm
    # Natural logarithm of the wealth of each bet size; empty before the first loss.
    log_wealth: tuple[float, ...] = ()
    rows: int = 0  # Number of losses
    total: float = 0.0  # Sum of the losses
    highest: float = 0.0  # Highest natural logarithm of the mean wealth so far
    # Number of the row, from 1, that raised the alarm; None without an alarm.
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


@dataclass(frozen=True)
class MeanTest:
    """Sequential test of one mean loss over all monitoring runs of this build."""

    name: str  # A metric, or another test of this module
    allowed: float  # Maximum mean loss of a correct pipeline
    mean: float | None  # Mean loss of all rows; None before the first row
    rows: int  # Number of rows since the build
    evidence: float  # Highest evidence against a mean of at most `allowed`, as a power of ten
    needed: float  # Evidence that raises an alarm, as a power of ten
    alarm_row: int | None  # Number of the row, from 1, that raised the alarm; None without an alarm

    @property
    def alarmed(self) -> bool:
        return self.alarm_row is not None

    @property
    def rows_to_prove(self) -> int | None:
        """Number of rows with the present mean that prove the limit; None if none do.

        A mean loss of at most `allowed` is proven with 95 % confidence if a larger one makes a
        mean as low as this improbable. Source: Hoeffding, "Probability inequalities for sums of
        bounded random variables", J. Am. Stat. Assoc. 58, 1963, theorem 1.
        """
        mean, allowed = self.mean or 0.0, self.allowed
        if mean >= allowed:
            return None
        divergence = (1 - mean) * math.log((1 - mean) / (1 - allowed))
        if mean:
            divergence += mean * math.log(mean / allowed)
        return math.ceil(-math.log(1 - CONFIDENCE) / divergence)

    @property
    def is_proven(self) -> bool:
        """Whether the rows prove, with 95 % confidence, that the mean loss is within its limit."""
        return self.rows_to_prove is not None and self.rows >= self.rows_to_prove
