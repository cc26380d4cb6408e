"""Decoded outputs of one request each, as the ensemble of each task returns them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Decoded = dict[str, NDArray[Any]]
Span = tuple[str, int, int]


def words(*texts: str) -> NDArray[Any]:
    return np.array([[text.encode() for text in texts]], dtype=object)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array([values], dtype=np.float32)


def vector(*values: float) -> Decoded:
    return {"embedding": floats(*values)}


def labels(*pairs: tuple[str, float]) -> Decoded:
    return {"label": words(*(p[0] for p in pairs)), "score": floats(*(p[1] for p in pairs))}


def tokens(*pairs: tuple[str, float]) -> Decoded:
    return {"token": words(*(p[0] for p in pairs)), "score": floats(*(p[1] for p in pairs))}


def entities(*spans: Span, score: float | None = 0.9) -> Decoded:
    found = [
        {"entity": name, "text": "…", "start": start, "end": end, "score": score}
        for name, start, end in spans
    ]
    return {"entities": words(json.dumps(found))}


def answer(text: str, start: int = 0, score: float = 0.5) -> Decoded:
    return {
        "answer": words(text),
        "score": floats(score),
        "start": np.array([[start]], np.int32),
        "end": np.array([[start + len(text)]], np.int32),
    }


def relevance(score: float) -> Decoded:
    return {"score": floats(score)}


def terms(weights: Mapping[int, float]) -> Decoded:
    ids = np.array([list(weights)], np.int32)
    return {"token_id": ids, "weight": floats(*weights.values())}


def token_vectors(*rows: Sequence[float]) -> Decoded:
    count = np.array([[len(rows)]], np.int32)
    return {"embedding": np.array([rows], np.float32), "token_count": count}


def hybrid(
    embedding: Sequence[float], weights: Mapping[int, float], *rows: Sequence[float]
) -> Decoded:
    of_tokens = token_vectors(*rows)
    of_tokens["token_embedding"] = of_tokens.pop("embedding")
    return {**vector(*embedding), **terms(weights), **of_tokens}


def vectors(rows: NDArray[Any]) -> list[Decoded]:
    return [vector(*row) for row in rows]


def relevances(scores: Sequence[float]) -> list[Decoded]:
    return [relevance(score) for score in scores]


_VECTORS = [vector(1, 0, 0), vector(0.6, 0.8, 0), vector(0, 0.6, 0.8), vector(0, 0, 1)]
EXAMPLES: dict[str, list[Decoded]] = {
    "text-embedding": _VECTORS,
    "image-embedding": _VECTORS,
    "multi-vector-embedding": [
        token_vectors((1, 0), (0.6, 0.8)),
        token_vectors((0, 1)),
        token_vectors((-1, 0), (0.8, -0.6), (0, 1)),
    ],
    "late-interaction-reranking": relevances([2.0, -1.0, 0.5]),
    "sparse-embedding": [terms({2: 1.5, 7: 0.5}), terms({7: 2.0, 0: 1.0}), terms({4: 1.0, 2: 0.5})],
    "hybrid-embedding": [
        hybrid((1, 0), {2: 1.5, 7: 0.5}, (1, 0), (0.6, 0.8)),
        hybrid((0.6, 0.8), {7: 2.0, 0: 1.0}, (0, 1)),
        hybrid((0, 1), {4: 1.0, 2: 0.5}, (-1, 0), (0.8, -0.6), (0, 1)),
    ],
    "text-classification": [labels(("a", 0.9)), labels(("b", 0.6), ("a", 0.4)), labels(("a", 0.5))],
    "zero-shot-classification": [labels(("a", 0.5), ("b", 0.5)), labels(("x", 0.7), ("y", 0.3))],
    "image-classification": [labels(("cat", 0.9), ("dog", 0.1)), labels(("dog", 1.0))],
    "token-classification": [entities(("PER", 0, 3), ("LOC", 5, 9)), entities()],
    "question-answering": [answer("in Rome", 4), answer("", 0)],
    "reranking": relevances([2.0, -1.0, 0.5]),
    "fill-mask": [tokens(("Paris", 0.8), ("Rome", 0.1)), tokens(("dog", 0.4), ("cat", 0.4))],
    "custom": [{"answer": words("x"), "number": floats(1.0, 2.0)}, {"number": floats(3.0)}],
}
_PERFECT_VECTORS = {
    "min_cosine": 1.0,
    "mean_cosine": 1.0,
    "nearest_neighbor_agreement": 1.0,
    "mean_neighbor_loss": 0.0,
    "max_neighbor_loss": 0.0,
    "similarity_rank_correlation": 1.0,
}
_PERFECT_TERMS = {**_PERFECT_VECTORS, "term_overlap": 1.0, "product_error": 0.0}
_PERFECT_SCORES = {
    "score_error": 0.0,
    "first_document_agreement": 1.0,
    "score_rank_correlation": 1.0,
}
_PERFECT_ORDER = {"rank_correlation": 1.0, "top1_agreement": 1.0}
PERFECT = {
    "text-embedding": _PERFECT_VECTORS,
    "image-embedding": _PERFECT_VECTORS,
    "multi-vector-embedding": {"min_cosine": 1.0, "mean_cosine": 1.0, **_PERFECT_SCORES},
    "hybrid-embedding": {**_PERFECT_TERMS, **_PERFECT_SCORES},
    "late-interaction-reranking": _PERFECT_ORDER,
    "sparse-embedding": _PERFECT_TERMS,
    "token-classification": {"entity_f1": 1.0},
    "question-answering": {"exact_match": 1.0, "answer_f1": 1.0},
    "reranking": _PERFECT_ORDER,
    "fill-mask": {"top_k_overlap": 1.0, "label_agreement": 1.0},
    "custom": {},
    **{
        task: {"label_agreement": 1.0, "max_probability_difference": 0.0, "confidence_shift": 0.0}
        for task in ("text-classification", "zero-shot-classification", "image-classification")
    },
}
