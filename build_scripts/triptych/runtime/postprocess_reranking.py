"""Decodes reranking: the core's relevance is the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .carry import Carry


class Decoder:
    """``relevance`` FP32 ``[n, 1]`` to ``score`` FP32 ``[n, 1]``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Nothing to prepare."""

    def decode(
        self,
        outputs: Mapping[str, NDArray[Any]],
        carries: Sequence[Carry],
        parameters: Mapping[str, Any],
    ) -> dict[str, NDArray[Any]]:
        """The relevance under the name of the ensemble's output."""
        return {"score": outputs["relevance"]}
