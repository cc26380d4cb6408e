"""Comparison of a candidate's decoded outputs with the reference's, for each kind of output.

Labels or tokens with scores, ranked passages, entities, answers, and outputs of unknown meaning.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.arrays import Array
from triptych.tasks.metric import Metric

Outputs = Mapping[str, Array]
"""Outputs of the ensemble for one request by name, each ``[1, ...]``."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a candidate with the reference."""

    # Values by name of the metric; never NaN. A metric that these requests cannot show (neighbors
    # of a single text) is absent.
    values: Mapping[str, float]
    # Error of each request: 0 if equal, infinite if an output is missing or not finite. Comparable
    # within one task.
    badness: Sequence[float]


Compare = Callable[[Sequence[Outputs], Sequence[Outputs], Sequence[str]], Comparison]
"""Function that compares a candidate's outputs with the reference's for one or more requests. The
last argument is the input ``text`` of each request, by which passages are grouped.

Values that are not finite never pass: such a request disagrees, its difference is infinite, and a
correlation over it is -1. Scores within `TIE` of the reference's best are equally good.
"""


def texts(outputs: Outputs, name: str) -> list[str]:
    """Return the elements of a BYTES output; empty if it is missing."""
    values = outputs[name].ravel().tolist() if name in outputs else []
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]


def numbers(outputs: Outputs, name: str) -> NDArray[np.float64]:
    """Return the elements of a numeric output, flat; empty if it is missing."""
    values = outputs[name] if name in outputs else np.empty(0)
    return np.asarray(values, dtype=np.float64).ravel()


def finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())


Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Function from how often each unit is drawn, ``[samples, units]``, to a figure, ``[samples]``."""

TIE = 1e-5
"""Maximum difference of scores that counts as equal up to rounding."""


def spearman(got: Floats, wanted: Floats) -> float | None:
    """Return the rank correlation of a candidate's values with the reference's.

    A value within a tie of the reference's counts as equal, so that ties do not become an order by
    chance.

    Args:
        got: Values of the candidate, ``[n]``.
        wanted: Values of the reference, ``[n]``.

    Returns:
        1.0 if all agree, 0.0 if the candidate's values are constant, -1.0 if a value is not
        finite. None if there is no order: fewer than two values, or a constant reference that
        differs.
    """
    if len(wanted) < 2:
        return None
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return -1.0
    got = np.where(np.abs(got - wanted) <= tie_of(wanted), wanted, got)
    if np.array_equal(got, wanted):
        return 1.0
    if np.ptp(wanted) == 0:
        return None
    return float(rank_correlation(got, wanted)(np.ones((1, len(wanted))))[0])


def tie_of(wanted: Floats) -> float:
    """Return the maximum difference that counts as a tie among scores of this magnitude."""
    return TIE * max(1.0, float(np.abs(wanted).max(initial=0.0)))


def rank_correlation(some: Floats, others: Floats) -> Statistic:
    """Return Spearman's correlation of two values per unit; 0.0 if either is constant.

    Equal values share their mean rank.
    """
    ranks_of_some, ranks_of_others = _ranking(some), _ranking(others)

    def correlation(taken: Floats) -> Floats:
        middle = (taken.sum(axis=1, keepdims=True) + 1) / 2
        x, y = ranks_of_some(taken) - middle, ranks_of_others(taken) - middle
        both = (taken * x * y).sum(axis=1)
        spread = np.sqrt((taken * x * x).sum(axis=1) * (taken * y * y).sum(axis=1))
        quotient: Floats = np.divide(both, spread, out=np.zeros_like(both), where=spread > 0)
        return quotient

    return correlation


def _ranking(values: Floats) -> Callable[[Floats], Floats]:
    """Return a function from how often each unit is drawn to its mean rank, same shape."""
    order = np.argsort(values, kind="stable")
    begins = np.append(True, np.diff(values[order]) != 0)
    level = np.empty(len(values), dtype=np.intp)
    level[order] = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)

    def ranks(taken: Floats) -> Floats:
        sizes = np.add.reduceat(taken[:, order], first, axis=1)
        mean_ranks: Floats = (np.cumsum(sizes, axis=1) - (sizes - 1) / 2)[:, level]
        return mean_ranks

    return ranks


Name = tuple[str, int]
"""Label, and its index among labels that are written the same."""

LABEL_AGREEMENT = Metric(
    "label_agreement",
    "higher",
    "same first label",
    limits=(1.0, 0.99, 0.98),
    probe=(0.98, 0.95),
)
LABEL_METRICS = (
    LABEL_AGREEMENT,
    Metric(
        "max_probability_difference",
        "lower",
        "largest difference of a label's score",
        limits=(1e-05, 0.05, 0.15),
        probe=(0.1, 0.4),
        is_rounded=True,
    ),
    Metric(
        "confidence_shift",
        "lower",
        "difference of the mean score of the first label",
        limits=(1e-05, 0.005, 0.02),
        probe=(0.005, 0.03),
        is_rounded=True,
    ),
)


class Choices(NamedTuple):
    """List of labels of one request."""

    first: str  # Best label; empty if there is none
    scores: dict[Name, float]  # Score of each label, best first; empty if they are not finite

    @property
    def best(self) -> float:
        return max(self.scores.values(), default=-np.inf)

    @property
    def last(self) -> float:
        """Lowest score; labels that are left out have at most this score."""
        return min(self.scores.values(), default=-np.inf)


def read_choices(outputs: Outputs, name: str) -> Choices:
    """Return the list under `name` (``label`` or ``token``); empty if it cannot be used."""
    labels, scores = texts(outputs, name), numbers(outputs, "score")
    if not labels or len(labels) != len(scores) or not finite(scores):
        return Choices("", {})
    seen: Counter[str] = Counter()
    named = {}
    for label, score in zip(labels, scores.tolist(), strict=True):
        named[label, seen[label]] = score
        seen[label] += 1
    return Choices(labels[0], named)


def compare_labels(
    got: Sequence[Outputs],
    wanted: Sequence[Outputs],
    queries: Sequence[str],
    *,
    threshold: float | None = None,
) -> Comparison:
    """Return `LABEL_METRICS`; badness is the difference of a score, plus 1 for another first label.

    Scores of a regression may be large: differences are relative to the reference's largest score
    if that is above 1. With a `threshold`, above which labels are returned, their sets must agree.
    A label of one list alone then has the threshold as its score in the other one.
    """
    pairs = _read(got, wanted, "label")
    if threshold is not None:
        pairs = [(_filled(g, w, threshold), _filled(w, g, threshold)) for g, w in pairs]
    scale = max([1.0, *(abs(score) for _, w in pairs for score in w.scores.values())])
    agrees = [_same_labels(g, w, threshold) for g, w in pairs]
    differences = [_difference(g, w) / scale for g, w in pairs]
    # An empty list has -inf: the shift is then infinite, too.
    shifts = [float(g.best - w.best) if g.scores and w.scores else np.inf for g, w in pairs]
    values = {
        "label_agreement": float(np.mean(agrees)),
        "max_probability_difference": max(differences),
        "confidence_shift": abs(float(np.mean(shifts))) / scale,
    }
    badness = [d + (not same) for d, same in zip(differences, agrees, strict=True)]
    return Comparison(values, badness)


def compare_tokens(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of fill-mask; badness includes the fraction of missing tokens."""
    pairs = _read(got, wanted, "token")
    agrees = [_same_first(g, w) for g, w in pairs]
    overlaps = [_overlap(g, w) for g, w in pairs]
    values = {"top_k_overlap": float(np.mean(overlaps)), "label_agreement": float(np.mean(agrees))}
    badness = [
        _difference(g, w) + (not same) + (1 - overlap)
        for (g, w), same, overlap in zip(pairs, agrees, overlaps, strict=True)
    ]
    return Comparison(values, badness)


def _read(
    got: Sequence[Outputs], wanted: Sequence[Outputs], name: str
) -> list[tuple[Choices, Choices]]:
    pairs = zip(got, wanted, strict=True)
    return [(read_choices(g, name), read_choices(w, name)) for g, w in pairs]


def _filled(some: Choices, others: Choices, threshold: float) -> Choices:
    """Return choices with the labels of others, too, and none for an empty label."""
    if not some.scores:
        return some
    scores = {name: score if name[0] else threshold for name, score in some.scores.items()}
    return some._replace(scores=dict.fromkeys(others.scores, threshold) | scores)


def _same_labels(got: Choices, wanted: Choices, threshold: float | None) -> bool:
    """Return whether the same labels are above a threshold, up to ties; without it, the first."""
    if threshold is None:
        return _same_first(got, wanted)
    pairs = [(got.scores.get(name, np.nan), score) for name, score in wanted.scores.items()]
    same = [(a > threshold) == (b > threshold) or abs(a - b) <= TIE for a, b in pairs]
    return bool(got.scores and wanted.scores) and all(same)


def _same_first(got: Choices, wanted: Choices) -> bool:
    """Return whether the reference's score of the candidate's first label is its best."""
    return bool(got.scores) and wanted.scores.get((got.first, 0), -np.inf) >= wanted.best - TIE


def _difference(got: Choices, wanted: Choices) -> float:
    """Return the largest difference of a label's score, with bounds for labels in one list only."""
    if not got.scores or not wanted.scores:
        return np.inf
    differences = [0.0]
    for name in got.scores.keys() | wanted.scores.keys():
        here, there = got.scores.get(name), wanted.scores.get(name)
        if here is not None and there is not None:
            differences.append(abs(here - there))
        elif here is not None:
            differences.append(here - wanted.last)
        elif there is not None:
            differences.append(there - got.last)
    return max(differences)


def _overlap(got: Choices, wanted: Choices) -> float:
    """Return the fraction of the reference's tokens that the candidate has, up to ties."""
    if not got.scores or not wanted.scores:
        return 0.0
    end = wanted.last + TIE
    missing = wanted.scores.keys() - got.scores.keys()
    at_the_end = sum(wanted.scores[name] <= end for name in missing)
    tied = sum(
        abs(got.scores[name] - wanted.last) <= TIE for name in got.scores - wanted.scores.keys()
    )
    return 1 - (len(missing) - min(at_the_end, tied)) / len(wanted.scores)


def compare_scores(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of reranking; badness is the difference of the scores."""
    some, others = (np.array([_score(row) for row in rows]) for rows in (got, wanted))
    values = {}
    correlation = spearman(some, others)
    if correlation is not None:
        values["rank_correlation"] = correlation
    agreements = [
        _first_agrees(some[places], others[places]) for places in group(queries) if len(places) > 1
    ]
    if agreements:
        values["top1_agreement"] = float(np.mean(agreements))
    usable = np.isfinite(some) & np.isfinite(others)
    moved = np.abs(np.where(usable, some, np.inf) - np.where(usable, others, 0))
    return Comparison(values, moved.tolist())


def group(queries: Sequence[str]) -> list[list[int]]:
    """Return row indexes of each query, in the order of first occurrence."""
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    return list(places.values())


def _score(outputs: Outputs) -> float:
    scores = numbers(outputs, "score")
    return float(scores[0]) if len(scores) == 1 else np.nan


def _first_agrees(got: Floats, wanted: Floats) -> float:
    """Return the fraction of the candidate's first passages that the reference puts first too."""
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return 0.0
    first = got == got.max()
    return float((wanted[first] >= wanted.max() - tie_of(wanted)).mean())


def compare_anything(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return no metrics, for outputs of unknown meaning; badness is the largest difference."""
    return Comparison({}, [_unlikeness(*pair) for pair in zip(got, wanted, strict=True)])


def _unlikeness(got: Outputs, wanted: Outputs) -> float:
    if got.keys() != wanted.keys():
        return np.inf
    worst = 0.0
    for name, other in wanted.items():
        mine = got[name]
        if mine.shape != other.shape:
            return np.inf
        if other.dtype == object:
            differences = (mine != other).astype(np.float64)
        else:
            with np.errstate(invalid="ignore"):  # infinity from infinity
                differences = np.abs(np.subtract(mine, other, dtype=np.float64))
            differences[mine == other] = 0
            differences[~np.isfinite(differences)] = np.inf
        worst = max(worst, float(differences.max(initial=0.0)))
    return worst


Span = tuple[str, int, int]
"""Label of an entity, its first character and the one after its last."""


class Entities(NamedTuple):
    """Entities found in one text."""

    spans: Counter[Span]  # Number of occurrences of each span
    scores: dict[Span, float]  # Score of each span
    broken: int  # Number of malformed entities; they count as wrong spans


class ReadAnswer(NamedTuple):
    """Answer of one request; not `usable` if its score is not finite."""

    text: str
    place: tuple[float, ...]
    score: float
    usable: bool


def read_entities(outputs: Outputs) -> Entities:
    """Return the JSON list under ``entities``; spans without a score are broken."""
    spans: Counter[Span] = Counter()
    scores: dict[Span, float] = {}
    broken = 0
    try:
        (text,) = texts(outputs, "entities")
        for entity in json.loads(text):
            span = (str(entity["entity"]), int(entity["start"]), int(entity["end"]))
            score = entity["score"]
            if score is None or not math.isfinite(score):
                broken += 1
                continue
            spans[span] += 1
            scores[span] = float(score)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        broken += 1
    return Entities(spans, scores, broken)


def span_counts(got: Entities, wanted: Counter[Span]) -> tuple[int, int]:
    """Return the number of common spans and of all spans; F1 is twice the first over the second."""
    return (got.spans & wanted).total(), got.spans.total() + got.broken + wanted.total()


def compare_entities(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return ``entity_f1`` over all texts; badness counts missing and additional spans."""
    shared = every = 0
    badness = []
    for mine, reference in zip(map(read_entities, got), map(read_entities, wanted), strict=True):
        both, total = span_counts(mine, reference.spans)
        shared, every = shared + both, every + total
        moved = [
            abs(score - reference.scores[span])
            for span, score in mine.scores.items()
            if span in reference.scores
        ]
        badness.append(float(total - 2 * both) + max(moved, default=0.0))
    return Comparison({"entity_f1": 2 * shared / every if every else 1.0}, badness)


def read_answer(outputs: Outputs) -> ReadAnswer:
    """Return the answer of one request; unusable if parts are missing or not finite."""
    text, score = texts(outputs, "answer"), numbers(outputs, "score")
    place = (*numbers(outputs, "start"), *numbers(outputs, "end"))
    if not text or not len(score) or not finite(score):
        return ReadAnswer("", place, np.inf, usable=False)
    return ReadAnswer(text[0], place, float(score[0]), usable=True)


def compare_answers(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of question-answering; badness adds the loss of each and of the score."""
    matches, overlaps, badness = [], [], []
    for mine, reference in zip(map(read_answer, got), map(read_answer, wanted), strict=True):
        usable = mine.usable and reference.usable
        match = usable and mine[:2] == reference[:2]
        overlap = word_f1(mine.text, reference.text) if usable else 0.0
        matches.append(match)
        overlaps.append(overlap)
        moved = abs(mine.score - reference.score) if usable else np.inf
        badness.append((not match) + (1 - overlap) + moved)
    values = {"exact_match": float(np.mean(matches)), "answer_f1": float(np.mean(overlaps))}
    return Comparison(values, badness)


def word_f1(got: str, wanted: str) -> float:
    """Return F1 of the words of two answers as in SQuAD, without case, punctuation and articles.

    Equal texts, and two texts without words, have 1.0.
    """
    some, others = _words(got), _words(wanted)
    if got == wanted or not (some or others):
        return 1.0
    return 2 * (some & others).total() / (some.total() + others.total())


def _words(text: str) -> Counter[str]:
    words = re.findall(r"\w+", text.lower())
    return Counter(word for word in words if word not in ("a", "an", "the"))
