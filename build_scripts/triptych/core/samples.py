"""What the gate runs on: requests with their core rows, and what the reference made of those."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.feeds import Sample
from triptych.runtime.row_types import RowInputs

MAX_SHOWN = 80
FEW_ROWS = 200
"""Fewer rows of traffic than this show little of what an artifact gets wrong."""

Expected = tuple[NDArray[np.float32], ...]
"""What the reference computed for one row, as `Core.returns` says: a vector, logits or scores; all
classes' scores where the core returns choices (``[classes]``, or ``[tokens, classes]``) and where
it returns all of them; the logits of start and end, ``[tokens]`` each."""


@dataclass(frozen=True)
class GateRequest:
    """A request of one row, of the traffic or made up.

    Attributes:
        sent: inputs as a client sends them; bytes for an image.
        inputs: the same after `hooks.before`: what the core rows are made from.
        parameters: checked, defaults filled in.
        rows: for the core: several where a text has windows or hypotheses.
        carries: packed, one a core row; empty where the task has none.
        edge: made up as an edge case: empty, blank, at the limit and the like.
        shown: short text for tables.
    """

    sent: Mapping[str, str | bytes]
    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, Any]
    rows: tuple[Sample, ...]
    carries: tuple[bytes, ...]
    edge: bool
    shown: str

    @property
    def row_inputs(self) -> RowInputs:
        """What a row maker gets of it: `inputs` as columns of one row."""
        return RowInputs({name: [value] for name, value in self.inputs.items()}, self.parameters)

    @property
    def query(self) -> str:
        """The input `text`, by which passages are ranked; empty where there is none."""
        text = self.inputs.get("text", "")
        return text if isinstance(text, str) else ""


def rows_of(requests: Iterable[GateRequest]) -> list[Sample]:
    """The core rows of all requests, end to end."""
    return [row for request in requests for row in request.rows]


def by_request(requests: Sequence[GateRequest], values: Sequence[Any]) -> list[list[Any]]:
    """`values`, one a core row of all requests, as a list for each request."""
    parts, start = [], 0
    for request in requests:
        parts.append(list(values[start : start + len(request.rows)]))
        start += len(request.rows)
    return parts


def hash_rows(rows: Iterable[Sample]) -> str:
    """Hash of core rows, in hex."""
    digest = hashlib.sha256()
    for row in rows:
        pixels = row if isinstance(row, np.ndarray) else None
        head = json.dumps(row) if pixels is None else f"{pixels.shape}"
        digest.update(f"{len(head)} {head}".encode())
        digest.update(b"" if pixels is None else pixels.tobytes())
    return digest.hexdigest()


def hash_requests(requests: Iterable[GateRequest]) -> str:
    """Hash of all that the gate sees of requests, in hex."""
    digest = hashlib.sha256()
    for request in requests:
        parts = [hash_rows(request.rows), hash_inputs(request.inputs), request.shown]
        parts += [json.dumps(dict(request.parameters), sort_keys=True), str(request.edge)]
        parts += [hashlib.sha256(carry).hexdigest() for carry in request.carries]
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def hash_inputs(inputs: Mapping[str, str | bytes]) -> str:
    """Hash of what a client sends, in hex: equal inputs have equal ones."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def shown_text(inputs: Mapping[str, str | bytes]) -> str:
    """The inputs in short, for tables."""
    texts = [
        f"{len(value)} bytes" if isinstance(value, bytes) else " ".join(value.split())
        for value in inputs.values()
    ]
    return shorten(" | ".join(texts), MAX_SHOWN)


def shorten(text: str, most: int) -> str:
    """The first `most` characters, those that a terminal would act on spelled out."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
