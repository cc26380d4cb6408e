"""Batch encoder of texts whose results are joined by token: ids of tokens go past the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .row_metadata import OUTSIDE, WORD_START, RowMetadata, pack_metadata
from .row_types import Row
from .rows_text import Input, PlainTextRowMaker


class IdentifiedRowMaker(PlainTextRowMaker):
    """Row maker of texts; all tokens but the first one, which stands for the text, are marked."""

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        return [
            self.row(encoding, _metadata_of(number, encoding.ids))
            for number, encoding in enumerate(encodings)
        ]


def _metadata_of(number: int, ids: Sequence[int]) -> bytes:
    kinds = np.full(len(ids), WORD_START, np.uint8)
    kinds[:1] = OUTSIDE
    places = np.zeros((len(ids), 2), np.int32)
    return pack_metadata(RowMetadata(number, "", places, kinds, np.array(ids, np.int32)))
