"""Requests of the accuracy gate, and the rows to calibrate with.

- `split_traffic` divides the traffic between the gate and calibration.
- `edge_texts` and `edge_images` add edge cases: empty, at the length limit, other scripts, ...
- `probe_requests` makes the general probe: varied texts that are the same for every pipeline. The
  traffic may be narrower than later requests, and a core of lower precision is fitted to it. The
  texts cover many topics, languages and scripts, from one word to about 250 words, with numbers,
  code, logs, addresses and noisy text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from triptych.base.tensors import TokenRow
from triptych.core.reader import RequestReader
from triptych.core.requests import (
    MIN_RECOMMENDED_ROWS,
    GateRequest,
    Sample,
    hash_inputs,
    preview_text,
)
from triptych.tasks.prompts import PROMPT, ROLE

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
"""Width and height of the edge-case images, in pixels."""

SPECIAL_TOKENS = 12
"""Maximum number of special tokens that get an edge case, because some tokenizers reserve hundreds.
"""

FAR = 3
"""Length of a text far over the limit, as a multiple of the limit."""

BETWEEN = 32, 4
"""Length of the shortest text between a few tokens and the limit, and the factor to the next one. A
model may compute longer texts in another way, which an export with short rows does not show."""

_WORDS = ("a", "the", "x", "1", ".", "in", "2", "of", "b", "and", "7")
MIXED = 13
"""Number of words after which a text of a given length repeats itself."""


def edge_images(
    reader: RequestReader,
    example: GateRequest,
    sizes: Mapping[str, tuple[int, int]] = EDGE_IMAGES,
) -> list[GateRequest]:
    """Return images of these sizes in place of the example's, as far as the pipeline accepts them.

    Each size, width and height in pixels, has the name of an edge case.
    """
    (name,) = example.sent
    made = (
        reader.make_synthetic({name: make_bitmap(*size)}, example.parameters, preview)
        for preview, size in sizes.items()
    )
    return reader.accepted([request for request in made if request is not None])


def edge_texts(
    reader: RequestReader, example: GateRequest, *, mask_token: str = ""
) -> list[GateRequest]:
    """Return edge-case texts in place of the example's last input, as far as they are accepted.

    Args:
        example: A request of the traffic.
        mask_token: Token to put in front of each text, if the task needs one.
    """
    name = list(example.sent)[-1]

    def put(kind: str, text: str) -> GateRequest | None:
        text = f"{mask_token} {text}".strip(" ") if mask_token else text
        sent = {**example.sent, name: text}
        return reader.make_synthetic(sent, example.parameters, f"{kind}: {preview_text(sent)}")

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
    tokens, factor = BETWEEN
    while tokens < limit:
        request = put("between", text_of(tokens))
        if length(request) == tokens:
            yield request
        tokens *= factor
    for kind, tokens in (
        ("at the limit", limit),
        ("one over the limit", limit + 1),
        ("far over the limit", FAR * limit),
    ):
        request = put(kind, text_of(tokens))
        if length(request) == tokens:
            yield request


def _text_of_length(length: Callable[[str], int]) -> Callable[[int], str] | None:
    """Return a function that makes a text whose longest core row has a given number of tokens.

    The text has several words if possible, because equal tokens show few errors of attention.
    """

    def grows(units: Sequence[str]) -> bool:
        """Check that each unit after the first adds one token."""
        sizes = [length("".join(units[:count]).strip()) for count in range(1, len(units) + 1)]
        return sizes[0] > 0 and sizes == list(range(sizes[0], sizes[0] + len(units)))

    single = [unit for word in _WORDS for unit in (f"{word} ", word) if grows([unit] * 3)]
    spaced = [unit for unit in single if unit.endswith(" ")]
    mixed = Random(0).choices(spaced, k=MIXED) if spaced else []
    for units in (mixed, single[:1]):
        if units and grows([*units, *units, *units[:1]]):
            first = length(units[0].strip())
            return lambda tokens, units=units, first=first: (  # type: ignore[misc]
                "".join(islice(cycle(units), max(1, tokens - first + 1))).strip()
            )
    return None


def make_bitmap(width: int, height: int) -> bytes:
    """Return a BMP file with 24 bits per pixel, dark to light from left to right."""
    row = b"".join(bytes([x * 255 // width] * 3) for x in range(width))
    pixels = (row + bytes(-len(row) % 4)) * height
    head = struct.pack("<2sIHHI", b"BM", 54 + len(pixels), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + pixels


TEXTS_FILE = Path(__file__).with_name("probe.yaml")
PARAGRAPH = 3
"""Number of a topic's texts that form a paragraph."""

LONG_TOPICS = 3
"""Number of consecutive topics in a long text."""
LONG_EVERY = 6
"""Number of topics per long text."""

NOISY_EVERY = 12
MASKED_WORD = 8
"""Largest index of the word that the mask token replaces, because a long text may be truncated."""


class ProbeText(NamedTuple):
    """A text with two questions: one that it may answer, and one about another topic."""

    text: str
    question: str
    other_question: str


@cache
def probe_texts() -> tuple[ProbeText, ...]:
    """Return the texts in a fixed order, each once."""
    topics: list[dict[str, Any]] = yaml.safe_load(TEXTS_FILE.read_text(encoding="utf-8"))["topics"]
    made: dict[str, ProbeText] = {}
    for place, topic in enumerate(topics):
        following = list(islice(cycle(topics), place, place + LONG_TOPICS))
        for text in _texts_of(topic["texts"], [] if place % LONG_EVERY else following):
            row = ProbeText(text, topic["question"], following[1]["question"])
            made.setdefault(text, row)
    rows = list(made.values())
    noisy = [row._replace(text=_noisy(row.text)) for row in rows[::NOISY_EVERY]]
    return (*rows, *(row for row in noisy if row.text not in made))


def probe_requests(
    reader: RequestReader, example: GateRequest, *, mask_token: str = ""
) -> tuple[GateRequest, ...]:
    """Return a request of the task for each text that the pipeline accepts.

    If the task reads two texts, the last is the probe's and the first is a question, every second
    time about another topic. Rows that a hook or the batch encoder rejects are omitted.

    Args:
        example: A request of the traffic, whose parameters are used.
        mask_token: Token that replaces a word, if the task needs one.
    """
    names = list(example.sent)
    requests = []
    for place, row in enumerate(probe_texts()):
        question = row.other_question if place % 2 else row.question
        text = _masked(row.text, mask_token) if mask_token else row.text
        sent = {**dict.fromkeys(names, question), names[-1]: text}
        requests.append(reader.make_synthetic(sent, example.parameters, preview_text(sent)))
    taken = reader.accepted([request for request in requests if request is not None])
    return tuple(replace(request, edge=False) for request in taken)


def _texts_of(texts: list[str], following: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of a topic, a paragraph of some of them, and one of several topics."""
    yield from texts
    if len(texts) > PARAGRAPH:
        yield " ".join(texts[:PARAGRAPH])
    if following:
        yield "\n\n".join(" ".join(topic["texts"]) for topic in following)


def _noisy(text: str) -> str:
    """Return `text` as typed in haste: lower case, letters swapped or missing, no final mark."""
    words = text.lower().split()
    for place, word in enumerate(words):
        if len(word) > 3 and place % 3 == 0:
            words[place] = word[0] + word[2] + word[1] + word[3:]
        elif len(word) > 4 and place % 3 == 1:
            words[place] = word[:-2] + word[-1]
    return " ".join(words).rstrip(".!?")


def _masked(text: str, mask_token: str) -> str:
    words = text.split(" ")
    words[min(len(words) // 2, MASKED_WORD)] = mask_token
    return " ".join(words)


VARIED_ROWS = 32
"""Maximum number of gate rows that are repeated with each prompt and each role."""


def varied_requests(
    reader: RequestReader, requests: Sequence[GateRequest], parameter: str, values: Sequence[str]
) -> list[GateRequest]:
    """Return the first `VARIED_ROWS` requests with each of a parameter's values that they lack."""
    made = [
        replace(
            request,
            parameters={**request.parameters, parameter: value},
            edge=True,
            preview=f"{parameter} {value}: {request.preview}",
        )
        for value in values
        for request in requests[:VARIED_ROWS]
        if request.parameters.get(parameter) != value
    ]
    return reader.accepted(made)


GATE_ROWS = 400
GATE_IMAGES = 64
CALIBRATION_ROWS = 512


@dataclass(frozen=True)
class GateRows:
    """Rows of the gate and rows to calibrate with."""

    requests: tuple[GateRequest, ...]  # Requests of the gate, edge cases first
    calibration: tuple[Sample, ...]  # Core rows of the traffic that the gate does not use
    # Requests that every core of lower precision is additionally checked with; none for images.
    probe: tuple[GateRequest, ...]

    def __str__(self) -> str:
        gate = sum(not request.edge for request in self.requests)
        few = ""
        if gate < MIN_RECOMMENDED_ROWS:
            few = f"; at least {MIN_RECOMMENDED_ROWS} are recommended for the gate"
        return (
            f"{gate} for the gate, {len(self.requests) - gate} edge cases, "
            f"{len(self.calibration)} rows for calibration{few}"
        )


def split_traffic(
    inputs: Sequence[Mapping[str, str | bytes]], *, max_rows: int = GATE_ROWS
) -> tuple[list[int], list[int]]:
    """Return the indices of the rows of gate and of calibration, two thirds and one third.

    A hash of the inputs decides, so equal inputs are on the same side, and a row stays on its side
    if traffic is added. The gate has at least one row. If there are more than `max_rows`, it
    has those with the lowest hashes, once each. Calibration is in the order of the hashes, so any
    part of it is as good as another.
    """
    hashes = [int(hash_inputs(row), 16) for row in inputs]
    first = {value: place for place, value in reversed(list(enumerate(hashes)))}
    gate = sorted(value for value in first if value % 3) or sorted(first)
    taken = set(gate)
    rest = sorted((value, place) for place, value in enumerate(hashes) if value not in taken)
    return sorted(first[value] for value in gate[:max_rows]), [place for _, place in rest]


def gate_rows(
    reader: RequestReader,
    requests: Sequence[GateRequest],
    *,
    images: bool,
    mask_token: str = "",
    prompts: Mapping[str, str],
    roles: Sequence[str] = (),
) -> GateRows:
    """Return the rows of a pipeline's gate and calibration.

    Args:
        requests: Requests of the traffic, with core rows.
        mask_token: Token to put in front of edge-case texts, if the task needs one.
        prompts: Text of each prompt by name; rows of the traffic are repeated with each of them.
        roles: Roles of texts, for which the same holds; the prompts are then those of the roles.
    """
    if images:
        gate, rest = split_traffic([request.sent for request in requests], max_rows=GATE_IMAGES)
        edges = edge_images(reader, requests[0])
        probe: tuple[GateRequest, ...] = ()
    else:
        gate, rest = split_traffic([request.inputs for request in requests])
        edges = edge_texts(reader, requests[gate[0]], mask_token=mask_token)
        named = sorted(name for name, text in prompts.items() if text)
        parameter, values = (ROLE, roles) if roles else (PROMPT, named)
        edges += varied_requests(reader, [requests[p] for p in gate], parameter, values)
        probe = probe_requests(reader, requests[gate[0]], mask_token=mask_token)
    calibration = (row for place in rest for row in requests[place].rows)
    return GateRows(
        (*edges, *(requests[place] for place in gate)),
        tuple(islice(calibration, CALIBRATION_ROWS)),
        probe,
    )


DEVICE_ROWS = 32
"""Maximum number of rows for the check on the device that serves."""
DEVICE_TOKENS = 4096
"""Maximum number of tokens of these rows, so that the check takes seconds."""
_MADE_LABELS = ("science", "sports", "business")
_MADE_IMAGES = {f"{size} pixels": size for size in ((64, 48), (224, 224))}


def device_rows(
    reader: RequestReader, example: GateRequest, *, images: bool, mask_token: str = ""
) -> tuple[GateRequest, ...]:
    """Return edge cases and made-up rows, without values of the traffic.

    Args:
        example: A request of the traffic, whose inputs and parameters are replaced.
        mask_token: Token that replaces a word, if the task needs one.
    """
    made_labels = {
        name: list(_MADE_LABELS) for name in example.parameters.keys() - reader.parameters.keys()
    }
    example = replace(example, parameters={**made_labels, **reader.parameters})
    if images:
        return tuple(edge_images(reader, example, {**EDGE_IMAGES, **_MADE_IMAGES}))
    first = probe_texts()[0]
    neutral = {**dict.fromkeys(example.sent, first.question), list(example.sent)[-1]: first.text}
    example = replace(example, sent=neutral)
    probe = probe_requests(reader, example, mask_token=mask_token)
    edges = edge_texts(reader, example, mask_token=mask_token)
    step = max(1, len(probe) // max(1, DEVICE_ROWS - len(edges)))
    rows, tokens = list[GateRequest](), 0
    for request in (*edges, *probe[::step]):
        own = sum(len(row.ids) for row in request.rows if isinstance(row, TokenRow))
        if len(rows) < DEVICE_ROWS and tokens + own <= DEVICE_TOKENS:
            rows.append(request)
            tokens += own
    return tuple(rows)


NEAR = 0.8
"""Share of common trigrams above which two texts are near duplicates."""

LONGEST = 400
"""Maximum number of characters of a text that are compared."""


@dataclass(frozen=True)
class Variety:
    """Diversity of texts, ignoring numbers in them."""

    words: int  # Number of different words; in scripts without blanks, of whole phrases
    vocabulary_share: float  # Number of different words divided by the number of all words
    near_duplicates: float  # Share of the texts that are near duplicates of an earlier text


def measure_diversity(requests: Sequence[GateRequest]) -> Variety | None:
    """Return the diversity of the traffic among the gate's `requests`; None without words."""
    texts = [
        _plain(" ".join(value for value in request.inputs.values() if isinstance(value, str)))
        for request in requests
        if not request.edge
    ]
    words = [word for text in texts for word in re.findall(r"\w+", text)]
    if not words:
        return None
    vocabulary = set(words)
    return Variety(
        words=len(vocabulary),
        vocabulary_share=round(len(vocabulary) / len(words), 4),
        near_duplicates=round(_near_duplicates(texts), 4),
    )


def _plain(text: str) -> str:
    return re.sub(r"\d+", "0", text[:LONGEST].casefold())


def _near_duplicates(texts: Sequence[str]) -> float:
    """Return the share of texts that are near duplicates of an earlier text."""
    every = [{f"  {text} "[place : place + 3] for place in range(len(text) + 1)} for text in texts]
    near = [
        any(_is_near(trigrams, earlier) for earlier in every[:place])
        for place, trigrams in enumerate(every)
    ]
    return sum(near) / len(near)


def _is_near(some: set[str], others: set[str]) -> bool:
    least, most = sorted((len(some), len(others)))
    if least < NEAR * most:  # texts of very different lengths cannot be near duplicates
        return False
    shared = len(some & others)
    return shared >= NEAR * (least + most - shared)
