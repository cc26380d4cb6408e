"""Which rows decide: the traffic split between gate and calibration, and the rows made up."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from triptych.requests.feeds import Sample
from triptych.requests.reader import ReadRequest
from triptych.requests.samples import GateRequest, hash_inputs, shown_text
from triptych.runtime.row_types import RowInputs
from triptych.tensors import TokenRow

GATE_ROWS = 400
GATE_IMAGES = 64
CALIBRATION_ROWS = 512

EDGE_TEXTS = {
    "empty": "",
    "blank": " \t\n ",
    "one token": "a",
    "non-Latin scripts": "漢字かな交じり文 العربية עברית हिन्दी Ελληνικά русский 🙂👩‍👩‍👧",
    "repeated tokens": "the the the the " * 8,
    "control characters": "a\x00b\x01\x02\x7f\x1b[0m\u200b\u202e\ufeff c",
    "punctuation": "!?.,;:()[]{}<>/\\|@#$%^&*_-+=~`'\"",
}
"""Rows the gate adds to the traffic's own, by what is special about them."""

EDGE_IMAGES = {"one pixel": (1, 1), "very wide": (120, 2)}
"""The same of images: width and height."""

FAR = 3
"""Far over the limit: so many times as long."""

MakeUp = Callable[[Mapping[str, Any], Mapping[str, Any]], ReadRequest | None]
"""The request of inputs and parameters; None where the pipeline refuses it."""

_WORDS = ("a", "the", "x", "1", ".")


@dataclass(frozen=True)
class GateRows:
    """What decides whether an artifact ships, and what it may be fitted to.

    Attributes:
        requests: for the gate, made-up ones first.
        calibration: core rows of the traffic that the gate does not use.
    """

    requests: tuple[GateRequest, ...]
    calibration: tuple[Sample, ...]


def split_traffic(
    inputs: Sequence[Mapping[str, Any]], *, most: int = GATE_ROWS
) -> tuple[list[int], list[int]]:
    """Places of the rows of gate and of calibration: two thirds and one, by a hash of the inputs.

    Equal inputs are on the same side, and a row stays on its side whatever is added to the
    traffic. The gate has at least one row. Of more than `most`, it has those with the lowest
    hashes, once each. Calibration is in the order of the hashes: any part of it is as good.
    """
    hashes = [int(hash_inputs(row), 16) for row in inputs]
    first = {value: place for place, value in reversed(list(enumerate(hashes)))}
    gate = sorted(value for value in first if value % 3) or sorted(first)
    taken = set(gate)
    rest = sorted((value, place) for place, value in enumerate(hashes) if value not in taken)
    return sorted(first[value] for value in gate[:most]), [place for _, place in rest]


def text_rows(
    asked: Sequence[ReadRequest],
    made: Sequence[Sequence[Any]],
    maker: Any,
    whole: Any,
    make_up: MakeUp,
    *,
    mask_token: str = "",
) -> GateRows:
    """The rows of a text task.

    Args:
        asked: the traffic's requests, of one row each.
        made: the core rows of each, as `token_rows` of the row maker gives them.
        maker: the task's row maker as it will run.
        whole: one that cuts nothing off.
        make_up: makes requests that nobody sent.
        mask_token: put before made-up texts, where the task needs it.
    """
    gate, calibration = split_traffic([_inputs(one.ask) for one in asked])
    edges = dict(_edges(asked[gate[0]], make_up, maker.max_length, whole, mask_token))
    requests = [
        text_request(edge, rows, edge=True, shown=f"{kind}: {shown_text(edge.sent)}")
        for (kind, edge), rows in zip(
            edges.items(), maker.token_rows([edge.ask for edge in edges.values()]), strict=True
        )
        # The task refuses some of them, and some tokenizers make nothing of others.
        if not isinstance(rows, Exception) and all(len(row.ids) for row in rows)
    ]
    requests += [text_request(asked[place], made[place]) for place in gate]
    rest = (row for place in calibration for row in _core_rows(made[place]))
    return GateRows(tuple(requests), tuple(islice(rest, CALIBRATION_ROWS)))


def image_rows(
    asked: Sequence[ReadRequest],
    names: Sequence[str],
    made: Sequence[Any],
    maker: Any,
    make_up: MakeUp,
) -> GateRows:
    """The rows of an image task.

    Args:
        asked: the traffic's requests, of one image each.
        names: of the images, for tables.
        made: what the row maker gives for each.
        maker: the task's row maker.
        make_up: makes requests that nobody sent.
    """
    (name,) = asked[0].sent
    found = {
        shown: make_up({name: _bitmap(*size)}, asked[0].ask.parameters)
        for shown, size in EDGE_IMAGES.items()
    }
    edges = {shown: edge for shown, edge in found.items() if edge is not None}
    requests = [
        image_request(edge, rows, shown, edge=True)
        for (shown, edge), rows in zip(
            edges.items(), maker.make([edge.ask for edge in edges.values()]), strict=True
        )
        if not isinstance(rows, Exception)
    ]
    gate, calibration = split_traffic([one.sent for one in asked], most=GATE_IMAGES)
    requests += [image_request(asked[place], made[place], names[place]) for place in gate]
    rest = (pixels for place in calibration for pixels in made[place].tensors["pixels"])
    return GateRows(tuple(requests), tuple(islice(rest, CALIBRATION_ROWS)))


def image_request(asked: ReadRequest, rows: Any, shown: str, *, edge: bool = False) -> GateRequest:
    """A request of one image and its pixels, as the row maker gives them."""
    return GateRequest(
        sent=asked.sent,
        inputs=_inputs(asked.ask),
        parameters=asked.ask.parameters,
        rows=tuple(rows.tensors["pixels"]),
        carries=(),
        edge=edge,
        shown=shown,
    )


def text_request(
    asked: ReadRequest, rows: Sequence[Any], *, edge: bool = False, shown: str | None = None
) -> GateRequest:
    """A request of one row and its core rows, as `token_rows` of the row maker gives them."""
    return GateRequest(
        sent=asked.sent,
        inputs=_inputs(asked.ask),
        parameters=asked.ask.parameters,
        rows=tuple(_core_rows(rows)),
        carries=tuple(row.carry for row in rows if row.carry),
        edge=edge,
        shown=shown_text(asked.sent) if shown is None else shown,
    )


def _core_rows(rows: Sequence[Any]) -> Iterator[TokenRow]:
    for row in rows:
        yield TokenRow(tuple(row.ids), row.first_segment)


def _inputs(ask: RowInputs) -> dict[str, Any]:
    return {name: values[0] for name, values in ask.columns.items()}


def _edges(
    example: ReadRequest, make_up: MakeUp, limit: int, whole: Any, mask_token: str
) -> Iterator[tuple[str, ReadRequest]]:
    """Made-up requests: each text in place of the example's last input, the others as they are."""
    name = list(example.sent)[-1]

    def put(text: str) -> ReadRequest | None:
        text = f"{mask_token} {text}".strip(" ") if mask_token else text
        return make_up({**example.sent, name: text}, example.ask.parameters)

    for kind, text in EDGE_TEXTS.items():
        if (edge := put(text)) is not None:
            yield kind, edge
    text_of = _text_of_length(put, whole)
    if text_of is None:
        return
    for kind, tokens in (
        ("at the limit", limit),
        ("one over the limit", limit + 1),
        ("far over the limit", FAR * limit),
    ):
        edge = put(text_of(tokens))
        if edge is not None and _length(edge, whole) == tokens:
            yield kind, edge


def _text_of_length(
    put: Callable[[str], ReadRequest | None], whole: Any
) -> Callable[[int], str] | None:
    """Makes a text so long that the longest core row has a given number of tokens."""
    for word in _WORDS:
        for unit in (f"{word} ", word):
            first, second, third = (_length(put((unit * n).strip()), whole) for n in (1, 2, 3))
            if first and second == first + 1 and third == first + 2:
                return lambda tokens, unit=unit, first=first: (  # type: ignore[misc]
                    (unit * max(1, tokens - first + 1)).strip()
                )
    return None


def _length(asked: ReadRequest | None, whole: Any) -> int:
    """Tokens of the longest core row; 0 where the request is refused."""
    if asked is None:
        return 0
    (rows,) = whole.token_rows([asked.ask])
    return 0 if isinstance(rows, Exception) else max(len(row.ids) for row in rows)


def _bitmap(width: int, height: int) -> bytes:
    """A BMP file: 24 bits a pixel, dark to light from left to right."""
    row = b"".join(bytes([x * 255 // width] * 3) for x in range(width))
    pixels = (row + bytes(-len(row) % 4)) * height
    head = struct.pack("<2sIHHI", b"BM", 54 + len(pixels), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + pixels
