"""Decoder of reranking: the score of each pair."""

from __future__ import annotations

from pathlib import Path

from .row_types import Arrays, Metadata, Parameters


class ScoreDecoder:
    """``relevance`` FP32 ``[n, 1]`` to ``score`` FP32 ``[n, 1]``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        return {"score": outputs["relevance"]}
