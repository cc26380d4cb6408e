"""Decode question answering: from start and end logits to an answer in the context.

The answer is the same as that of the question-answering pipeline of transformers 4 with its
defaults: one answer, aligned to words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .row_metadata import OUTSIDE, Metadata, RowMetadata
from .row_types import Arrays, Parameters

CANDIDATES = 12
"""Number of spans examined per window, as in transformers for one answer."""

_NEVER = np.float32(-10000)
"""Logit of tokens outside the context; its softmax is 0."""


class Span(NamedTuple):
    """An answer in a context, as character offsets and a score; empty for no answer."""

    start: int
    end: int
    score: float


class AnswerDecoder:
    """Decoder of ``start_logit`` and ``end_logit`` FP32 ``[m, T]``; each core row is a window.

    The row metadata have the offsets of each token's whole word (`rows_spans.word_offsets`), and
    OUTSIDE for tokens that are not in the context. The scores of a window's first token, which is
    never in the context, mean "no answer".
    """

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the best answer of every row, over all of its windows.

        Returns:
            ``answer`` BYTES, ``score`` FP32, ``start`` and ``end`` INT32, each ``[n, 1]``. An
            answer found several times has the offsets of the first and the sum of the scores,
            which can exceed 1.
        """
        allowed = _answerable(metadata, outputs["start_logit"].shape[1])
        start = _probabilities(outputs["start_logit"], allowed)
        end = _probabilities(outputs["end_logit"], allowed)
        null_score = start[:, 0] * end[:, 0]
        start[:, 0] = end[:, 0] = 0
        spans = _best_spans(start, end, parameters["max_answer_len"])
        rows: dict[int, list[int]] = {}
        for window, row_metadata in enumerate(metadata):
            rows.setdefault(row_metadata.row, []).append(window)
        texts, answers = [], []
        for _, windows in sorted(rows.items()):
            text = metadata[windows[0]].text
            answer = _choose([(metadata[window], spans[window]) for window in windows], text)
            if parameters["handle_impossible_answer"]:
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


def _answerable(metadata: Metadata, width: int) -> NDArray[np.bool_]:
    """Return a mask ``[m, width]`` of the tokens of the context and the first of each window."""
    allowed = np.zeros((len(metadata), width), dtype=bool)
    for window, row_metadata in enumerate(metadata):
        np.not_equal(row_metadata.kinds, OUTSIDE, out=allowed[window, : len(row_metadata.kinds)])
    allowed[:, 0] = True
    return allowed


def _probabilities(logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the softmax of each window over its `allowed` tokens; 0 for other tokens."""
    logits = np.where(allowed, logits, _NEVER)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _best_spans(
    start: NDArray[np.float32], end: NDArray[np.float32], longest: int
) -> list[list[tuple[int, int, float]]]:
    """Return first token, last token and score of each window's best spans, best first.

    The score is the product of both probabilities. Only spans from the `CANDIDATES` best start
    tokens are computed: the other start tokens cannot begin one of the best spans.
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
    # A stable sort puts the first span in the text first among equal scores.
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    first, last, scores = first[every, best // longest], last[every, best], scores[every, best]
    columns = zip(first.tolist(), last.tolist(), scores.tolist(), strict=True)
    return [[span for span in zip(*window, strict=True) if span[2] > 0] for window in columns]


def _sliding_max(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return the maximum of `width` values from each index of a row, if the row has them."""
    reach = 1
    while reach < width:
        step = min(reach, width - reach)
        values, reach = np.maximum(values[:, :-step], values[:, step:]), reach + step
    return values


def _top(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the indices of the `CANDIDATES` highest scores of each row, ascending."""
    if scores.shape[1] <= CANDIDATES:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.sort(np.argpartition(-scores, CANDIDATES - 1, axis=1)[:, :CANDIDATES], axis=1)


def _choose(
    windows: Sequence[tuple[RowMetadata, Sequence[tuple[int, int, float]]]], text: str
) -> Span:
    """Return the answer with the highest sum of scores, ignoring letter case; empty without any."""
    found: dict[str, Span] = {}
    for row_metadata, spans in windows:
        for first, last, score in spans:
            start, end = int(row_metadata.offsets[first, 0]), int(row_metadata.offsets[last, 1])
            key = text[start:end].lower()
            known = found.get(key)
            found[key] = (
                known._replace(score=known.score + score) if known else Span(start, end, score)
            )
    return max(found.values(), key=lambda answer: answer.score, default=Span(0, 0, 0.0))
