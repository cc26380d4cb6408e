"""What travels between the steps of a generation beside token ids, as JSON.

A step after a decoupled model may read tensors of that model only: what postprocess needs of a
request goes through the core, with its first chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

TOKENIZER_FILE = "tokenizer.json"
CONTEXT_TOKENS = 6
"""Of the prompt, that an answer is decoded behind where it goes on with it: see `text_stream`."""

CANCELLED = "cancelled"
"""Finish reason of an answer that nobody waits for any more; else ``stop`` or ``length``."""
MIN_NAME, MAX_NAME = 16, 128
"""Characters of a request's id by which it can be cancelled: others may have shorter ones, too."""
REFUSED = "refused"
"""Finish reason between the steps of a request that the engine does not take."""


@dataclass(frozen=True)
class Order:
    """What preprocess asks the core for, beside the prompt's ids.

    Attributes:
        sampling: every parameter, checked.
        stream: whether the answer is sent piece by piece.
        cancel: id of another request, to give up; then there is nothing else to do. Else empty.
    """

    sampling: Mapping[str, Any]
    stream: bool
    cancel: str = ""

    def pack(self) -> str:
        """As one string."""
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Order:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Opening:
    """What postprocess must know of a request, once.

    Attributes:
        stops: strings that end the answer.
        context: the last ids of the prompt, see `text_stream`.
    """

    stream: bool
    stops: Sequence[str]
    context: Sequence[int]
    prompt_tokens: int


class Place(NamedTuple):
    """Of a chunk among all that the core sends: postprocess tells the core how far it is.

    Attributes:
        slot: of the core, see `in_flight`.
        number: of the chunk.
    """

    slot: int
    number: int


@dataclass(frozen=True)
class Chunk:
    """What the core sends of one request at a time, beside new token ids.

    Attributes:
        key: names the request between the steps; nobody else can guess it.
        cancel_at: where the core listens for keys of requests to give up, see `cancelling`.
        opening: with the first chunk.
        finish: why the answer ends here; empty before.
        cached_tokens: of the prompt, that the engine need not compute.
        logprobs: for each new token its logarithm of probability and those of the likeliest:
            ``[id, value, [[id, value], …]]``; None where they were not asked for.
        error: why the engine gives the request up; empty where it does not.
    """

    key: str
    cancel_at: str
    place: Place
    opening: Opening | None = None
    finish: str = ""
    cached_tokens: int = 0
    logprobs: Sequence[Sequence[Any]] | None = None
    error: str = ""

    def pack(self) -> str:
        """As one string."""
        fields = asdict(self)
        return json.dumps({name: value for name, value in fields.items() if value})

    @classmethod
    def unpack(cls, text: str | bytes) -> Chunk:
        fields = json.loads(text)
        opening = fields.pop("opening", None)
        place = Place(*fields.pop("place"))
        return cls(place=place, opening=None if opening is None else Opening(**opening), **fields)
