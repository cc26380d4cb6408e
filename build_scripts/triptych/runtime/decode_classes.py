"""Decoder of classifications: labels and scores of each row."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .row_types import Arrays, Metadata, Parameters

THRESHOLD = 0.5
"""Score above which a multi-label model's label is returned, without parameters."""


class ClassDecoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._labels = np.array([label.encode("utf-8") for label in settings["labels"]], object)
        self._gives_all = settings.get("class_scores", False)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the ``top_k`` best: ``label`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``.

        With a ``threshold``, or without ``top_k``, only those with a higher score are returned. A
        row with fewer labels than another one ends with empty labels of score 0, and k is at least
        1. With `serving.class_scores` also ``scores`` FP32 ``[n, labels]``, in the labels' order.
        """
        kept, threshold = parameters.get("top_k"), parameters.get("threshold")
        ids, scores = outputs["class_id"], outputs["class_score"]
        result = {
            "label": self._labels[ids[:, :kept]],
            "score": np.ascontiguousarray(scores[:, :kept]),
        }
        if threshold is not None or kept is None:
            limit = THRESHOLD if threshold is None else threshold
            passes = ~(result["score"] <= limit)  # a score that is no number stays in sight
            passes = passes[:, : max(1, int(passes.sum(axis=1).max(initial=0)))]
            width = passes.shape[1]
            result = {
                "label": np.where(passes, result["label"][:, :width], b""),
                "score": np.where(passes, result["score"][:, :width], np.float32(0)),
            }
        if self._gives_all:
            result["scores"] = np.empty_like(scores)
            np.put_along_axis(result["scores"], ids.astype(np.int64), scores, axis=1)
        return result
