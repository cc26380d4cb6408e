"""Requests that the gate adds to the traffic's own: empty, at the limit, of other scripts, ..."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from triptych.core.reader import RequestReader
from triptych.core.samples import GateRequest, shown_text

EDGE_TEXTS = {
    "empty": "",
    "blank": " \t\n ",
    "one token": "a",
    "non-Latin scripts": "漢字かな交じり文 العربية עברית हिन्दी Ελληνικά русский 🙂👩‍👩‍👧",
    "repeated tokens": "the the the the " * 8,
    "control characters": "a\x00b\x01\x02\x7f\x1b[0m\u200b\u202e\ufeff c",
    "punctuation": "!?.,;:()[]{}<>/\\|@#$%^&*_-+=~`'\"",
}
EDGE_IMAGES = {"one pixel": (1, 1), "very wide": (120, 2)}
"""Width and height."""

SPECIAL_TOKENS = 12
"""Most special tokens that a text of its own is made of: some tokenizers reserve hundreds."""

FAR = 3
"""Far over the limit: so many times as long."""

_WORDS = ("a", "the", "x", "1", ".")


def edge_images(reader: RequestReader, example: GateRequest) -> list[GateRequest]:
    """Images in place of the example's, as far as the pipeline takes them."""
    (name,) = example.sent
    made = (
        reader.make_up({name: _bitmap(*size)}, example.parameters, shown)
        for shown, size in EDGE_IMAGES.items()
    )
    return reader.accepted([request for request in made if request is not None])


def edge_texts(
    reader: RequestReader, example: GateRequest, *, mask_token: str = ""
) -> list[GateRequest]:
    """Texts in place of the example's last input, as far as the pipeline takes them.

    Args:
        reader: of the pipeline.
        example: a request of the traffic.
        mask_token: put before each text, where the task needs it.
    """
    name = list(example.sent)[-1]

    def put(kind: str, text: str) -> GateRequest | None:
        text = f"{mask_token} {text}".strip(" ") if mask_token else text
        sent = {**example.sent, name: text}
        return reader.make_up(sent, example.parameters, f"{kind}: {shown_text(sent)}")

    made = [put(kind, text) for kind, text in EDGE_TEXTS.items()]
    for token in reader.special_tokens[:SPECIAL_TOKENS]:
        made.append(put("special token", f"one {token} of two"))
    made += _around_the_limit(reader, put)
    return reader.accepted([request for request in made if request is not None])


def _around_the_limit(
    reader: RequestReader, put: Callable[[str, str], GateRequest | None]
) -> Iterator[GateRequest | None]:
    def length(request: GateRequest | None) -> int:
        """Tokens of the longest core row; 0 where the request is refused."""
        if request is None:
            return 0
        (lengths,) = reader.untruncated_lengths([request])
        return max(lengths, default=0)

    text_of = _text_of_length(lambda text: length(put("", text)))
    if text_of is None:
        return
    limit = reader.max_length
    for kind, tokens in (
        ("at the limit", limit),
        ("one over the limit", limit + 1),
        ("far over the limit", FAR * limit),
    ):
        request = put(kind, text_of(tokens))
        if length(request) == tokens:
            yield request


def _text_of_length(length: Callable[[str], int]) -> Callable[[int], str] | None:
    """Makes a text so long that the longest core row has a given number of tokens."""
    for word in _WORDS:
        for unit in (f"{word} ", word):
            first, second, third = (length((unit * n).strip()) for n in (1, 2, 3))
            if first and second == first + 1 and third == first + 2:
                return lambda tokens, unit=unit, first=first: (  # type: ignore[misc]
                    (unit * max(1, tokens - first + 1)).strip()
                )
    return None


def _bitmap(width: int, height: int) -> bytes:
    """A BMP file: 24 bits a pixel, dark to light from left to right."""
    row = b"".join(bytes([x * 255 // width] * 3) for x in range(width))
    pixels = (row + bytes(-len(row) % 4)) * height
    head = struct.pack("<2sIHHI", b"BM", 54 + len(pixels), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + pixels
