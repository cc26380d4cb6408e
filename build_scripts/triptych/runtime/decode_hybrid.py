"""Decoder of models with a vector of a text, a weight of each token and a vector of each token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .decode_sparse import SparseDecoder, join_terms
from .decode_token_vectors import TokenVectorDecoder
from .row_types import Arrays, Metadata, Parameters


class HybridDecoder:
    """``sentence_embedding``, ``token_weight`` and ``token_vector`` to the outputs of a text."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._special: list[int] = settings["special_ids"]
        self._sparse = SparseDecoder(settings, folder)
        self._vectors = TokenVectorDecoder(settings, folder)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the vector of each text, its terms, and the vectors of its tokens.

        Returns:
            ``embedding`` FP32 ``[n, dim]``; ``token_id`` and ``weight`` as `SparseDecoder`, where a
            term has the largest weight of its tokens; ``token_embedding`` FP32 ``[n, tokens, dim]``
            and ``token_count`` as `TokenVectorDecoder`.
        """
        terms = [
            self._terms(each.ids, weights[: len(each.ids), 0])
            for each, weights in zip(metadata, outputs["token_weight"], strict=True)
        ]
        vectors = self._vectors.decode(
            {"token_embedding": outputs["token_vector"]}, metadata, {"encoding": "float"}
        )
        return {
            "embedding": outputs["sentence_embedding"],
            **self._sparse.decode(join_terms(terms), metadata, parameters),
            "token_embedding": vectors["embedding"],
            "token_count": vectors["token_count"],
        }

    def _terms(
        self, ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return each token of a text once, without special ones, the highest weight first."""
        is_term = ~np.isin(ids, self._special)
        ids, weights = ids[is_term], weights[is_term]
        order = np.argsort(-weights, kind="stable")
        first = np.unique(ids[order], return_index=True)[1]
        first.sort()
        return ids[order][first], weights[order][first]
