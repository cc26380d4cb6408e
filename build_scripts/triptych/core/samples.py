"""Requests of the accuracy gate with their core rows, and the reference's results."""

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
MIN_RECOMMENDED_ROWS = 200
"""Recommended minimum number of traffic rows. Fewer rows show only some of an artifact's errors."""

Expected = tuple[NDArray[np.float32], ...]
"""The reference's result for one row, as in `Core.returns`.

It is a vector, logits or scores. If the core returns choices or all scores, it has the scores of
all classes, ``[classes]`` or ``[tokens, classes]``. For spans it has the logits of start and end,
``[tokens]`` each.
"""


@dataclass(frozen=True)
class GateRequest:
    """A request of one row, from the traffic or synthetic.

    Attributes:
        sent: Inputs as a client sends them; bytes for an image.
        inputs: Inputs after `hooks.before`; the core rows are made from them.
        parameters: Checked parameters with defaults.
        rows: Rows for the core; several if a text has windows or hypotheses.
        metadata: Packed metadata of each core row; empty if the task has none.
        edge: Whether it is an edge case: empty, blank, at the length limit and similar.
        preview: Preview for tables.
    """

    sent: Mapping[str, str | bytes]
    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, Any]
    rows: tuple[Sample, ...]
    metadata: tuple[bytes, ...]
    edge: bool
    preview: str

    @property
    def row_inputs(self) -> RowInputs:
        """Inputs of a batch encoder: `inputs` as columns of one row."""
        return RowInputs({name: [value] for name, value in self.inputs.items()}, self.parameters)

    @property
    def query(self) -> str:
        """The input `text`, by which passages are ranked; empty if there is none."""
        text = self.inputs.get("text", "")
        return text if isinstance(text, str) else ""


def rows_of(requests: Iterable[GateRequest]) -> list[Sample]:
    """Return the core rows of all requests, end to end."""
    return [row for request in requests for row in request.rows]


def by_request(requests: Sequence[GateRequest], values: Sequence[Any]) -> list[list[Any]]:
    """Return `values`, one per core row of all requests, as a list for each request."""
    parts, start = [], 0
    for request in requests:
        parts.append(list(values[start : start + len(request.rows)]))
        start += len(request.rows)
    return parts


def hash_rows(rows: Iterable[Sample]) -> str:
    """Return the hash of core rows, in hex."""
    digest = hashlib.sha256()
    for row in rows:
        pixels = row if isinstance(row, np.ndarray) else None
        head = json.dumps(row) if pixels is None else f"{pixels.shape}"
        digest.update(f"{len(head)} {head}".encode())
        digest.update(b"" if pixels is None else pixels.tobytes())
    return digest.hexdigest()


def hash_requests(requests: Iterable[GateRequest]) -> str:
    """Return the hash of everything that the gate uses of requests, in hex."""
    digest = hashlib.sha256()
    for request in requests:
        parts = [hash_rows(request.rows), hash_inputs(request.inputs), request.preview]
        parts += [json.dumps(dict(request.parameters), sort_keys=True), str(request.edge)]
        parts += [hashlib.sha256(row_metadata).hexdigest() for row_metadata in request.metadata]
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def hash_inputs(inputs: Mapping[str, str | bytes]) -> str:
    """Return the hash of a client's inputs, in hex; equal inputs have equal hashes."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def preview_text(inputs: Mapping[str, str | bytes]) -> str:
    """Return a preview of the inputs for tables."""
    texts = [
        f"{len(value)} bytes" if isinstance(value, bytes) else " ".join(value.split())
        for value in inputs.values()
    ]
    return shorten(" | ".join(texts), MAX_SHOWN)


def shorten(text: str, most: int) -> str:
    """Return the first `most` characters, with control characters escaped."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
