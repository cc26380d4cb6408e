"""Rows and their metadata between preprocess, the core and postprocess; the packed layout.

A request's rows become rows of the model (`CoreRows`). Metadata of each model row
(`RowMetadata`) and forwarded inputs go past the core to postprocess.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Metadata = Sequence["RowMetadata"]


def find_class(name: str) -> Any:
    """Return a class of this package by module and name, such as ``decode_rows.MaskDecoder``."""
    module, _, class_name = name.partition(".")
    return getattr(import_module(f".{module}", __package__), class_name)


class RowInputs(NamedTuple):
    """Inputs and parameters of one request, ready for a row maker.

    Attributes:
        columns: One value per row for each input: `str` for texts, `bytes` for images.
        parameters: Checked parameters with defaults.
    """

    columns: Mapping[str, list[Any]]
    parameters: Mapping[str, Any]


class Row(NamedTuple):
    """One model row of tokens.

    Attributes:
        ids: Token ids.
        first_segment: Number of tokens before the second segment.
        metadata: Packed `RowMetadata`; empty if the task has none.
    """

    ids: Sequence[int]
    first_segment: int
    metadata: bytes = b""


class CoreRows(NamedTuple):
    """Model rows of one request.

    Attributes:
        tensors: Inputs of the core by name, ``[model rows, ...]`` each.
        metadata: Packed `RowMetadata` of each model row; empty if the task has none.
        width: Padded length of the rows, by which the bucketed layout sorts.
    """

    tensors: dict[str, NDArray[Any]]
    metadata: list[bytes]
    width: int

    @property
    def row_count(self) -> int:
        """Number of model rows."""
        return len(next(iter(self.tensors.values())))


class RowMaker(Protocol):
    """Batch encoder of a task: a class in ``rows_*.py``."""

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """Return the core's tensors of each request, or its error."""
        ...


class TextRowMaker(RowMaker, Protocol):
    """Batch encoder whose rows consist of tokens."""

    max_length: int
    """Maximum number of tokens of a model row."""

    tokenizer: Any
    """A `tokenizers.Tokenizer`."""

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        """Return the model rows of each request, or its error."""
        ...


OUTSIDE, WORD_START, WORD_INSIDE = 0, 1, 2
"""Kinds of tokens: outside the text (special tokens, the question), first and later of a word."""

_HEADER = struct.Struct("<iii")


class RowMetadata(NamedTuple):
    """Metadata of one model row, used to find its results in the text.

    Attributes:
        row: Index of the request's row that it belongs to.
        text: Text of the offsets; empty if an earlier model row of the same row has it.
        offsets: INT32 ``[tokens, 2]``, start and end character of each token.
        kinds: UINT8 ``[tokens]``: OUTSIDE, WORD_START or WORD_INSIDE.
    """

    row: int
    text: str
    offsets: NDArray[np.int32]
    kinds: NDArray[np.uint8]


Arrays = Mapping[str, NDArray[Any]]
"""Outputs of the core, ``[model rows, ...]`` each, or of the ensemble, ``[n, ...]`` each."""

Parameters = Mapping[str, Any]


def pack_metadata(row_metadata: RowMetadata) -> bytes:
    text = row_metadata.text.encode("utf-8")
    header = _HEADER.pack(row_metadata.row, len(row_metadata.kinds), len(text))
    offsets = np.ascontiguousarray(row_metadata.offsets, dtype="<i4").tobytes()
    return header + offsets + row_metadata.kinds.astype(np.uint8).tobytes() + text


def unpack_metadata(data: bytes) -> RowMetadata:
    row, tokens, size = _HEADER.unpack_from(data)
    start = _HEADER.size
    offsets = np.frombuffer(data, "<i4", 2 * tokens, start).reshape(tokens, 2)
    kinds = np.frombuffer(data, np.uint8, tokens, start + 8 * tokens)
    end = start + 9 * tokens
    return RowMetadata(row, data[end : end + size].decode("utf-8"), offsets, kinds)


FORWARDED_PREFIX = "forwarded_"
"""Prefix of the tensors with forwarded inputs between preprocess and postprocess."""


def make_forwarded(columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Return the inputs as BYTES ``[count, 1]`` each: the request's rows, then empty values."""
    tensors = {}
    for name, values in columns.items():
        tensor = np.full((count, 1), b"", dtype=np.object_)
        for row, value in enumerate(values):
            tensor[row, 0] = value.encode() if isinstance(value, str) else value
        tensors[FORWARDED_PREFIX + name] = tensor
    return tensors


def read_forwarded(
    columns: Mapping[str, Sequence[bytes]], contents: Mapping[str, str], count: int
) -> list[dict[str, Any]]:
    """Return the request's rows of forwarded inputs: bytes for images, else str.

    Args:
        columns: One value per model row for each input.
        contents: ``text`` or ``image`` for each input.
        count: Number of rows of the request.
    """
    return [
        {
            name: columns[name][row] if content == "image" else columns[name][row].decode()
            for name, content in contents.items()
        }
        for row in range(count)
    ]


TICKET_NUMBERS = 4
"""Numbers of a `flow_control.Ticket`; all 0 for a request that is not counted."""
_SIZES = struct.Struct("<2i")
_WORD = 8


def add_payload(
    ticket: NDArray[np.int64], options: str = "", sample: bytes = b""
) -> NDArray[np.int64]:
    """Return ``[model rows, 4 + k]``: a ticket with a payload behind its numbers.

    The words of the payload are spread over the rows. A request without a payload costs
    postprocess one comparison.

    Args:
        ticket: The ticket in each row, ``[model rows, 4]``.
        options: Parameters of the request as JSON, if it sent some as tensors.
        sample: Sample payload; see `runtime.sampling`.
    """
    text = options.encode()
    data = _SIZES.pack(len(text), len(sample)) + text + sample
    words = -(-len(data) // (_WORD * len(ticket))) * len(ticket)
    payload = np.frombuffer(data.ljust(_WORD * words, b"\0"), dtype="<i8")
    return np.concatenate([ticket, payload.reshape(len(ticket), -1)], axis=1)


def read_payload(ticket: NDArray[np.int64]) -> tuple[str, bytes]:
    """Return the options and the sample payload behind the numbers of a ticket."""
    if ticket.shape[1] == TICKET_NUMBERS:
        return "", b""
    data = ticket[:, TICKET_NUMBERS:].astype("<i8").tobytes()
    options, sample = _SIZES.unpack_from(data)
    start = _SIZES.size + options
    return data[_SIZES.size : start].decode(), data[start : start + sample]


def choose_padded_lengths(requests: Sequence[CoreRows], *, batch_tokens: int) -> list[int]:
    """Return the padded length of each request: its own, or a longer one that saves a batch.

    Args:
        requests: One or more requests.
        batch_tokens: Cost of one more batch, in tokens of another batch.
    """
    rows: Counter[int] = Counter()
    for request in requests:
        rows[request.width] += request.row_count
    widths = sorted(rows)
    targets: dict[int, int] = {}
    joined, count = [], 0
    for width, wider in zip(widths, [*widths[1:], None], strict=True):
        joined.append(width)
        count += rows[width]
        if wider is None or count * (wider - width) > batch_tokens:
            targets |= dict.fromkeys(joined, width)
            joined, count = [], 0
    return [targets[request.width] for request in requests]


def widen_rows(request: CoreRows, width: int, pad_token_id: int) -> CoreRows:
    """Return the request with rows padded to `width` on the right."""
    missing = width - request.width
    if not missing:
        return request
    ids = request.tensors["input_ids"]
    wide = np.full((len(ids), width), pad_token_id, ids.dtype)
    wide[:, : ids.shape[1]] = ids
    return request._replace(tensors={**request.tensors, "input_ids": wide}, width=width)


MULTIPLE = 16
"""The core rounds the longest row of a batch up to a multiple of this number of tokens. Matrix
kernels and softmax then handle a row's keys in the same order alone and in any batch, so that its
result has the same bits."""


class PackedRows(NamedTuple):
    """Rows of one request end to end in one tensor, as the packed layout sends them to the core.

    Attributes:
        ids: Token ids, INT32 ``[n, stride]``; fewer than n ids at the end are padding.
        offset: Distance in tokens of each row's start from its index times `stride`, INT32
            ``[n, 1]``.
    """

    ids: NDArray[np.int32]
    offset: NDArray[np.int32]


def pack_rows(rows: Sequence[Sequence[int]], fill: int) -> PackedRows:
    """Return one or more rows of token ids end to end; `fill` is the id of the padding."""
    count = len(rows)
    lengths = np.fromiter(map(len, rows), np.int32, count)
    stride = max(1, -(-int(lengths.sum()) // count))
    ids = np.full(count * stride, fill, np.int32)
    start = 0
    for row in rows:
        ids[start : start + len(row)] = row
        start += len(row)
    offset = np.cumsum(lengths) - lengths - stride * np.arange(count)
    return PackedRows(ids.reshape(count, stride), offset.astype(np.int32)[:, None])


def unpack_rows(values: NDArray[Any], lengths: Sequence[int]) -> NDArray[Any]:
    """Return the core's results for each token, ``[n, stride, ...]``, as ``[n, longest, ...]``.

    Slots beyond a row are 0.
    """
    if len(values) == 1:
        return values[:, : lengths[0]]
    sizes = np.asarray(lengths)
    flat = values.reshape(-1, *values.shape[2:])[: sizes.sum()]
    rows = np.zeros((len(sizes), sizes.max(initial=0), *values.shape[2:]), values.dtype)
    rows[np.arange(rows.shape[1]) < sizes[:, None]] = flat
    return rows


def count_slots(tokens: int) -> int:
    """Return the padded length in the core of a row of `tokens` tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def make_row_span(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a tensor of zeros ``[n, s]`` whose size is that of the longest row, rounded up.

    A TensorRT core takes the size of its padded rows from the largest such tensor of a batch.
    """
    longest = count_slots(max(int(lengths.max()), 1))
    return np.zeros((len(lengths), -(-longest // len(lengths))), np.int32)
