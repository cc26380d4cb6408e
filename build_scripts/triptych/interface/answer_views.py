"""Values of the demo page's views: answers in the form in which components show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.max_similarity import max_similarity
from triptych.interface.report.pages import render
from triptych.models.roles import ROLES
from triptych.runtime.row_metadata import OUTSIDE, unpack_metadata
from triptych.runtime.row_types import RowInputs, find_class
from triptych.runtime.rows_text import TokenRowMaker
from triptych.runtime.triton_io import read_settings

MAX_TERMS = 64
"""Maximum number of terms of a text that a page shows."""

MAX_MATCHED = 200
"""Maximum number of tokens of each text whose similarities a page shows."""

Row = Mapping[str, Any]
"""Inputs or outputs of a row by name, as plain data."""

Pieces = list[tuple[str, str | None]]
"""Parts of a text; a marked part has a label."""


class TokenNames:
    """Tokens of a pipeline's texts, by the files of its first step."""

    def __init__(self, folder: Path) -> None:
        """Read the step in the folder of its version; an `OSError` says that it is not there."""
        settings = read_settings(folder)
        self._maker: TokenRowMaker = find_class(settings["row_maker"])(settings, folder)

    def name(self, token_id: int) -> str:
        """Return a token, or its id if it has no name."""
        return self._maker.tokenizer.id_to_token(token_id) or str(token_id)

    def with_vectors(self, text: str, role: str) -> list[str]:
        """Return the tokens of a text that have a vector in this role."""
        (rows,) = self._maker.token_rows([RowInputs({"text": [text]}, {"role": role})])
        if isinstance(rows, Exception):
            return []
        is_kept = unpack_metadata(rows[0].metadata).kinds != OUTSIDE
        return [self.name(each) for each in np.array(rows[0].ids)[is_kept].tolist()]


def describe_similarity(answers: Sequence[Row]) -> Iterator[str]:
    """Yield a line with the cosine similarity, if each of two rows has one vector of floats."""
    vectors = [
        values
        for row in answers
        for values in row.values()
        if isinstance(values, list) and values and isinstance(values[0], float)
    ]
    if len(vectors) == len(answers) == 2:
        lengths = math.prod(math.hypot(*values) for values in vectors)
        cosine = float(np.dot(vectors[0], vectors[1])) / (lengths or math.nan)
        yield f"Cosine similarity of both vectors: {cosine:.4f}"


def mark_spans(text: str, spans: Iterable[Row]) -> Pieces:
    """Return `text` in pieces, with its spans marked.

    A span has the characters from `start` up to `end` (exclusive), their `text` and a `label`. If
    spans overlap, the first is marked. A span whose text differs is skipped, because a hook may
    have changed the text that the model read.
    """
    pieces: Pieces = []
    done = 0
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        start, end = span["start"], span["end"]
        if done <= start < end and text[start:end] == span["text"]:
            pieces += [(text[done:start], None), (text[start:end], span["label"])]
            done = end
    return [piece for piece in (*pieces, (text[done:], None)) if piece[0]]


def show_scores(given: Row, row: Row) -> dict[str, float]:
    """Return the score of each label."""
    labels = next((value for name, value in row.items() if name != "score"), ())
    scores = (score if math.isfinite(score) else 0.0 for score in row["score"])
    return dict(zip(labels, scores, strict=True))


def mark_entities(given: Row, row: Row) -> Pieces:
    """Return the text with its entities marked."""
    spans = [{**entity, "label": entity["entity"]} for entity in row["entities"]]
    return mark_spans(given["text"], spans)


def mark_answer(given: Row, row: Row) -> Pieces:
    """Return the second text with the answer marked."""
    return mark_spans(given["text_pair"], [{**row, "text": row["answer"], "label": "answer"}])


def list_terms(given: Row, row: Row) -> Pieces:
    """Return the terms of a text, each with its weight, the highest first."""
    terms = zip(row["token_id"], row["weight"], strict=True)
    return [(str(term), f"{weight:.2f}") for term, weight in islice(terms, MAX_TERMS)]


def place_boxes(given: Row, row: Row) -> tuple[str, list[tuple[tuple[int, ...], str]]]:
    """Return the file of an image, with the pixels and the label of each box."""
    lists = [value for value in row.values() if isinstance(value, list)]
    (boxes,) = (value for value in lists if all(isinstance(each, list) for each in value))
    (labels,) = (value for value in lists if all(isinstance(each, str) for each in value))
    named = zip(boxes, labels, strict=True)
    return next(iter(given.values())), [(tuple(map(round, box)), label) for box, label in named]


def pair_vectors(answers: Sequence[Row], texts: Sequence[str], names: TokenNames | None) -> Row:
    """Return the vectors of the tokens of a query and of a document, and the tokens.

    The tokens are numbers if they are not known, or not those of the vectors, because a hook
    changed the texts.

    Raises:
        KeyError: The vectors are not floats.
        ValueError: There is no document.
    """
    vectors = [
        np.array(row.get("embedding") or row["embedding_float16"], np.float32) for row in answers
    ]
    tokens = []
    for text, role, own in zip(texts, ROLES, vectors, strict=True):
        known = [] if names is None else names.with_vectors(text, role)
        tokens.append(known if len(known) == len(own) else [str(n + 1) for n in range(len(own))])
    return {"vectors": vectors, "tokens": tokens}


def draw_matches(given: Row, row: Row) -> str:
    """Return the similarities of the tokens of `pair_vectors` in HTML, the row maxima marked."""
    (query, document), tokens = row["vectors"], row["tokens"]
    similarities = query @ document.T
    return render(
        "matches.html.j2",
        columns=tokens[1][:MAX_MATCHED],
        rows=[
            (token, values[:MAX_MATCHED].tolist(), int(values.argmax()), float(values.max()))
            for token, values in islice(zip(tokens[0], similarities, strict=True), MAX_MATCHED)
        ],
        low=float(similarities.min()),
        width=float(np.ptp(similarities)) or 1.0,
        documents=tokens[1],
        score=float(max_similarity([query], [document])[0, 0]),
        queries=len(query),
        most=MAX_MATCHED,
    )
