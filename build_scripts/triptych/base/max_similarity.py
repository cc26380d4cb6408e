"""MaxSim scores of queries and documents with a vector for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = Sequence[NDArray[np.floating[Any]]]
"""Vectors of each text, ``[tokens, dimensions]``, all of one type."""

WITHOUT_VECTORS = -1e9
"""Score of a document without vectors, below all others, as `maxsim` of sentence-transformers."""


def max_similarity(queries: Vectors, documents: Vectors) -> NDArray[Any]:
    """Return the MaxSim score of each query with each document, of the type of the vectors.

    It is the sum over the query's vectors of the largest dot product with a document's vector
    (ColBERT, https://arxiv.org/abs/2004.12832). A document without vectors has the score
    `WITHOUT_VECTORS`, a query without vectors 0.
    """
    kind = queries[0].dtype if queries else np.dtype(np.float32)
    scores = np.zeros((len(queries), len(documents)), kind)
    scores[[len(query) > 0 for query in queries]] = WITHOUT_VECTORS
    filled = [place for place, vectors in enumerate(documents) if len(vectors)]
    if not filled:
        return scores
    every = np.concatenate([documents[place] for place in filled]).T
    starts = np.cumsum([0, *(len(documents[place]) for place in filled[:-1])])
    for row, query in zip(scores, queries, strict=True):
        if len(query):
            row[filled] = np.maximum.reduceat(query @ every, starts, axis=1).sum(axis=0)
    return scores
