"""Requests of the accuracy gate: their core rows, batches of rows, and files of rows.

`core_feed` makes one batch of core rows in either layout, as the server sends it. `write_samples`
stores core rows without pickle, for checks without traffic and tokenizer. Equal rows give equal
files: members have a fixed order, no compression and no time.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from triptych.base.arrays import Array
from triptych.base.errors import UserError
from triptych.base.tensors import LONGEST, ROW_OFFSET, ROW_STRIDE, Tensor, TokenRow, made_by_server
from triptych.runtime.packing import pack_rows
from triptych.runtime.packing_spans import make_row_span
from triptych.runtime.row_types import RowInputs

T = TypeVar("T")

MAX_SHOWN = 80
MIN_RECOMMENDED_ROWS = 200
"""Recommended minimum number of traffic rows. Fewer rows show only some of an artifact's errors."""


@dataclass(frozen=True)
class GateRequest:
    """A request of one row, from the traffic or synthetic."""

    sent: Mapping[str, Any]  # Inputs as a client sends them; bytes for an image
    inputs: Mapping[str, Any]  # Inputs after `hooks.before`; the core rows are made from them
    parameters: Mapping[str, Any]  # Checked parameters with defaults
    rows: tuple[Sample, ...]  # Rows for the core; several if a text has windows or hypotheses
    metadata: tuple[bytes, ...]  # Packed metadata of each core row; empty if the task has none
    edge: bool  # Whether it is an edge case: empty, blank, at the length limit and similar
    preview: str  # Preview for tables
    # Columns of a batch encoder with typed inputs; None for texts and images.
    columns: Mapping[str, Any] | None = None
    # Tensors of the user's own model that go past the core, ``[core rows, ...]`` each.
    past_core: Mapping[str, Array] = field(default_factory=dict)

    @property
    def row_inputs(self) -> RowInputs:
        """Inputs of a batch encoder: `inputs` as columns of one row."""
        if self.columns is not None:
            return RowInputs(self.columns, self.parameters)
        return RowInputs({name: [value] for name, value in self.inputs.items()}, self.parameters)

    @property
    def query(self) -> str:
        """The input `text`, by which passages are ranked; empty if there is none."""
        text = self.inputs.get("text", "")
        return text if isinstance(text, str) else ""


def rows_of(requests: Iterable[GateRequest]) -> list[Sample]:
    """Return the core rows of all requests, end to end."""
    return [row for request in requests for row in request.rows]


def by_request(requests: Sequence[GateRequest], values: Sequence[T]) -> list[list[T]]:
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
        if isinstance(row, TokenRow):
            head, data = json.dumps(row), b""
        else:
            head, data = f"{row.shape}{row.dtype if row.dtype.names else ''}", row.tobytes()
        digest.update(f"{len(head)} {head}".encode() + data)
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


def hash_inputs(inputs: Mapping[str, object]) -> str:
    """Return the hash of a client's inputs, in hex; equal inputs have equal hashes."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        text = value if isinstance(value, str) else f"{value!r}"
        data = value if isinstance(value, bytes) else text.encode("utf-8", "surrogatepass")
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def preview_text(inputs: Mapping[str, object]) -> str:
    """Return a preview of the inputs for tables."""
    texts = [
        f"{len(value)} bytes" if isinstance(value, bytes) else " ".join(str(value).split())
        for value in inputs.values()
    ]
    return shorten(" | ".join(texts), MAX_SHOWN)


def shorten(text: str, most: int) -> str:
    """Return the first `most` characters, with control characters escaped."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )


Sample = TokenRow | Array
"""A row of the core: tokens, the pixels of an image, UINT8 ``[height, width, channels]``, or a
record with the inputs of the user's own model."""


def make_record(tensors: Mapping[str, Array]) -> Array:
    """Return the inputs of a core row, without the batch, as a structured array ``[]``."""
    fields = [(name, array.dtype, array.shape) for name, array in tensors.items()]
    record = np.empty((), np.dtype(fields))
    for name, array in tensors.items():
        record[name] = array
    return record


def is_record(sample: Sample) -> bool:
    """Return whether a row is of the user's own model; see `make_record`."""
    return isinstance(sample, np.ndarray) and sample.dtype.names is not None


Feed = dict[str, Array]
"""The graph's inputs for one batch, by name."""

REQUEST_SIZES = (1, 3, 2)
"""Number of rows of the requests that form a packed batch, repeated."""


def core_feed(
    samples: Sequence[Sample],
    inputs: tuple[Tensor, ...],
    *,
    pad_token_id: int,
    width: int | None = None,
) -> Feed:
    """Return one batch of `samples`.

    Args:
        samples: Rows, all of tokens or all of pixels of one size.
        inputs: Inputs of the core as its config declares them; inputs that Triton makes are added.
        width: Padded length in tokens, with each row as a separate request. None for the usual
            feed: padded to the longest row, or packed, in requests of `REQUEST_SIZES`.
    """
    rows = [sample for sample in samples if isinstance(sample, TokenRow)]
    records = [np.asarray(sample) for sample in samples if is_record(sample)]
    if records:
        return {each.name: _stack_padded(each, records, width) for each in inputs}
    if not rows:
        return {inputs[0].name: np.stack([np.asarray(sample) for sample in samples])}
    lengths = np.array([[len(row.ids)] for row in rows], dtype=np.int32)
    feed: Feed = {
        "row_length": lengths,
        "first_segment": np.array([[row.first_segment] for row in rows], dtype=np.int32),
        "prompt_length": np.array([[row.prompt] for row in rows], dtype=np.int32),
        "attended_length": np.array(
            [[row.attended or len(row.ids)] for row in rows], dtype=np.int32
        ),
    }
    if ROW_OFFSET in inputs and width is None:
        feed |= _packed(rows, pad_token_id)
    else:
        width = max(len(row.ids) for row in rows) if width is None else width
        padded = [(*row.ids, *[pad_token_id] * (width - len(row.ids))) for row in rows]
        ids = np.array(padded, dtype=np.int32)
        feed |= {
            "input_ids": ids.reshape(-1) if ROW_OFFSET in inputs else ids,
            "row_offset": np.zeros_like(lengths),
            ROW_STRIDE.name: np.full(len(rows), width, np.int32),
            "row_span": make_row_span([width]).reshape(-1),
        }
        feed[LONGEST.name] = feed["row_span"]
    names = [tensor.name for tensor in (*inputs, *made_by_server(inputs))]
    return {name: feed[name] for name in names}


def _stack_padded(tensor: Tensor, records: Sequence[Array], width: int | None) -> Array:
    """Return an input of records, ``[rows, ...]``, with its free axes filled up with zeros."""
    rows = [record[tensor.name] for record in records]
    sizes = [
        (width or max(row.shape[axis] for row in rows)) if isinstance(size, str) else size
        for axis, size in enumerate(tensor.dims)
    ]
    stacked = np.zeros((len(rows), *sizes), rows[0].dtype)
    for target, row in zip(stacked, rows, strict=True):
        target[tuple(map(slice, row.shape))] = row
    return stacked


def record_sizes(record: Array, inputs: Sequence[Tensor]) -> dict[str, int]:
    """Return the size of each named axis of a record of the user's own model."""
    return {
        dim: record[tensor.name].shape[axis]
        for tensor in inputs
        for axis, dim in enumerate(tensor.dims)
        if isinstance(dim, str)
    }


def cut_record(record: Array, inputs: Sequence[Tensor], size: int) -> Array:
    """Return a record with its named axes cut to at most `size`."""
    return make_record(
        {
            t.name: record[t.name][tuple(slice(size if isinstance(d, str) else d) for d in t.dims)]
            for t in inputs
        }
    )


def row_starts(rows: Sequence[TokenRow], inputs: Sequence[Tensor]) -> list[int]:
    """Return the index of each row's first token in a packed feed; 0 for all in a padded one."""
    if ROW_OFFSET not in inputs:
        return [0] * len(rows)
    feed = _packed(rows, 0)
    stride = feed[ROW_STRIDE.name]
    starts: list[int] = (np.cumsum(stride) - stride + feed["row_offset"][:, 0]).tolist()
    return starts


def _packed(rows: Sequence[TokenRow], pad_token_id: int) -> Feed:
    """Return the inputs of a packed core for the rows of several requests."""
    sizes: list[int] = []
    for size in cycle(REQUEST_SIZES):
        if sum(sizes) >= len(rows):
            break
        sizes.append(min(size, len(rows) - sum(sizes)))
    ends = list(accumulate(sizes))
    requests = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    packed = [pack_rows([row.ids for row in request], pad_token_id) for request in requests]
    spans = [make_row_span([len(row.ids) for row in request]) for request in requests]
    strides = [np.full(len(ids), ids.shape[1], np.int32) for ids, _ in packed]
    return {
        "input_ids": np.concatenate([ids.reshape(-1) for ids, _ in packed]),
        "row_offset": np.concatenate([offset for _, offset in packed]),
        "row_span": np.concatenate([span.reshape(-1) for span in spans]),
        ROW_STRIDE.name: np.concatenate(strides),
        LONGEST.name: max(spans, key=np.size).reshape(-1),
    }


_NO_TIME = (1980, 1, 1, 0, 0, 0)
_TOKENS = ("ids", "lengths", "first_segments")
_PIXELS = "pixels"
_RECORD = "record_"
"""Prefix of arrays with one row of the user's own model each."""
_PROMPTS, _ATTENDED = "prompts", "attended"
"""Arrays of `TokenRow.prompt` and `TokenRow.attended`; none if all are 0."""


def write_samples(path: Path, rows: Sequence[Sample]) -> None:
    """Write core rows, all tokens, all pixels of one size, or all of the user's own model.

    Args:
        rows: Non-empty list of rows.

    Raises:
        ValueError: There are no rows, or rows of both kinds.
    """
    tokens = [row for row in rows if isinstance(row, TokenRow)]
    if not rows or len(tokens) not in (0, len(rows)):
        raise ValueError(f"{len(tokens)} of {len(rows)} rows are tokens; all or none must be")
    arrays: dict[str, Array] = {}
    if tokens:
        arrays["ids"] = np.array([token for row in tokens for token in row.ids], np.int32)
        arrays["lengths"] = np.array([len(row.ids) for row in tokens], np.int32)
        arrays["first_segments"] = np.array([row.first_segment for row in tokens], np.int32)
        for name, values in (
            (_PROMPTS, [row.prompt for row in tokens]),
            (_ATTENDED, [row.attended for row in tokens]),
        ):
            if any(values):
                arrays[name] = np.array(values, np.int32)
    elif is_record(rows[0]):
        arrays |= {f"{_RECORD}{index:06}": np.asarray(row) for index, row in enumerate(rows)}
    else:
        arrays[_PIXELS] = np.stack([np.asarray(row) for row in rows])
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _NO_TIME), content.getvalue())


def read_samples(path: Path) -> list[Sample]:
    """Return the rows that `write_samples` wrote.

    Raises:
        UserError: The file is missing, or is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if _PIXELS in arrays:
            return list(arrays[_PIXELS])
        if records := [arrays[name] for name in sorted(arrays) if name.startswith(_RECORD)]:
            return list(records)
        ids, lengths, firsts = (arrays[name] for name in _TOKENS)
        prompts, attended = (arrays.get(n, np.zeros_like(firsts)) for n in (_PROMPTS, _ATTENDED))
        ends = np.cumsum(lengths)
        if len(ids) != (ends[-1] if len(ends) else 0) or not (
            len(firsts) == len(prompts) == len(attended) == len(lengths)
        ):
            raise ValueError("lengths and tokens do not agree")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            str(path),
            "does not contain the rows to check an engine with",
            given=error,
            remedy="Run `triptych build` again",
        ) from error
    return [
        TokenRow(tuple(ids[end - length : end].tolist()), *map(int, others))
        for end, length, *others in zip(ends, lengths, firsts, prompts, attended, strict=True)
    ]
