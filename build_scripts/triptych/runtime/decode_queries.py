"""Decoder of sparse embeddings whose queries have their weights in a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .decode_sparse import SparseDecoder, join_terms
from .row_types import Arrays, Metadata, Parameters

WEIGHTS_FILE = "query_weights.npy"
"""File with the weight of each token of the vocabulary in a query, FP32 ``[tokens]``."""


class QueryTermsDecoder(SparseDecoder):
    """Decoder of documents as `SparseDecoder`; a query's terms are looked up."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        super().__init__(settings, folder)
        self._weights = np.load(folder / WEIGHTS_FILE)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the terms as `SparseDecoder`; `row_metadata` has the tokens of a query, once each.

        Terms are in the order of their weights without a sign, as those of the library are chosen.
        """
        if parameters.get("role") == "query":
            rows = []
            for each in metadata:
                weights = self._weights[each.ids]
                order = np.argsort(-np.abs(weights), kind="stable")
                rows.append((each.ids[order], weights[order]))
            outputs = join_terms(rows)
        return super().decode(outputs, metadata, parameters)
