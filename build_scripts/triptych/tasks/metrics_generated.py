"""Measures of generated texts against right answers: exact match and ROUGE-L."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from triptych.tasks.compare import Outputs, Statistic, texts
from triptych.tasks.labeled import LabeledMetric, LabeledRow, Measure, Truth, mean_of

OUTPUT = "text_output"


def exact_match(got: str, wanted: str) -> float:
    """Return 1 if the words are equal, as in SQuAD: without case, punctuation and articles.

    Texts without words must be identical.
    """
    some, others = _words(got), _words(wanted)
    articles = {"a", "an", "the"}
    same = [w for w in some if w not in articles] == [w for w in others if w not in articles]
    return float(same if some or others else got.strip() == wanted.strip())


def rouge_l(got: str, wanted: str) -> float:
    """Return F1 of the longest common subsequence of words, without case (ROUGE-L, Lin 2004)."""
    some, others = _words(got), _words(wanted)
    if not some and not others:
        return 1.0
    return 2 * _common_subsequence(some, others) / (len(some) + len(others))


def _common_subsequence(some: Sequence[str], others: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(others) + 1)
    for word in some:
        diagonal = 0
        for place, other in enumerate(others, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == other else max(above, lengths[place - 1])
            diagonal = above
    return lengths[-1]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _best(score: Callable[[str, str], float]) -> Measure:
    """Return the measure that averages the score with the closest right answer over rows."""

    def measure(rows: Sequence[LabeledRow], outputs: Sequence[Outputs]) -> tuple[Statistic, int]:
        values = [
            max(score("".join(texts(output, OUTPUT)), right) for right in row.truth)
            for output, row in zip(outputs, rows, strict=True)
        ]
        return mean_of(values)

    return measure


def _read_answers(value: object, text: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError
    return tuple(value)


TEXTS = Truth("answers", '["…"]', "a list of right answers, one at least", _read_answers)
GENERATED: Mapping[str, LabeledMetric] = {
    "exact_match": LabeledMetric("exact_match", _best(exact_match), TEXTS),
    "rouge_l": LabeledMetric("rouge_l", _best(rouge_l), TEXTS),
}
