"""Decoder of zero-shot classifications: the labels of a request and their scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .row_types import Arrays, Metadata, Parameters


class ZeroShotDecoder:
    """``inference_logits`` FP32 ``[n * L, C]``, label by label, to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._entailment: int = settings["entailment"]
        self._contradiction: int = settings["contradiction"]

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return all labels, best first: ``label`` BYTES ``[n, L]`` and ``score`` FP32 ``[n, L]``.

        With ``multi_label``, or one label, a score is the softmax of entailment and contradiction;
        otherwise the scores are the softmax of the entailment of all labels.
        """
        names = np.array(
            [label.encode("utf-8") for label in parameters["candidate_labels"]], object
        )
        logits = outputs["inference_logits"]
        entailment = logits[:, self._entailment].reshape(-1, len(names))
        if parameters["multi_label"] or len(names) == 1:
            contradiction = logits[:, self._contradiction].reshape(-1, len(names))
            scores = _softmax(np.stack((contradiction, entailment), axis=-1))[..., 1]
        else:
            scores = _softmax(entailment)
        order = scores.argsort(axis=1)[:, ::-1]
        return {"label": names[order], "score": np.take_along_axis(scores, order, axis=1)}


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return shares
