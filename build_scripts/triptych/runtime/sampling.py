"""Which rows of the requests are sampled, and their inputs on the way past the core.

A sampled request has a longer ticket: after the numbers of `in_flight` each row has words of the
passenger, the inputs as the client sent them. So the answer and what was asked meet in postprocess,
what gets lost leaves nothing behind, and a request that is not sampled costs a comparison.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .in_flight import Ticket

LARGEST = 1 << 20
"""Most bytes of the sampled rows of one request: more are counted, and not carried."""

_WORD = 8
_NUMBERS = len(Ticket._fields)


class SampledRows(NamedTuple):
    """What preprocess knows of the sampled rows of one request.

    Attributes:
        at: when they came, in seconds since 1970.
        rows: their places in the request.
        columns: input name to the value of each of them, as it was sent; empty where they were too
            large to be carried.
        parameters: of the request, JSON text.
    """

    at: float
    rows: Sequence[int]
    columns: Mapping[str, Sequence[bytes]]
    parameters: str


class Drawing:
    """Draws each row with the same probability, whatever request it is in.

    Args:
        rate: the probability.
        source: of chance.
    """

    def __init__(self, rate: float, source: random.Random | None = None) -> None:
        self._keep = math.log1p(-rate) if rate < 1 else -math.inf
        self._random = source or random.Random()
        self._before_next = self._gap()

    def draw(self, columns: Mapping[str, Sequence[str | bytes]], parameters: str) -> bytes:
        """The passenger of a request with these inputs; empty where none of its rows is drawn."""
        count = len(next(iter(columns.values())))
        if self._before_next >= count:
            self._before_next -= count
            return b""
        rows = []
        while self._before_next < count:
            rows.append(self._before_next)
            self._before_next += 1 + self._gap()
        self._before_next -= count
        return _pack(rows, columns, parameters)

    def _gap(self) -> int:
        """Rows to pass over before the next that is drawn: geometrically distributed."""
        return int(math.log(1.0 - self._random.random()) / self._keep)


def _pack(
    rows: Sequence[int], columns: Mapping[str, Sequence[str | bytes]], parameters: str
) -> bytes:
    values = [columns[name][row] for name in columns for row in rows]
    data = [value.encode() if isinstance(value, str) else value for value in values]
    if sum(map(len, data)) + len(parameters) > LARGEST:
        data, columns = [], {}
    head = {
        "at": time.time(),
        "rows": rows,
        "names": list(columns),
        "sizes": [len(value) for value in data],
        "parameters": parameters if data else "",
    }
    text = json.dumps(head).encode()
    return len(text).to_bytes(_WORD, "little") + text + b"".join(data)


def with_passenger(ticket: NDArray[np.int64], passenger: bytes) -> NDArray[np.int64]:
    """``[core rows, 4]`` with the passenger behind its numbers, spread over the rows."""
    count = len(ticket)
    padded = passenger.ljust(-(-len(passenger) // (_WORD * count)) * _WORD * count, b"\0")
    words = np.frombuffer(padded, dtype="<i8").reshape(count, -1)
    return np.concatenate([ticket, words], axis=1)


def passenger_of(ticket: NDArray[np.int64]) -> bytes:
    """What `with_passenger` put behind the numbers; empty where there is nothing."""
    return ticket[:, _NUMBERS:].astype("<i8").tobytes()


def unpack(passenger: bytes) -> SampledRows:
    """The sampled rows of a passenger."""
    start = _WORD + int.from_bytes(passenger[:_WORD], "little")
    head = json.loads(passenger[_WORD:start])
    rows, values = head["rows"], []
    for size in head["sizes"]:
        values.append(passenger[start : start + size])
        start += size
    columns = {
        name: values[place * len(rows) : (place + 1) * len(rows)]
        for place, name in enumerate(head["names"])
    }
    return SampledRows(head["at"], rows, columns, head["parameters"])
