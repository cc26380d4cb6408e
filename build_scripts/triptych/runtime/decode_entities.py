"""Decode token classification: from classes of tokens to entities with character offsets.

The aggregations are those of the token-classification pipeline of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .request_errors import RequestError
from .row_metadata import OUTSIDE, WORD_START, Metadata
from .row_types import Arrays, Parameters

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_SCORE_DECIMALS = 7
_BY_WORD = ("first", "max", "average")


class Pieces(NamedTuple):
    """Tokens, words or entities of all rows, concatenated; each field has one entry per piece."""

    row: NDArray[np.intp]
    start: NDArray[np.int32]  # first character
    end: NDArray[np.int32]  # index after the last character
    label: NDArray[np.intp]  # index of the class
    score: NDArray[np.float32]


class EntityDecoder:
    """Decoder of ``token_class`` and ``token_score`` ``[n, T]``, or ``token_scores`` ``[n, T, C]``.

    The output ``entities`` BYTES ``[n, 1]`` is a JSON list for each row, in the order of the text:
    ``{"entity", "text", "start", "end", "score"}``. ``entity`` is the label, without ``B-`` and
    ``I-`` if tokens are aggregated. ``start`` and ``end`` count characters. A score that is not a
    number is null. The label ``O`` is omitted.
    """

    def __init__(self, settings: Parameters, folder: Path) -> None:
        labels: list[str] = settings["labels"]
        self._names = labels
        # transformers gives a label such as PER-SUB the tag PER-SUB, but the group name SUB.
        self._groups = [label.split("-", 1)[-1] for label in labels]
        tags = [label[2:] if label[:2] in ("B-", "I-") else label for label in labels]
        self._tag = np.unique(np.array(tags), return_inverse=True)[1]
        self._begins = np.array([label.startswith("B-") for label in labels])

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the entities of every row.

        Raises:
            RequestError: The aggregation needs scores that the core does not return.
        """
        aggregation: str = parameters["aggregation_strategy"]
        if aggregation == "average" and "token_scores" not in outputs:
            raise RequestError(
                "parameter aggregation_strategy",
                "cannot be `average`, because the core does not return the scores of all labels",
                aggregation,
                "Choose another, or set `parameters: {aggregation_strategy: average}` in "
                "pipeline.yaml and build it again",
            )
        kinds = _stack_kinds(metadata)
        row, column = np.nonzero(kinds != OUTSIDE)
        if not len(row):
            return _encode([[]] * len(metadata))
        start, end = np.concatenate([c.offsets[c.kinds != OUTSIDE] for c in metadata]).T
        if "token_scores" in outputs:
            scores = outputs["token_scores"][row, column]
            label, score = _best(scores)
        else:
            label, score = outputs["token_class"][row, column], outputs["token_score"][row, column]
        pieces = Pieces(row, start, end, label, score)
        if aggregation in _BY_WORD:
            first = _starts(row, kinds[row, column] == WORD_START)
            if aggregation == "average":
                pieces = _join(pieces, first, *_best(_mean(scores, first)))
            else:
                chosen = first if aggregation == "first" else _surest(score, first)
                pieces = _join(pieces, first, label[chosen], score[chosen])
        if aggregation == "none":
            return _write(pieces, self._names, metadata)
        return _write(self._group(pieces), self._groups, metadata)

    def _group(self, pieces: Pieces) -> Pieces:
        """Join adjacent pieces with the same tag; a ``B-`` label always begins an entity."""
        tag = self._tag[pieces.label]
        changes = self._begins[pieces.label]
        changes[1:] |= tag[1:] != tag[:-1]
        first = _starts(pieces.row, changes)
        return _join(pieces, first, pieces.label[first], _mean(pieces.score, first))


def _stack_kinds(metadata: Metadata) -> NDArray[np.uint8]:
    """Return the kinds of all rows, ``[n, longest row]``, padded with OUTSIDE."""
    if len(metadata) == 1:
        return metadata[0].kinds[None]
    lengths = np.array([len(row_metadata.kinds) for row_metadata in metadata])
    kinds = np.full((len(metadata), lengths.max(initial=0)), OUTSIDE, dtype=np.uint8)
    if len(metadata):
        used = np.arange(kinds.shape[1]) < lengths[:, None]
        kinds[used] = np.concatenate([row_metadata.kinds for row_metadata in metadata])
    return kinds


def _starts(row: NDArray[np.intp], begins: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the indices of first pieces: those in `begins` and the first of each row."""
    first = begins.copy()
    first[0] = True
    first[1:] |= row[1:] != row[:-1]
    return first.nonzero()[0]


def _lengths(first: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Return the number of pieces from each index in `first` to the next, or to `count`."""
    lengths = np.empty_like(first)
    lengths[:-1] = first[1:] - first[:-1]
    lengths[-1] = count - first[-1]
    return lengths


def _join(
    pieces: Pieces, first: NDArray[np.intp], label: NDArray[np.intp], score: NDArray[np.float32]
) -> Pieces:
    """Join the pieces from each index in `first` to the next, with the given labels and scores."""
    last = first + _lengths(first, len(pieces.row)) - 1
    return Pieces(pieces.row[first], pieces.start[first], pieces.end[last], label, score)


def _best(scores: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    label = scores.argmax(axis=1)
    return label, scores[np.arange(len(scores)), label]


def _mean(scores: NDArray[np.float32], first: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the mean over the pieces from each index in `first` to the next, without NaN."""
    known = ~np.isnan(scores)
    if known.all():
        length = _lengths(first, len(scores)).astype(np.float32)
        sums: NDArray[np.float32] = np.add.reduceat(scores, first, axis=0)
        return sums / length.reshape(-1, *[1] * (scores.ndim - 1))
    count = np.add.reduceat(known, first, axis=0, dtype=np.int32)
    total = np.add.reduceat(np.where(known, scores, np.float32(0)), first, axis=0)
    mean = np.full(total.shape, np.nan, dtype=np.float32)
    return np.divide(total, count.astype(np.float32), out=mean, where=count > 0)


def _surest(score: NDArray[np.float32], first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the first index of the highest score from each index in `first` to the next."""
    order = np.arange(len(score))
    highest = np.fmax.reduceat(score, first)
    length = _lengths(first, len(score))
    # NaN equals no score, so pieces without a number get their first index.
    found = np.minimum.reduceat(
        np.where(score == np.repeat(highest, length), order, len(score)), first
    )
    return np.where(found < len(score), found, first)


def _write(pieces: Pieces, names: Sequence[str], metadata: Metadata) -> Arrays:
    found: list[list[dict[str, object]]] = [[] for _ in metadata]
    kept = np.array([name != "O" for name in names])[pieces.label]
    scores = np.round(pieces.score[kept].astype(np.float64), _SCORE_DECIMALS).tolist()
    columns = (column[kept].tolist() for column in pieces[:4])
    for row, start, end, label, score in zip(*columns, scores, strict=True):
        found[row].append(
            {
                "entity": names[label],
                "text": metadata[row].text[start:end],
                "start": start,
                "end": end,
                "score": None if math.isnan(score) else score,
            }
        )
    return _encode(found)


def _encode(found: Sequence[Sequence[Mapping[str, object]]]) -> Arrays:
    entities = np.empty((len(found), 1), dtype=object)
    entities[:, 0] = [_ENCODER.encode(row).encode("utf-8") if row else b"[]" for row in found]
    return {"entities": entities}
