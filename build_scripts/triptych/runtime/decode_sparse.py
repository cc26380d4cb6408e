"""Decoder of sparse embeddings: the terms of a text with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .row_types import Arrays, Metadata, Parameters


class SparseDecoder:
    """``term_id`` INT32 and ``term_weight`` FP32 ``[n, K]`` to ``token_id`` and ``weight``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the terms above ``threshold``, at most ``max_active_dims``, highest weight first.

        Returns:
            ``token_id`` INT32 and ``weight`` FP32 ``[n, terms]``, where terms is that of the row
            with the most, and at least 1. Shorter rows end with the id 0 and the weight 0.
        """
        most = parameters.get("max_active_dims")
        ids, weights = outputs["term_id"][:, :most], outputs["term_weight"][:, :most]
        # A weight that is no number stays.
        is_active = ~(np.abs(weights) <= parameters["threshold"])
        width = max(1, int(is_active.sum(axis=1).max(initial=0)))
        is_active = is_active[:, :width]
        return {
            "token_id": np.where(is_active, ids[:, :width], np.int32(0)),
            "weight": np.where(is_active, weights[:, :width], np.float32(0)),
        }


def join_terms(rows: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> Arrays:
    """Return the terms of each row and their weights, highest first, as a core returns them."""
    shape = len(rows), max([1, *(len(ids) for ids, _ in rows)])
    joined = {"term_id": np.zeros(shape, np.int32), "term_weight": np.zeros(shape, np.float32)}
    for row, (ids, weights) in enumerate(rows):
        joined["term_id"][row, : len(ids)] = ids
        joined["term_weight"][row, : len(ids)] = weights
    return joined
