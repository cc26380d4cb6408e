"""Entities and answers in a text: a candidate's against the reference's, or against the truth."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from triptych.spec.tasks.metrics_outputs import Comparison, Outputs, finite, numbers, texts

Span = tuple[str, int, int]
"""An entity's label, its first character and the one after its last."""


class Entities(NamedTuple):
    """What was found in one text.

    Attributes:
        spans: how often each was found.
        scores: of each.
        broken: outputs that are no entities: they count as spans that nobody wanted.
    """

    spans: Counter[Span]
    scores: dict[Span, float]
    broken: int


class ReadAnswer(NamedTuple):
    """One request's answer; `usable` is false where its score is not finite."""

    text: str
    place: tuple[float, ...]
    score: float
    usable: bool


def read_entities(outputs: Outputs) -> Entities:
    """The JSON list under ``entities``; a span without a score is broken, as is other text."""
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
    """Spans that both have, and spans of both together: F1 is twice the first over the second."""
    return (got.spans & wanted).total(), got.spans.total() + got.broken + wanted.total()


def compare_entities(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """``entity_f1`` over all texts; badness counts the spans missed or made up."""
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
    """The answer of one request, unusable where parts are missing or not finite."""
    text, score = texts(outputs, "answer"), numbers(outputs, "score")
    place = (*numbers(outputs, "start"), *numbers(outputs, "end"))
    if not text or not len(score) or not finite(score):
        return ReadAnswer("", place, np.inf, usable=False)
    return ReadAnswer(text[0], place, float(score[0]), usable=True)


def compare_answers(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """The metrics of question-answering; badness adds what both and the score lack."""
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
    """F1 of the words of two answers, as SQuAD counts them: no case, punctuation or articles.

    Texts without a word are equal where both have none; two that are the same are always equal.
    """
    some, others = _words(got), _words(wanted)
    if got == wanted or not (some or others):
        return 1.0
    return 2 * (some & others).total() / (some.total() + others.total())


def _words(text: str) -> Counter[str]:
    words = re.findall(r"\w+", text.lower())
    return Counter(word for word in words if word not in ("a", "an", "the"))
