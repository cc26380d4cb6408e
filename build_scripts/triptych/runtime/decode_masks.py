"""Decoder of filled masks: tokens and scores of each row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .row_types import Arrays, Metadata, Parameters


class MaskDecoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``token`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._texts = _TokenTexts(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the ``top_k`` best: ``token`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``."""
        kept = parameters["top_k"]
        ids = outputs["class_id"][:, :kept]
        texts = np.array([self._texts[token_id] for token_id in ids.ravel().tolist()], object)
        scores = np.ascontiguousarray(outputs["class_score"][:, :kept])
        return {"token": texts.reshape(ids.shape), "score": scores}


class _TokenTexts(dict[int, bytes]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self.setdefault(token_id, text.encode("utf-8"))
