"""Decodes question-answering: logits of starts and ends to the answer in the context.

The choice is that of the question-answering pipeline of transformers 4, with its defaults: one
answer, aligned to words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .row_types import OUTSIDE, Arrays, Metadata, Parameters, RowMetadata

CANDIDATES = 12
"""Spans of a window that are looked at: as many as transformers does for one answer."""

_NEVER = np.float32(-10000)
"""Logit of tokens that cannot be in an answer: no chance at all once it is a probability."""


class Span(NamedTuple):
    """An answer in a context; one without characters says that there is none."""

    start: int
    end: int
    score: float


class AnswerDecoder:
    """``start_logit`` and ``end_logit`` FP32 ``[m, T]``, a core row a window of a context.

    Metadata have the offsets of each token's whole word (`token_kinds.word_offsets`), and OUTSIDE
    for everything but the context. The first token of a window is never of the context: what the
    model gives it stands for "there is no answer".
    """

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, carries: Metadata, parameters: Parameters) -> Arrays:
        """The best answer of every row, over all of its windows.

        Returns:
            ``answer`` BYTES, ``score`` FP32, ``start`` and ``end`` INT32, each ``[n, 1]``. An
            answer found in several places, or windows, has the sum of their scores (so above 1
            at times), and its first place.
        """
        allowed = _answerable(carries, outputs["start_logit"].shape[1])
        start = _probabilities(outputs["start_logit"], allowed)
        end = _probabilities(outputs["end_logit"], allowed)
        null_score = start[:, 0] * end[:, 0]
        start[:, 0] = end[:, 0] = 0
        spans = _best_spans(start, end, parameters["max_answer_tokens"])
        rows: dict[int, list[int]] = {}
        for window, carry in enumerate(carries):
            rows.setdefault(carry.row, []).append(window)
        texts, answers = [], []
        for _, windows in sorted(rows.items()):
            text = carries[windows[0]].text
            answer = _choose([(carries[window], spans[window]) for window in windows], text)
            if parameters["impossible_answer"]:
                null = float(null_score[windows].min())
                answer = Span(0, 0, null) if null > answer.score else answer
            texts.append(text[answer.start : answer.end].encode("utf-8"))
            answers.append(answer)
        return {
            "answer": np.array(texts, dtype=object).reshape(-1, 1),
            "score": np.array([[answer.score] for answer in answers], dtype=np.float32),
            "start": np.array([[answer.start] for answer in answers], dtype=np.int32),
            "end": np.array([[answer.end] for answer in answers], dtype=np.int32),
        }


def _answerable(carries: Metadata, width: int) -> NDArray[np.bool_]:
    """``[m, width]``: the tokens of the context, and the first of each window."""
    allowed = np.zeros((len(carries), width), dtype=bool)
    for window, carry in enumerate(carries):
        np.not_equal(carry.kinds, OUTSIDE, out=allowed[window, : len(carry.kinds)])
    allowed[:, 0] = True
    return allowed


def _probabilities(logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Softmax of each window over its `allowed` tokens; 0 for the others."""
    logits = np.where(allowed, logits, _NEVER)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _best_spans(
    start: NDArray[np.float32], end: NDArray[np.float32], longest: int
) -> list[list[tuple[int, int, float]]]:
    """First token, last token and score of the best spans of every window, best first.

    The score is the product of both probabilities. The matrix of all spans is never made: the
    best ones begin at the tokens from which the best single span is best.
    """
    windows, width = start.shape
    longest = min(longest, width)
    ahead = np.zeros((windows, width + longest), dtype=np.float32)
    ahead[:, :width] = end
    single = start * _sliding_max(ahead, longest)[:, :width]
    every = np.arange(windows)[:, None]
    first = _top(single)
    last = (first[:, :, None] + np.arange(longest)).reshape(windows, -1)
    scores = np.repeat(start[every, first], longest, axis=1) * ahead[every, last]
    best = _top(scores)
    # Stable: of spans that score the same, the first in the text.
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    first, last, scores = first[every, best // longest], last[every, best], scores[every, best]
    columns = zip(first.tolist(), last.tolist(), scores.tolist(), strict=True)
    return [[span for span in zip(*window, strict=True) if span[2] > 0] for window in columns]


def _sliding_max(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """At each place of a row, the highest of `width` values from there on, where so many are."""
    reach = 1
    while reach < width:
        step = min(reach, width - reach)
        values, reach = np.maximum(values[:, :-step], values[:, step:]), reach + step
    return values


def _top(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Indices of the `CANDIDATES` highest of each row, in the order of the row."""
    if scores.shape[1] <= CANDIDATES:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.sort(np.argpartition(-scores, CANDIDATES - 1, axis=1)[:, :CANDIDATES], axis=1)


def _choose(
    windows: Sequence[tuple[RowMetadata, Sequence[tuple[int, int, float]]]], text: str
) -> Span:
    """The answer with the highest sum of scores, letter case aside; an empty one if none is."""
    found: dict[str, Span] = {}
    for carry, spans in windows:
        for first, last, score in spans:
            start, end = int(carry.offsets[first, 0]), int(carry.offsets[last, 1])
            key = text[start:end].lower()
            known = found.get(key)
            found[key] = (
                known._replace(score=known.score + score) if known else Span(start, end, score)
            )
    return max(found.values(), key=lambda answer: answer.score, default=Span(0, 0, 0.0))
