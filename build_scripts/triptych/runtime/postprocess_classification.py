"""Decodes classification of texts and images: class ids to labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .carry import Carry


class Decoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``label`` and ``score``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Encode the `labels` of `settings` once."""
        self._labels = np.array([label.encode("utf-8") for label in settings["labels"]], object)

    def decode(
        self,
        outputs: Mapping[str, NDArray[Any]],
        carries: Sequence[Carry],
        parameters: Mapping[str, Any],
    ) -> dict[str, NDArray[Any]]:
        """The best ``top_k``: ``label`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``."""
        kept = parameters["top_k"]
        labels = self._labels[outputs["class_id"][:, :kept]]
        return {"label": labels, "score": np.ascontiguousarray(outputs["class_score"][:, :kept])}
