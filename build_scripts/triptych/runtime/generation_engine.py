"""What an engine that generates tokens is to the core; `engine_*.py` are the engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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
