"""What a core row brings past the core: the text its results are to be found in, token by token."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OUTSIDE, WORD_START, WORD_INSIDE = 0, 1, 2
"""A token that is not of the text (a special one, or of the question); one that begins a word;
one that goes on with the word of the token before."""

_HEADER = struct.Struct("<iii")


class Carry(NamedTuple):
    """What one core row brings.

    Attributes:
        row: the request's row it is made of, from 0.
        text: what the offsets count in; empty where an earlier core row of the same row has it.
        offsets: INT32 ``[tokens, 2]``, first character of each token and the one after its last.
        kinds: UINT8 ``[tokens]``: OUTSIDE, WORD_START or WORD_INSIDE.
    """

    row: int
    text: str
    offsets: NDArray[np.int32]
    kinds: NDArray[np.uint8]


Arrays = Mapping[str, NDArray[Any]]
"""A decoder's outputs of the core, ``[core rows, ...]`` each, or of the ensemble, ``[n, ...]``."""

Carries = Sequence[Carry]
Parameters = Mapping[str, Any]


def pack(carry: Carry) -> bytes:
    text = carry.text.encode("utf-8")
    header = _HEADER.pack(carry.row, len(carry.kinds), len(text))
    offsets = np.ascontiguousarray(carry.offsets, dtype="<i4").tobytes()
    return header + offsets + carry.kinds.astype(np.uint8).tobytes() + text


def unpack(data: bytes) -> Carry:
    row, tokens, size = _HEADER.unpack_from(data)
    start = _HEADER.size
    offsets = np.frombuffer(data, "<i4", 2 * tokens, start).reshape(tokens, 2)
    kinds = np.frombuffer(data, np.uint8, tokens, start + 8 * tokens)
    end = start + 9 * tokens
    return Carry(row, data[end : end + size].decode("utf-8"), offsets, kinds)
