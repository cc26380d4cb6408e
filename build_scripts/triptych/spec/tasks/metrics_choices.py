"""Lists of labels (or tokens) with scores, best first: a candidate's against the reference's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from triptych.spec.tasks.metrics_outputs import Comparison, Outputs, finite, numbers, texts
from triptych.spec.tasks.metrics_ranks import TIE

Name = tuple[str, int]
"""A label, and which of those that are written the same."""

LABEL_METRICS = ("label_agreement", "max_probability_difference", "confidence_shift")


class Choices(NamedTuple):
    """One request's list.

    Attributes:
        first: the best label; empty where there is none.
        scores: of each label, best first; none at all where they are not finite.
    """

    first: str
    scores: dict[Name, float]

    @property
    def best(self) -> float:
        return max(self.scores.values(), default=-np.inf)

    @property
    def last(self) -> float:
        """The lowest score: no label that is left out has a higher one."""
        return min(self.scores.values(), default=-np.inf)


def read_choices(outputs: Outputs, name: str) -> Choices:
    """The list under `name` (``label`` or ``token``), empty where it cannot be used."""
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
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """`LABEL_METRICS`; badness is the difference of a score, plus 1 by a label.

    Scores that are no probabilities (of a regression) may be large: differences are relative to
    the reference's largest score where that is above 1.
    """
    pairs = _read(got, wanted, "label")
    scale = max([1.0, *(abs(score) for _, w in pairs for score in w.scores.values())])
    agrees = [_same_first(g, w) for g, w in pairs]
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
    """The metrics of fill-mask; badness adds the share of tokens that are missing."""
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


def _same_first(got: Choices, wanted: Choices) -> bool:
    """Whether the reference's score of the candidate's first label is as good as its best."""
    return bool(got.scores) and wanted.scores.get((got.first, 0), -np.inf) >= wanted.best - TIE


def _difference(got: Choices, wanted: Choices) -> float:
    """Largest difference of a label's score; of one in a single list, as far as that tells."""
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
    """Share of the reference's tokens that the candidate has, or one that ties with the last."""
    if not got.scores or not wanted.scores:
        return 0.0
    end = wanted.last + TIE
    missing = wanted.scores.keys() - got.scores.keys()
    at_the_end = sum(wanted.scores[name] <= end for name in missing)
    tied = sum(
        abs(got.scores[name] - wanted.last) <= TIE for name in got.scores - wanted.scores.keys()
    )
    return 1 - (len(missing) - min(at_the_end, tied)) / len(wanted.scores)
