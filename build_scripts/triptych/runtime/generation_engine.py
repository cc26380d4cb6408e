"""What an engine that generates tokens is to the core; `engine_*.py` are the engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
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


async def joined(deltas: AsyncIterable[Delta], tokens: int) -> AsyncGenerator[Delta, None]:
    """The first token at once, then `tokens` at a time or more; the end waits for none."""
    waiting, wanted = Delta([]), 1
    async for delta in deltas:
        waiting = waiting.then(delta) if waiting.token_ids else delta
        if delta.finish or len(waiting.token_ids) >= wanted:
            yield waiting
            waiting, wanted = Delta([]), tokens


class Load(NamedTuple):
    """What an engine has to do.

    Attributes:
        running: requests in its batch.
        waiting: requests that have no place in it yet.
        kv_cache_share: of the KV cache that running requests hold, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_share: float = 0.0


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
