"""Batch encoder of models with a vector for each token: texts of queries and of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .request_errors import RequestError
from .row_metadata import OUTSIDE, WORD_START, RowMetadata, pack_metadata
from .row_types import CoreRows, Row, RowInputs, make_int32
from .rows_text import PlainTextRowMaker


class RoleRowMaker(PlainTextRowMaker):
    """Row maker of texts, each cut, filled up and marked as its request's role asks."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Read the roles.

        Raises:
            RequestError: The pipeline cuts texts shorter than a role fills them up.
        """
        super().__init__(settings, folder)
        self._roles: Mapping[str, Mapping[str, Any]] = settings["roles"]
        self._fills = any(not role["attended"] for role in self._roles.values())
        for role in self._roles.values():
            if role["width"] > self.max_length:
                raise RequestError(
                    "tokenizer.max_length",
                    f"must be at least {role['width']}, the number of tokens of a query",
                    self.max_length,
                    "Raise it",
                )

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        found: dict[int, list[Row] | Exception] = {}
        names = [request.parameters["role"] for request in requests]
        for name in dict.fromkeys(names):
            role = self._roles[name]
            self.cut_at(min(role["max_length"], self.max_length))
            places = [place for place, own in enumerate(names) if own == name]
            rows = super().token_rows([requests[place] for place in places])
            found |= zip(places, (_of_role(each, role) for each in rows), strict=True)
        return [found[place] for place in range(len(requests))]

    def tensors(self, rows: Sequence[Row]) -> CoreRows:
        made = super().tensors(rows)
        if self._fills:
            made.tensors["attended_length"] = make_int32(
                [row.attended or len(row.ids) for row in rows]
            )
        return made


def _of_role(rows: list[Row] | Exception, role: Mapping[str, Any]) -> list[Row] | Exception:
    """Return the rows of a request, filled up, with the tokens that have a vector marked."""
    if isinstance(rows, Exception):
        return rows
    made = []
    for number, row in enumerate(rows):
        ids = [*row.ids, *[role["fill"]] * (role["width"] - len(row.ids))]
        kinds = np.where(np.isin(ids, role["skipped"]), OUTSIDE, WORD_START).astype(np.uint8)
        places = np.zeros((len(ids), 2), np.int32)
        made.append(
            row._replace(
                ids=ids,
                first_segment=len(ids),
                metadata=pack_metadata(RowMetadata(number, "", places, kinds)),
                attended=0 if role["attended"] or len(ids) == len(row.ids) else len(row.ids),
            )
        )
    return made
