"""Labeled rows: their truth, the measure of a task on them, and a paired bootstrap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from triptych.tasks.compare import (
    Floats,
    Outputs,
    Span,
    Statistic,
    group,
    numbers,
    rank_correlation,
    read_answer,
    read_choices,
    read_entities,
    span_counts,
    word_f1,
)
from triptych.tasks.metrics_vectors import similarity

RESAMPLES = 2000
SEED = 20240601
LOSSES_TO_SHOW = 6
"""Number of units that must be lost, and none won, for an interval below zero: as in a sign test
at 5 %."""

_BLOCK = 1_000_000


def ratio(part: Floats, whole: Floats) -> Statistic:
    """Return the sum of `part` over the sum of `whole`, ``[units]`` each; 1.0 if both are empty."""

    def value(taken: Floats) -> Floats:
        parts, wholes = taken @ part, taken @ whole
        return np.divide(parts, wholes, out=np.ones_like(parts), where=wholes > 0)

    return value


def value_of(statistic: Statistic, units: int) -> float:
    return float(statistic(np.ones((1, units)))[0])


def difference_interval(
    reference: Statistic, candidate: Statistic, units: int
) -> tuple[float, float]:
    """Return the 95 % confidence interval of candidate minus reference (paired bootstrap).

    Both figures are computed on the same resamples. If only a few units differ, resampling alone
    treats four losses without a win as certain. Each resample therefore gets additional random
    wins and losses (one of each on average), as large as the largest effect of one unit: the
    resampling form of adding one win and one loss to a paired comparison.

    Args:
        reference: Figure of the reference.
        candidate: Figure of the candidate.
        units: Number of units, at least 1.
    """
    rng = np.random.default_rng(SEED)
    differences = np.concatenate(
        [candidate(taken) - reference(taken) for taken in _resamples(rng, units)]
    )
    wins, losses = rng.poisson(1.0, (2, RESAMPLES))
    differences += _largest_effect(reference, candidate, units) * (wins - losses)
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def _resamples(rng: np.random.Generator, units: int) -> Iterator[Floats]:
    """Yield how often each unit is drawn, ``[block, units]`` at a time, `RESAMPLES` in total."""
    block = max(1, _BLOCK // units)
    for start in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - start)
        drawn = rng.integers(units, size=(count, units)) + units * np.arange(count)[:, None]
        taken = np.bincount(drawn.ravel(), minlength=count * units)
        yield taken.reshape(count, units).astype(np.float64)


def _largest_effect(reference: Statistic, candidate: Statistic, units: int) -> float:
    """Return how far one unit changes the difference, by leaving out up to `RESAMPLES` units."""
    whole = value_of(candidate, units) - value_of(reference, units)
    effect = abs(whole) / units
    if units == 1:
        return effect
    left_out = np.unique(np.linspace(0, units - 1, min(units, RESAMPLES)).astype(np.intp))
    block = max(1, _BLOCK // units)
    largest = 0.0
    for start in range(0, len(left_out), block):
        places = left_out[start : start + block]
        taken = np.ones((len(places), units))
        taken[np.arange(len(places)), places] = 0
        moved = np.abs(candidate(taken) - reference(taken) - whole)
        largest = max(largest, float(moved.max()))
    return effect + largest


_LARGEST = 1e9


@dataclass(frozen=True)
class LabeledRow:
    """One line of ``eval.jsonl``."""

    line: int  # Line number, from 1
    # Inputs by name of each request of the row (the path of the file for an image): two if
    # `Truth.second` names a second text, else one.
    requests: tuple[dict[str, str], ...]
    parameters: dict[str, Any]  # Request parameters of this row
    truth: Any  # Ground truth as `Truth.read` returns it

    @property
    def query(self) -> str:
        return self.requests[0]["text"]


class Truth(NamedTuple):
    """Form of the ground truth in the rows of a task."""

    key: str  # Key in the JSON object
    example: str  # Example of the value as JSON
    rule: str  # Description of valid values
    # Returns `LabeledRow.truth` for a value and the row's text; raises ValueError.
    read: Callable[[Any, str], Any]
    second: str = ""  # Key of a second text that is a request of its own; empty for none
    by_query: bool = False  # Whether only all rows of a query together are meaningful
    # Returns why rows cannot show a difference, as a rule; empty if they can.
    fault: Callable[[Sequence[LabeledRow]], str] = lambda rows: ""


def telling_queries(rows: Sequence[LabeledRow]) -> Iterator[list[int]]:
    """Yield row indexes of each query that has both relevant and other passages."""
    for places in group([row.query for row in rows]):
        if len({rows[place].truth for place in places}) == 2:
            yield places


def _read_name(value: object, text: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _read_spans(value: object, text: str) -> Counter[Span]:
    if not isinstance(value, list):
        raise ValueError
    spans: Counter[Span] = Counter()
    for entity in value:
        if not isinstance(entity, dict) or not isinstance(entity.get("entity"), str):
            raise ValueError
        start, end = entity.get("start"), entity.get("end")
        if type(start) is not int or type(end) is not int:
            raise ValueError
        if not 0 <= start < end <= len(text):
            raise ValueError(f"positions within the text's {len(text)} characters")
        spans[entity["entity"], start, end] += 1
    return spans


def _read_answers(value: object, text: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(answer, str) for answer in value):
        raise ValueError
    return tuple(value) or ("",)


def _read_relevance(value: object, text: str) -> bool:
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _read_score(value: object, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError
    return float(value)


def _no_query(rows: Sequence[LabeledRow]) -> str:
    if any(telling_queries(rows)):
        return ""
    return "must have a query (`text`) with both a relevant and another passage"


def _no_entity(rows: Sequence[LabeledRow]) -> str:
    return "" if any(row.truth for row in rows) else "must have a row with an entity"


def _one_score(rows: Sequence[LabeledRow]) -> str:
    if len({row.truth for row in rows}) > 1:
        return ""
    return "must have pairs with different scores"


LABEL = Truth("label", '"…"', "a label", _read_name)
TOKEN = Truth("token", '"…"', "a token", _read_name)
ENTITIES = Truth(
    "entities",
    '[{"entity": "…", "start": 0, "end": 1}]',
    "a list of entities with start and end in characters",
    _read_spans,
    fault=_no_entity,
)
ANSWERS = Truth(
    "answers", '["…"]', "a list of right answers (an empty one where there is none)", _read_answers
)
RELEVANCE = Truth("relevant", "1", "1 or 0", _read_relevance, by_query=True, fault=_no_query)
SIMILARITY = Truth(
    "score",
    "0.8",
    f"a number from {-_LARGEST:g} to {_LARGEST:g}",
    _read_score,
    second="text_pair",
    fault=_one_score,
)


@dataclass(frozen=True)
class LabeledResult:
    """Measure on labeled rows."""

    metric: str  # Name of the measure
    rows: int  # Number of labeled rows
    reference: float  # Value of the reference
    candidate: float  # Value of the candidate
    difference: float  # Candidate minus reference
    low: float  # Lower end of the 95 % confidence interval of the difference (paired bootstrap)
    high: float  # Upper end of the interval
    max_drop: float  # Maximum allowed loss
    # Smallest loss that these rows can show; above 1 if they can show none.
    smallest_visible_drop: float
    failure: str  # Reason why the candidate fails; empty if it passes


Measure = Callable[[Sequence[LabeledRow], Sequence[Outputs]], tuple[Statistic, int]]
"""Function from rows and outputs to a figure and its number of units."""


class LabeledMetric(NamedTuple):
    """Measure of a task on labeled rows."""

    name: str
    measure: Measure  # Computes the figure
    truth: Truth  # Form of the ground truth


def compare_labeled(
    metric: LabeledMetric,
    rows: Sequence[LabeledRow],
    got: Sequence[Outputs],
    reference: Sequence[Outputs],
    *,
    max_drop: float,
) -> LabeledResult:
    """Compare a candidate with the reference on labeled rows.

    The candidate fails if the whole 95 % interval of candidate minus reference is below
    `-max_drop`, so that noise is not called a loss. It also fails if no loss could be seen: the
    reference is never right, or no row is meaningful.

    Args:
        metric: Measure of the task.
        rows: Labeled rows.
        got: Decoded outputs of the candidate for the rows' `requests`, in order.
        reference: Decoded outputs of the reference.
        max_drop: Maximum allowed loss, at least 0.

    Raises:
        ValueError: The number of outputs is not the number of requests.
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
            " rows, so no loss could be seen. Check that the labels match the model's"
        )
    if result.high < -result.max_drop:
        return (
            f"{result.metric} on {result.rows} labeled rows is {result.candidate:.4f}, and"
            f" {result.reference:.4f} with the reference: a drop of {-result.difference:.4f}"
            f" (95 % interval {-result.high:.4f} to {-result.low:.4f}), above the"
            f" {result.max_drop:g} allowed"
        )
    return ""


def mean_of(values: Sequence[float]) -> tuple[Statistic, int]:
    """Return the mean over units with a value each, and the number of units."""
    return ratio(np.array(values, dtype=np.float64), np.ones(len(values))), len(values)


def _accuracy(name: str) -> Measure:
    """Return the measure of rows whose first label, or token, is the truth, ignoring blanks."""

    def measure(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
        firsts = [read_choices(output, name).first.strip() for output in outputs]
        return mean_of([first == row.truth for first, row in zip(firsts, rows, strict=True)])

    return measure


def _entity_f1(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
    counts = [
        span_counts(read_entities(output), row.truth)
        for output, row in zip(outputs, rows, strict=True)
    ]
    shared, every = np.array(counts, dtype=np.float64).T
    return ratio(2 * shared, every), len(rows)


def _answer_f1(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
    """Return the mean F1 of words with the closest right answer."""
    values = []
    for output, row in zip(outputs, rows, strict=True):
        answer = read_answer(output)
        best = max(word_f1(answer.text, right) for right in row.truth)
        values.append(best if answer.usable else 0.0)
    return mean_of(values)


def _reciprocal_rank(
    rows: Sequence[LabeledRow], outputs: Sequence[Outputs]
) -> tuple[Statistic, int]:
    """Return the mean over queries of 1 / rank of the first relevant passage.

    Passages with equal scores share their mean rank; a score that is not finite ranks last.
    Queries without a relevant or without another passage are ignored.
    """
    scores = np.array([_score(output) for output in outputs])
    relevant = np.array([row.truth for row in rows])
    values = []
    for places in telling_queries(rows):
        good, bad = scores[places][relevant[places]], scores[places][~relevant[places]]
        before, level = (bad > good.max()).sum(), (bad == good.max()).sum()
        values.append(float(1 / (1 + before + level / 2)))
    return mean_of(values)


def _score(outputs: Outputs) -> float:
    scores = numbers(outputs, "score")
    return float(scores[0]) if len(scores) == 1 and np.isfinite(scores[0]) else -np.inf


def similarity_correlation(
    similarity: Callable[[Sequence[Outputs], Sequence[Outputs]], Floats],
) -> LabeledMetric:
    """Return the measure of the similarity of two texts: Spearman's correlation with the truth."""

    def correlation(
        rows: Sequence[LabeledRow], outputs: Sequence[Outputs]
    ) -> tuple[Statistic, int]:
        truth: Floats = np.array([row.truth for row in rows], dtype=np.float64)
        return rank_correlation(similarity(outputs[::2], outputs[1::2]), truth), len(rows)

    return LabeledMetric("similarity_correlation", correlation, SIMILARITY)


LABEL_ACCURACY = LabeledMetric("accuracy", _accuracy("label"), LABEL)
TOKEN_ACCURACY = LabeledMetric("accuracy", _accuracy("token"), TOKEN)
ENTITY_F1 = LabeledMetric("entity_f1", _entity_f1, ENTITIES)
ANSWER_F1 = LabeledMetric("answer_f1", _answer_f1, ANSWERS)
RECIPROCAL_RANK = LabeledMetric("mean_reciprocal_rank", _reciprocal_rank, RELEVANCE)
SIMILARITY_CORRELATION = similarity_correlation(similarity)


def describe_labeled(result: LabeledResult) -> str:
    """Return the result in one line."""
    return (
        f"{result.metric} on {result.rows} rows: {result.candidate:.4f}, the original's "
        f"{result.reference:.4f}; difference {result.difference:+.4f} "
        f"(95 % interval {result.low:+.4f} to {result.high:+.4f}), may drop by {result.max_drop:g}"
    )
