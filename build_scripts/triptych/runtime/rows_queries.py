"""Batch encoder of sparse models whose queries need no transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .row_metadata import RowMetadata, pack_metadata
from .row_types import Row, RowInputs
from .rows_identified import IdentifiedRowMaker
from .rows_text import Input


class QueryTermsRowMaker(IdentifiedRowMaker):
    """Row maker of documents, and of queries, whose tokens go past the core.

    Every answer needs a row of the core, so that of a query has one token.
    """

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        is_query = [request.parameters.get("role") == "query" for request in requests]
        found: dict[int, list[Row] | Exception] = {}
        for asked in (False, True):
            places = [place for place, own in enumerate(is_query) if own == asked]
            self.special_tokens = not asked
            rows = super().token_rows([requests[place] for place in places])
            found |= zip(places, map(_cut, rows) if asked else rows, strict=True)
        return [found[place] for place in range(len(requests))]

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        """Return the rows; the metadata of a query has its tokens, once each."""
        none = np.empty((0, 2), np.int32), np.empty(0, np.uint8)
        rows = []
        for number, each in enumerate(encodings):
            ids = np.unique(np.array([] if self.special_tokens else each.ids, np.int32))
            rows.append(self.row(each, pack_metadata(RowMetadata(number, "", *none, ids))))
        return rows


def _cut(rows: list[Row] | Exception) -> list[Row] | Exception:
    """Return the rows of a request with one token each."""
    if isinstance(rows, Exception):
        return rows
    return [row._replace(ids=[*row.ids[:1]] or [0], first_segment=1) for row in rows]
