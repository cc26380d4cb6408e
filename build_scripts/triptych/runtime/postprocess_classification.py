"""Decodes classification of texts and images: class ids to labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .carry import Arrays, Carries, Parameters


class Decoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._labels = np.array([label.encode("utf-8") for label in settings["labels"]], object)

    def decode(self, outputs: Arrays, carries: Carries, parameters: Parameters) -> Arrays:
        """The best ``top_k``: ``label`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``."""
        kept = parameters["top_k"]
        labels = self._labels[outputs["class_id"][:, :kept]]
        return {"label": labels, "score": np.ascontiguousarray(outputs["class_score"][:, :kept])}
