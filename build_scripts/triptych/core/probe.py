"""The general probe: varied texts that are the same for every pipeline, whatever its own traffic.

Traffic may be narrower than what users send later, and a core of lower precision is fitted to it.
The texts are of many topics, languages and scripts, from a word to some 250 words, with numbers,
code, logs, addresses and noisy ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from triptych.core.reader import RequestReader
from triptych.core.samples import GateRequest, shown_text

TEXTS_FILE = Path(__file__).with_name("probe.yaml")
PARAGRAPH = 3
"""Texts of a topic that make a paragraph, where it has more."""

LONG_TOPICS = 3
LONG_EVERY = 6
"""One long text holds so many topics in a row, and every so many topics there is one."""

NOISY_EVERY = 12
MASKED_WORD = 8
"""The mask token stands for at most this word of a text: a long text may be cut off."""


class ProbeText(NamedTuple):
    """One text, with two questions: one that it may answer, and one of another topic."""

    text: str
    question: str
    other_question: str


@cache
def probe_texts() -> tuple[ProbeText, ...]:
    """The texts, in a fixed order, each once."""
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
    """A request of the task for each text, as far as the pipeline takes it.

    Where the task reads two texts, the last is the probe's and the first a question, every second
    time of another topic. Rows that a hook or the row maker refuses are left out.

    Args:
        reader: of the pipeline.
        example: a request of the traffic, whose parameters they have.
        mask_token: put in place of a word, where the task needs it.
    """
    names = list(example.sent)
    requests = []
    for place, row in enumerate(probe_texts()):
        question = row.other_question if place % 2 else row.question
        text = _masked(row.text, mask_token) if mask_token else row.text
        sent = {**dict.fromkeys(names, question), names[-1]: text}
        requests.append(reader.make_up(sent, example.parameters, shown_text(sent)))
    taken = reader.accepted([request for request in requests if request is not None])
    return tuple(replace(request, edge=False) for request in taken)


def _texts_of(texts: list[str], following: list[dict[str, Any]]) -> Iterator[str]:
    """The texts of a topic, some of them as a paragraph, and those of topics in a row."""
    yield from texts
    if len(texts) > PARAGRAPH:
        yield " ".join(texts[:PARAGRAPH])
    if following:
        yield "\n\n".join(" ".join(topic["texts"]) for topic in following)


def _noisy(text: str) -> str:
    """`text` as typed in haste: lower case, two letters swapped, one missing, no last mark."""
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
