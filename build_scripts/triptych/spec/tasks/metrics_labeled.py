"""Labeled rows: the task's own metric, candidate against reference, with chance set aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from triptych.spec.tasks.compare import (
    Floats,
    Outputs,
    Statistic,
    numbers,
    rank_correlation,
    read_answer,
    read_choices,
    read_entities,
    span_counts,
    word_f1,
)
from triptych.spec.tasks.metrics_bootstrap import (
    LOSSES_TO_SHOW,
    difference_interval,
    ratio,
    value_of,
)
from triptych.spec.tasks.metrics_labels import (
    ANSWERS,
    ENTITIES,
    LABEL,
    RELEVANCE,
    SIMILARITY,
    TOKEN,
    LabeledRow,
    Truth,
    telling_queries,
)
from triptych.spec.tasks.metrics_vectors import similarity


@dataclass(frozen=True)
class LabeledResult:
    """The metric on labeled rows.

    Attributes:
        metric: its name.
        rows: labeled rows.
        reference: the reference's value.
        candidate: the candidate's.
        difference: candidate minus reference.
        low: lower end of the difference's 95 % confidence interval (paired bootstrap).
        high: its upper end.
        max_drop: what the candidate may lose.
        smallest_visible_drop: a smaller loss would pass as chance with these rows; above 1, none
            can be seen.
        failure: why the candidate is not good enough, in words; empty where it is.
    """

    metric: str
    rows: int
    reference: float
    candidate: float
    difference: float
    low: float
    high: float
    max_drop: float
    smallest_visible_drop: float
    failure: str


Measure = Callable[[Sequence[LabeledRow], Sequence[Outputs]], tuple[Statistic, int]]
"""The figure of rows and their outputs, and of how many units it is."""


class LabeledMetric(NamedTuple):
    """What a task measures on labeled rows.

    Attributes:
        name: of the metric.
        measure: computes it.
        truth: what the rows say is right.
    """

    name: str
    measure: Measure
    truth: Truth


def compare_labeled(
    metric: LabeledMetric,
    rows: Sequence[LabeledRow],
    got: Sequence[Outputs],
    reference: Sequence[Outputs],
    *,
    max_drop: float,
) -> LabeledResult:
    """Whether the candidate is worse than the reference on labeled rows, beyond chance.

    It fails where the whole 95 % interval of candidate minus reference lies below `-max_drop`, so
    noise is not called a loss; and where nothing could be lost: the reference is right
    nowhere, or no row tells.

    Args:
        metric: of the task.
        rows: labeled.
        got: the candidate's decoded outputs, one for each of the rows' `requests`, in order.
        reference: the reference's.
        max_drop: of the metric, at least 0.

    Raises:
        ValueError: not one output a request.
    """
    requests = sum(len(row.requests) for row in rows)
    if not len(got) == len(reference) == requests:
        raise ValueError(f"{requests} requests, {len(got)} and {len(reference)} outputs")
    name = metric.name
    figure, units = metric.measure(rows, got) if rows else (None, 0)
    if figure is None or not units:
        nothing = f"no labeled row can show the {name}"
        return LabeledResult(name, len(rows), 0, 0, 0, 0, 0, max_drop, max_drop + 1, nothing)
    figure_of_reference, _ = metric.measure(rows, reference)
    candidate, wanted = value_of(figure, units), value_of(figure_of_reference, units)
    low, high = difference_interval(figure_of_reference, figure, units)
    difference = candidate - wanted
    result = LabeledResult(
        metric=name,
        rows=len(rows),
        reference=wanted,
        candidate=candidate,
        difference=difference,
        low=low,
        high=high,
        max_drop=max_drop,
        smallest_visible_drop=max_drop + max(high - difference, LOSSES_TO_SHOW / units),
        failure="",
    )
    return replace(result, failure=_failure(result))


def _failure(result: LabeledResult) -> str:
    if result.reference <= 0:
        return (
            f"the reference's {result.metric} is {result.reference:.4f} on {result.rows} labeled"
            " rows, so no loss could be seen: do the labels match the model's?"
        )
    if result.high < -result.max_drop:
        return (
            f"{result.metric} on {result.rows} labeled rows is {result.candidate:.4f}, and"
            f" {result.reference:.4f} with the reference: a drop of {-result.difference:.4f}"
            f" (95 % interval {-result.high:.4f} to {-result.low:.4f}), above the"
            f" {result.max_drop:g} allowed"
        )
    return ""


def _mean(values: Sequence[float]) -> tuple[Statistic, int]:
    return ratio(np.array(values, dtype=np.float64), np.ones(len(values))), len(values)


def _accuracy(name: str) -> Measure:
    """Share of rows whose first label, or token, is the truth; blanks around it aside."""

    def measure(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
        firsts = [read_choices(output, name).first.strip() for output in outputs]
        return _mean([first == row.truth for first, row in zip(firsts, rows, strict=True)])

    return measure


def _entity_f1(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
    counts = [
        span_counts(read_entities(output), row.truth)
        for output, row in zip(outputs, rows, strict=True)
    ]
    shared, every = np.array(counts, dtype=np.float64).T
    return ratio(2 * shared, every), len(rows)


def _answer_f1(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
    """Mean F1 of words with the nearest of the right answers."""
    values = []
    for output, row in zip(outputs, rows, strict=True):
        answer = read_answer(output)
        best = max(word_f1(answer.text, right) for right in row.truth)
        values.append(best if answer.usable else 0.0)
    return _mean(values)


def _reciprocal_rank(
    rows: Sequence[LabeledRow], outputs: Sequence[Outputs]
) -> tuple[Statistic, int]:
    """Mean over the queries of one over the place of the first relevant passage.

    Passages with the same score share their mean place; a score that is not finite is the last.
    Queries without a relevant or without another passage tell nothing and are left out.
    """
    scores = np.array([_score(output) for output in outputs])
    relevant = np.array([row.truth for row in rows])
    values = []
    for places in telling_queries(rows):
        good, bad = scores[places][relevant[places]], scores[places][~relevant[places]]
        before, level = (bad > good.max()).sum(), (bad == good.max()).sum()
        values.append(float(1 / (1 + before + level / 2)))
    return _mean(values)


def _score(outputs: Outputs) -> float:
    scores = numbers(outputs, "score")
    return float(scores[0]) if len(scores) == 1 and np.isfinite(scores[0]) else -np.inf


def _similarity(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
    """Spearman of the cosine of each two texts with the truth."""
    cosines = similarity(outputs[::2], outputs[1::2])
    truth: Floats = np.array([row.truth for row in rows], dtype=np.float64)
    return rank_correlation(cosines, truth), len(rows)


LABEL_ACCURACY = LabeledMetric("accuracy", _accuracy("label"), LABEL)
TOKEN_ACCURACY = LabeledMetric("accuracy", _accuracy("token"), TOKEN)
ENTITY_F1 = LabeledMetric("entity_f1", _entity_f1, ENTITIES)
ANSWER_F1 = LabeledMetric("answer_f1", _answer_f1, ANSWERS)
RECIPROCAL_RANK = LabeledMetric("mean_reciprocal_rank", _reciprocal_rank, RELEVANCE)
SIMILARITY_CORRELATION = LabeledMetric("similarity_correlation", _similarity, SIMILARITY)
