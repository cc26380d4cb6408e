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
"""Folder beside the core's files with the files of the engine's model."""
ADAPTERS_FOLDER = "adapters"
"""Folder in `MODEL_FOLDER` with one folder for each LoRA adapter."""


class Delta(NamedTuple):
    """New tokens of one answer.

    Attributes:
        token_ids: New token ids; at least one, unless the answer ends.
        finish: ``stop`` or ``length`` if the answer ends here; else empty.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        logprobs: Log-probabilities in the form of `CoreChunk.logprobs`.
    """

    token_ids: Sequence[int]
    finish: str = ""
    cached_tokens: int = 0
    logprobs: Sequence[Sequence[Any]] | None = None

    def then(self, other: Delta) -> Delta:
        """Return this delta and the next one of the same answer as one."""
        known = [logprobs for logprobs in (self.logprobs, other.logprobs) if logprobs is not None]
        return Delta(
            [*self.token_ids, *other.token_ids],
            other.finish,
            max(self.cached_tokens, other.cached_tokens),
            [entry for logprobs in known for entry in logprobs] if known else None,
        )


NOTHING = Delta([])


class PendingTokens:
    """New tokens of an answer that have not been sent.

    Args:
        tokens: Minimum number of tokens to send at a time. The first token and the end of the
            answer are sent at once.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._wanted = 1
        self._delta = NOTHING

    def add(self, delta: Delta) -> None:
        self._delta = self._delta.then(delta)

    @property
    def enough(self) -> bool:
        """Whether there are enough tokens to send."""
        return self.ends or len(self._delta.token_ids) >= self._wanted

    @property
    def ends(self) -> bool:
        """Whether the answer ends with these tokens."""
        return bool(self._delta.finish)

    def take(self) -> Delta:
        """Return all tokens and remove them."""
        delta, self._delta, self._wanted = self._delta, NOTHING, self._tokens
        return delta


class EngineLoad(NamedTuple):
    """Load of an engine.

    Attributes:
        running: Number of requests in its batch.
        waiting: Number of requests that wait for a place in the batch.
        kv_cache_usage_ratio: Share of the KV cache that running requests hold, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage_ratio: float = 0.0


OnLoad = Callable[[EngineLoad], None]


class GenerationEngine(Protocol):
    """One engine; all its methods are called on one asyncio loop.

    Args:
        settings: Settings of the core.
        folder: Folder with the model's files.
        on_load: Function called with the engine's load when it changes, and at least once per
            second while the engine makes progress, on any thread.
    """

    def __init__(self, settings: Mapping[str, object], folder: Path, on_load: OnLoad) -> None: ...

    async def start(self) -> None:
        """Load the model."""

    def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, object]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the answer to a prompt, token by token; closing the generator ends the work.

        Raises:
            ValueError: The engine cannot process the request.
        """

    def find_death(self) -> str:
        """Return why the engine has ended, in a few words; empty while it runs."""

    def close(self) -> None:
        """Cancel all work and stop the engine."""


TOKENIZER_FILE = "tokenizer.json"
CONTEXT_TOKENS = 6
"""Number of prompt tokens with which an answer is decoded; see `text_stream`."""

CANCELLED = "cancelled"
"""Finish reason of an answer whose client has left; else ``stop`` or ``length``."""
LEFT = "left "
"""Begin of the message that cancels a request whose client has left; its key follows."""
MIN_NAME, MAX_NAME = 16, 128
"""Minimum and maximum number of characters of a request id that can be canceled. Shorter ids may
not be unique."""
REFUSED = "refused"
"""Finish reason, between the steps, of a request that the engine rejects."""
DIED = "died"
"""Finish reason, between the steps, of a request whose engine has ended."""
HEALTH = "x_triptych_health"
"""Request parameter of the health check. While the engine works for other requests, it is answered
without a token."""


@dataclass(frozen=True)
class Order:
    """Request from preprocess to the core, beside the prompt's ids.

    Attributes:
        sampling: All sampling parameters, checked.
        stream: Whether the answer is streamed.
        cancel: Id of another request to cancel; empty for a generation.
        is_health_check: Whether it has the parameter `HEALTH`.
    """

    sampling: Mapping[str, Any]
    stream: bool
    cancel: str = ""
    is_health_check: bool = False

    def pack(self) -> str:
        """Return the order as JSON."""
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Order:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Opening:
    """Data of a request that postprocess needs once.

    Attributes:
        stops: Strings that end the answer.
        context: Last ids of the prompt; see `text_stream`.
    """

    stream: bool
    stops: Sequence[str]
    context: Sequence[int]
    prompt_tokens: int


class Place(NamedTuple):
    """Position of a chunk among all chunks of the core, by which postprocess acknowledges it.

    Attributes:
        slot: Slot of the core; see `in_flight`.
        number: Number of the chunk.
    """

    slot: int
    number: int


@dataclass(frozen=True)
class CoreChunk:
    """Message of the core about one request, beside new token ids.

    Attributes:
        key: Secret key of the request between the steps.
        cancel_at: Name of the socket on which the core receives keys of requests to cancel.
        opening: Data of the request; only in its first chunk.
        finish: Finish reason in the last chunk; else empty.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        logprobs: Log-probability of each new token and of the most probable ones,
            ``[id, value, [[id, value], …]]``; None if not requested.
        error: Reason why the engine failed; else empty.
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
        """Return the chunk as JSON."""
        fields = asdict(self)
        return json.dumps({name: value for name, value in fields.items() if value})

    @classmethod
    def unpack(cls, text: str | bytes) -> CoreChunk:
        fields = json.loads(text)
        opening = fields.pop("opening", None)
        place = Place(*fields.pop("place"))
        return cls(place=place, opening=None if opening is None else Opening(**opening), **fields)


MAX_KEY = 256


class CancelInbox:
    """Socket on which the core receives the keys of requests to cancel.

    Triton does not report canceled requests to the later steps of an ensemble.

    Args:
        on_key: Function called on the loop with each key.
    """

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self.name = f"triptych-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._on_key = on_key

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to receive; must be called on the loop."""
        loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._on_key(self._socket.recv(MAX_KEY).decode("ascii", "replace"))

    def close(self) -> None:
        self._socket.close()


class CancelSender:
    """Sender of the keys of requests to cancel."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, inbox: str, key: str) -> None:
        """Send a key once. If the inbox is full, the key is sent again with the next chunk."""
        with suppress(OSError):
            self._socket.sendto(key.encode("ascii"), _address(inbox))


def _address(name: str) -> bytes:
    return b"\0" + name.encode("ascii")


def plain_logprobs(
    ids: Sequence[int], found: Any, count: int | None
) -> Sequence[Sequence[Any]] | None:
    """Return log-probabilities in the form of `CoreChunk.logprobs`.

    Args:
        ids: Ids of the new tokens.
        found: Mappings from token id to an object with `logprob` and `rank`, one per new token.
        count: Number of most probable tokens that the request asks for; None for no logprobs.
    """
    if not found or count is None:
        return None
    plain = []
    for token, logprobs in zip(ids, found, strict=True):
        ranked = sorted(logprobs.items(), key=lambda item: item[1].rank or 0)
        most_probable = [[other, value.logprob] for other, value in ranked[:count]]
        plain.append([token, logprobs[token].logprob, most_probable])
    return plain
