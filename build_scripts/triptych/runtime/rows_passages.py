"""Batch encoder of late interaction: the rows of queries and of passages."""

from __future__ import annotations

from collections.abc import Sequence

from .request_errors import ROW, RequestError
from .row_metadata import pack_metadata, unpack_metadata
from .row_types import Row, RowInputs
from .rows_roles import RoleRowMaker


class QueryPassageRowMaker(RoleRowMaker):
    """Row maker of queries and passages: a row for each different query, then one each passage."""

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        parts = []
        for request in requests:
            queries = [*dict.fromkeys(request.columns["text"])]
            parts += [
                RowInputs({"text": queries}, {"role": "query"}),
                RowInputs({"text": request.columns["text_pair"]}, {"role": "document"}),
            ]
        made = super().token_rows(parts)
        pairs = zip(requests, made[::2], made[1::2], strict=True)
        return [self._joined(request.columns["text"], *pair) for request, *pair in pairs]

    def _joined(
        self, texts: Sequence[str], queries: list[Row] | Exception, passages: list[Row] | Exception
    ) -> list[Row] | Exception:
        """Return the rows of a request; `RowMetadata.row` is that of a passage's query, else -1."""
        unique = [*dict.fromkeys(texts)]
        if isinstance(queries, Exception):
            if isinstance(queries, RequestError) and ROW in queries.numbers:
                queries.numbers[ROW] = texts.index(unique[queries.numbers[ROW]])
            return queries
        if isinstance(passages, Exception):
            return passages
        rows = [*queries, *passages]
        try:
            self.check_count(len(rows))
        except RequestError as error:
            return error
        index = {text: place for place, text in enumerate(unique)}
        places = [*[-1] * len(index), *(index[text] for text in texts)]
        return [
            row._replace(metadata=pack_metadata(unpack_metadata(row.metadata)._replace(row=place)))
            for row, place in zip(rows, places, strict=True)
        ]
