"""A core row for each text, or for each pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .row_types import RowInputs
from .token_rows import Input, TokenRowMaker, check_filled


class RowMaker(TokenRowMaker):
    """Texts with the model's prompt before them where it has one; pairs as they are."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._prompts: Mapping[str, str] = settings.get("prompts", {})
        self._lowercase: bool = settings["lowercase"]
        super().__init__(settings, folder)

    def inputs(self, request: RowInputs) -> list[Input]:
        texts: list[str] = request.columns["text"]
        prompt = self._prompts.get(request.parameters.get("prompt_name", ""), "")
        if prompt:
            texts = [prompt + text for text in texts]
        if self._lowercase:
            texts = [text.lower() for text in texts]
        if len(self.fields) == 1:
            return list(texts)
        check_filled(request, self.fields)
        return list(zip(texts, request.columns["text_pair"], strict=True))
