"""Messages between the steps of text generation, and the interface of the engines.

A step after a decoupled model can only read tensors of that model. Whatever postprocess needs to
know about a request therefore travels through the core, with the first chunk.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MODEL_FOLDER = "weights"
"""Beside the core's files: what the engine reads."""
ADAPTERS_FOLDER = "adapters"
"""In it: a folder for each LoRA adapter, by its name."""


class Delta(NamedTuple):
    """New tokens of one answer.

    Attributes:
        token_ids: at least one, unless the answer ends.
        finish: ``stop`` or ``length`` where the answer ends here; else empty.
        cached_tokens: of the prompt, found in the prefix cache.
        logprobs: see `generation_wire.Chunk`.
    """

    token_ids: Sequence[int]
    finish: str = ""
    cached_tokens: int = 0
    logprobs: Sequence[Sequence[Any]] | None = None

    def then(self, other: Delta) -> Delta:
        """This one and the next of the same answer as one."""
        known = [one for one in (self.logprobs, other.logprobs) if one is not None]
        return Delta(
            [*self.token_ids, *other.token_ids],
            other.finish,
            max(self.cached_tokens, other.cached_tokens),
            [each for one in known for each in one] if known else None,
        )


NOTHING = Delta([])


class Waiting:
    """What an engine made of an answer, until it is sent.

    Args:
        tokens: that are sent at a time, or more; the first goes at once, and the end waits for
            none.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._wanted = 1
        self._delta = NOTHING

    def add(self, delta: Delta) -> None:
        self._delta = self._delta.then(delta)

    @property
    def enough(self) -> bool:
        """Whether it is time to send it."""
        return self.ends or len(self._delta.token_ids) >= self._wanted

    @property
    def ends(self) -> bool:
        """Whether the answer ends with it."""
        return bool(self._delta.finish)

    def take(self) -> Delta:
        """All of it."""
        delta, self._delta, self._wanted = self._delta, NOTHING, self._tokens
        return delta


class Load(NamedTuple):
    """What an engine has to do.

    Attributes:
        running: requests in its batch.
        waiting: requests that have no place in it yet.
        kv_cache_usage_ratio: of the KV cache that running requests hold, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage_ratio: float = 0.0


OnLoad = Callable[[Load], None]


class GenerationEngine(Protocol):
    """One engine; all its methods are called on one asyncio loop.

    Args:
        settings: of the core, see `generation.render`.
        folder: of the model's files.
        on_load: told the engine's load whenever it changes, on any thread.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, on_load: OnLoad) -> None: ...

    async def start(self) -> None:
        """Load the model; the engine is ready afterwards."""

    def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """The answer to a prompt, token by token; whoever closes it ends the work on it.

        Raises:
            ValueError: the engine cannot take the request.
        """

    def close(self) -> None:
        """Give up all work and end."""


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


MAX_KEY = 256


class CancelInbox:
    """Where the core hears of requests to give up.

    Args:
        on_key: called on the loop with each key.
    """

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self.name = f"triptych-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._on_key = on_key

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear from now on; to be called on the loop."""
        loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._on_key(self._socket.recv(MAX_KEY).decode("ascii", "replace"))

    def close(self) -> None:
        self._socket.close()


class CancelSender:
    """Tells cores which requests to give up."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, inbox: str, key: str) -> None:
        """Tell once; an inbox that is full just now is told with the request's next chunk."""
        with suppress(OSError):
            self._socket.sendto(key.encode("ascii"), _address(inbox))


def _address(name: str) -> bytes:
    return b"\0" + name.encode("ascii")


def plain_logprobs(
    ids: Sequence[int], found: Any, count: int | None
) -> Sequence[Sequence[Any]] | None:
    """For each token its own and those of the `count` likeliest.

    Args:
        ids: of the new tokens.
        found: for each of them, token to an object with `logprob` and `rank`; None for none.
        count: as the request has it; None where it asks for none.
    """
    if not found or count is None:
        return None
    plain = []
    for token, one in zip(ids, found, strict=True):
        ranked = sorted(one.items(), key=lambda item: item[1].rank or 0)
        likeliest = [[other, value.logprob] for other, value in ranked[:count]]
        plain.append([token, one[token].logprob, likeliest])
    return plain
