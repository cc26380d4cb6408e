"""Rows between preprocess, the core and postprocess.

A request's rows become rows of the model (`CoreRows`). Metadata of each model row
(`row_metadata`) and forwarded inputs go past the core to postprocess.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Metadata = Sequence[Any]
"""`row_metadata.RowMetadata` of each model row; empty if the task has none."""


def find_class(name: str) -> Any:
    """Return a class of this package by module and name, such as ``decode_masks.MaskDecoder``."""
    module, _, class_name = name.partition(".")
    return getattr(import_module(f".{module}", __package__), class_name)


class RowInputs(NamedTuple):
    """Inputs and parameters of one request, ready for a row maker.

    Attributes:
        columns: One value per row for each input: `str` for texts, `bytes` for images; of the
            user's own model also arrays.
        parameters: Checked parameters with defaults.
    """

    columns: Mapping[str, Any]
    parameters: Mapping[str, Any]


class Row(NamedTuple):
    """One model row of tokens.

    Attributes:
        ids: Token ids.
        first_segment: Number of tokens before the second segment.
        metadata: Packed `RowMetadata`; empty if the task has none.
        prompt: Number of tokens at the beginning that are left out of pooling.
        attended: Number of tokens at the beginning that others attend to; 0 for all.
    """

    ids: Sequence[int]
    first_segment: int
    metadata: bytes = b""
    prompt: int = 0
    attended: int = 0


class CoreRows(NamedTuple):
    """Model rows of one request.

    Attributes:
        tensors: Inputs of the core by name, ``[model rows, ...]`` each, and what goes past it.
        width: Padded length of the rows, by which the bucketed layout sorts.
        padded: Axis that is padded, for each tensor of the user's own model that has it.
    """

    tensors: dict[str, NDArray[Any]]
    width: int = 0
    padded: Mapping[str, int] = {}

    @property
    def row_count(self) -> int:
        """Number of model rows."""
        return len(next(iter(self.tensors.values())))


class RowMaker(Protocol):
    """Batch encoder of a task: a class in ``rows_*.py``."""

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """Return the core's tensors of each request, or its error."""
        ...


Arrays = Mapping[str, NDArray[Any]]
"""Outputs of the core, ``[model rows, ...]`` each, or of the ensemble, ``[n, ...]`` each."""

Parameters = Mapping[str, Any]


def make_int32(values: list[int], width: int = 1) -> NDArray[np.int32]:
    """Return integers as INT32 ``[n, width]``; `array` reads a list several times as fast as numpy.

    Raises:
        OverflowError: An integer has more than 32 bits.
    """
    return np.frombuffer(array("i", values), np.int32).reshape(-1, width)


NO_TICKET = (0, 0)
"""Ticket of a request that is not counted; otherwise it is an `in_flight.Ticket`."""
TICKET, PAYLOAD = "request_ticket", "request_payload"
"""Tensors INT64 ``[model rows, 2]`` and BYTES ``[model rows, 1]`` that go past the core."""
_SIZE = struct.Struct("<i")


def make_payload(options: str, sample: bytes) -> bytes:
    """Return the payload of a request; empty if both arguments are.

    Args:
        options: Parameters of the request as JSON, if it sent some as tensors.
        sample: Sample payload; see `runtime.sampling`.
    """
    text = options.encode()
    return _SIZE.pack(len(text)) + text + sample if options or sample else b""


def read_payload(payload: bytes) -> tuple[str, bytes]:
    """Return the options and the sample payload of a request's payload.

    Raises:
        struct.error, UnicodeDecodeError: It is none.
    """
    if not payload:
        return "", b""
    start = _SIZE.size + _SIZE.unpack_from(payload)[0]
    return payload[_SIZE.size : start].decode(), payload[start:]


def write_ticket(
    ticket: Sequence[int], payload: bytes, count: int
) -> dict[str, NDArray[np.generic]]:
    """Return `TICKET` and `PAYLOAD` for `count` model rows, without those that say nothing.

    The first row has the values, the others are zeros or empty.
    """
    tensors: dict[str, NDArray[np.generic]] = {}
    if ticket[1]:
        tensors[TICKET] = np.zeros((count, 2), np.int64)
        tensors[TICKET][0] = ticket
    if payload:
        tensors[PAYLOAD] = np.full((count, 1), b"", dtype=np.object_)
        tensors[PAYLOAD][0, 0] = payload
    return tensors
