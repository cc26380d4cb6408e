"""Decodes reranking: the core's relevance is the score."""

from __future__ import annotations

from pathlib import Path

from .carry import Arrays, Carries, Parameters


class Decoder:
    """``relevance`` FP32 ``[n, 1]`` to ``score`` FP32 ``[n, 1]``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, carries: Carries, parameters: Parameters) -> Arrays:
        return {"score": outputs["relevance"]}
