"""Batch encoder of texts with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .request_errors import RequestError
from .row_types import Row, RowInputs
from .rows_text import Input, TokenRowMaker


class MaskRowMaker(TokenRowMaker):
    """Row maker of texts with exactly one mask."""

    def inputs(self, request: RowInputs) -> list[Input]:
        return list(request.columns["text"])

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        mask, mask_id = self.settings["mask_token"], self.settings["mask_token_id"]
        for number, encoding in enumerate(encodings):
            masks = encoding.ids.count(mask_id)
            if masks != 1:
                raise RequestError(
                    "text",
                    f"must have exactly one {mask} within its first {self.max_length} tokens",
                    f"{masks} of them",
                    f"Write {mask} in place of the word to be filled in",
                    number,
                )
        return super().finish(inputs, encodings)
