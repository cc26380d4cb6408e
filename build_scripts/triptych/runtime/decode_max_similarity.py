"""Decoder of late interaction: MaxSim scores of passages from vectors of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .row_metadata import OUTSIDE
from .row_types import Arrays, Metadata, Parameters

WITHOUT_VECTORS = -1e9
"""Score of a passage without vectors, as in sentence-transformers; JSON has no infinity."""


class MaxSimilarityDecoder:
    """``token_embedding`` FP32 ``[n, T, dim]`` to ``score`` FP32 ``[passages, 1]``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._means: bool = settings.get("mean_scores", False)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return for each passage the sum of the largest dot products of its query's vectors.

        `row_metadata` has the row of a passage's query, and a negative number for a query. With
        `mean_scores` the sum is divided by the number of the query's vectors. A passage without
        vectors scores `WITHOUT_VECTORS`, which is below all others.
        """
        rows = outputs["token_embedding"]
        vectors = [
            row[: len(each.kinds)][each.kinds != OUTSIDE]
            for row, each in zip(rows, metadata, strict=True)
        ]
        scores = []
        for passage, each in zip(vectors, metadata, strict=True):
            if each.row < 0:
                continue
            query = vectors[each.row]
            if not len(passage) or not len(query):
                scores.append(WITHOUT_VECTORS if len(query) else 0.0)
                continue
            best = (query @ passage.T).max(axis=1)
            scores.append(best.mean() if self._means else best.sum())
        return {"score": np.array(scores, np.float32).reshape(-1, 1)}
