"""A core row for each text, with where each token stands in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .carry import Carry, pack
from .row_types import Row, RowInputs
from .token_kinds import make_kinds
from .token_rows import Input, TokenRowMaker


class RowMaker(TokenRowMaker):
    """Texts as they are; the carry of a row is its text, offsets and kinds of tokens."""

    offsets = True

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        super().__init__(settings, folder)
        model = self.tokenizer.model
        self._prefix: str | None = getattr(model, "continuing_subword_prefix", None)
        self._unk_id: int | None = settings["unk_token_id"]

    def inputs(self, request: RowInputs) -> list[Input]:
        return list(request.columns["text"])

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        rows = []
        for number, (text, encoding) in enumerate(zip(inputs, encodings, strict=True)):
            offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            kinds = make_kinds(
                encoding.tokens,
                encoding.offsets,
                encoding.special_tokens_mask,
                encoding.ids,
                str(text),
                subword_prefix=self._prefix,
                unk_id=self._unk_id,
            )
            rows.append(self.row(encoding, pack(Carry(number, str(text), offsets, kinds))))
        return rows
