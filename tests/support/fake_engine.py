"""A fake engine, for tests: it has no model and repeats the prompt's tokens.

It admits, batches, reports and cancels as a real one does, and takes a set time for each token.
An adapter, which it does not read, makes it repeat them backwards. A request with the seed `HELD`
gets no more than `FIRST` tokens, and ends when it is canceled. Like vLLM it has a process of its
own, without which it is dead.
"""

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .generation_messages import Delta, EngineLoad, OnLoad  # type: ignore[import-not-found]
from .sampling_parameters import ADAPTER, SCHEMA  # type: ignore[import-not-found]

HELD, FIRST = 9_876_543_210, 5


class Engine:
    """The prompt again, once; then it stops.

    A logarithm of probability is minus the token's place in the answer.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, on_load: OnLoad) -> None:
        self._token_s: float = settings["token_delay_ms"] / 1e3
        self._places = asyncio.Semaphore(settings["max_sequences"])
        self._capacity: int = settings["max_sequences"] * settings["max_length"]
        self._on_load = on_load
        self._waiting = 0
        self._held: dict[str, int] = {}

    async def start(self) -> None:
        # It reads until its parent ends.
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._tell()

    async def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        if sampling[SCHEMA] is not None:
            raise ValueError("json_schema: the fake engine follows none")
        self._waiting += 1
        self._tell()
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
            self._tell()
        try:
            words = prompt[::-1] if sampling[ADAPTER] else prompt
            async for delta in self._repeat(key, words, sampling):
                yield delta
        finally:
            self._places.release()
            self._held.pop(key, None)
            self._tell()

    async def _repeat(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        most = min(len(prompt), sampling["max_tokens"])
        for place, token in enumerate(prompt[:most]):
            if sampling["seed"] == HELD and place == FIRST:
                await asyncio.Event().wait()
            self._held[key] = len(prompt) + place + 1
            self._tell()
            await asyncio.sleep(self._token_s)
            finish = ""
            if place + 1 == most:
                finish = "stop" if most == len(prompt) else "length"
            likeliest = [[token, -float(place)]]
            logprobs = [[token, -float(place), likeliest[: sampling["logprobs"]]]]
            yield Delta(
                [token], finish, logprobs=None if sampling["logprobs"] is None else logprobs
            )

    def find_death(self) -> str:
        return "" if self._process.poll() is None else "its process died"

    def close(self) -> None:
        with self._process:  # closes the pipe and waits
            self._process.kill()

    def _tell(self) -> None:
        share = sum(self._held.values()) / self._capacity
        self._on_load(EngineLoad(len(self._held), self._waiting, share))
