"""Load a pipeline that generates text for a long time: whether memory grows or a stream hangs.

Clients request streams and complete answers of all lengths without a pause, and cancel a fifth of
them, before the first chunk or after some. At the end nothing may run, wait or hold KV cache.

Usage: ``python build_scripts/benchmarks/generation_soak.py [--minutes 30] [--clients 8]``,
after ``make setup-generation``. Exit code 1: a request failed or hung, or the server is not idle.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, make_parser, progress
from benchmarks.memory import SECONDS, make_growth_tables, sample_memory
from benchmarks.model import CACHE, CHAT
from triptych.building.build import build
from triptych.building.generation.build import GeneratingStages
from triptych.building.generation.inputs import GenerationInputs, read_generation
from triptych.building.stages import BuildOptions
from triptych.client import (
    AsyncClient,
    AsyncGeneration,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
)  # fmt: skip
from triptych.runtime.generation_metrics import GAUGES, PREFIX
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

CANCELED_RATIO = 0.2
REFUSED_RATIO = 0.02
COMPLETE_RATIO = 0.25
"""Ratios of requests that are canceled, invalid, and not streamed."""
MAX_TOKENS = 48
STUCK_S = 300.0
"""Duration after which a stream of at most `MAX_TOKENS` counts as stuck."""
IDLE_TIMEOUT_S = 10.0
SEED = 19
_BAD = ("stuck", "failed", "not refused")


class SoakLoad:
    """Requests until a point in time, on the monotonic clock.

    Attributes:
        counts: Number of requests by outcome.
        errors: Messages of the first failed requests.
    """

    def __init__(self, inputs: GenerationInputs, until: float) -> None:
        self._pipeline, self._prompts, self._until = inputs.spec.name, inputs.prompts, until
        self._random = random.Random(SEED)
        self._client: AsyncClient
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.errors: list[str] = []

    async def run(self, server: Server, clients: int) -> None:
        """Send the requests of all clients until the end of the load, or of the server."""
        url = server.grpc_url
        async with AsyncClient(self._pipeline, url, timeout_s=STUCK_S) as self._client:
            await asyncio.gather(*(self._run_client(server) for _ in range(clients)))

    async def _run_client(self, server: Server) -> None:
        while time.monotonic() < self._until:
            try:
                outcome = await self._send()
            except DeadlineExceededError:
                outcome = "stuck"
            except InferenceError as error:
                outcome = "failed"
                self.errors = [*self.errors, str(error)][:5]
                if server.find_crash(0.0) is not None:
                    self._until = 0.0
            self.counts[outcome] += 1

    async def _send(self) -> str:
        dice = self._random.random()
        sampling: dict[str, Any] = {
            "max_tokens": self._random.randint(1, MAX_TOKENS),
            "temperature": self._random.choice([0.0, 1.0]),
            **self._random.choice([{}, {"logprobs": 2}, {"stop": [". "]}, {"top_p": 0.9}]),
        }
        if dice < REFUSED_RATIO:
            with suppress(InvalidRequestError):
                await self._generate({**sampling, "temperature": -1}).whole()
                return "not refused"
            return "refused"
        answer = self._generate(sampling)
        if dice < REFUSED_RATIO + CANCELED_RATIO:
            return await self._cancel(answer)
        if dice < REFUSED_RATIO + CANCELED_RATIO + COMPLETE_RATIO:
            self.tokens += len((await answer.whole()).token_ids)
            return "complete"
        async for chunk in answer:
            self.tokens += len(chunk.token_ids)
        return "streamed"

    async def _cancel(self, answer: AsyncGeneration) -> str:
        async with answer:
            if self._random.random() < 0.3:  # before the first chunk, or while it arrives
                with suppress(asyncio.TimeoutError, StopAsyncIteration):
                    await asyncio.wait_for(anext(answer), self._random.random())
                return "canceled early"
            wanted = self._random.randint(1, MAX_TOKENS // 2)
            async for chunk in answer:
                self.tokens += len(chunk.token_ids)
                wanted -= 1
                if not wanted:
                    break
        return "canceled"

    def _generate(self, sampling: Mapping[str, Any]) -> AsyncGeneration:
        prompt = self._random.choice(self._prompts)
        if prompt.messages is None:
            return self._client.generate(prompt.sent["text_input"], **sampling)
        return self._client.chat(prompt.messages, **sampling)


def main() -> int:
    """Build, serve, load, sample the memory; return 1 if a request or the server failed."""
    title = "Memory over a long load of text generation"
    parser = make_parser(__doc__, "generation_soak", title)
    parser.add_argument("--pipeline", type=Path, default=CHAT)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds of load before")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    options = parser.parse_args()
    inputs = read_generation(load_generation_spec(options.pipeline), progress)
    repository = CACHE / f"soak_{inputs.spec.name}"
    accept = "only its memory is measured"
    chosen = BuildOptions(repository=repository, progress=progress, accept=accept)
    build(GeneratingStages(), inputs, chosen)
    with Server(repository) as server, ThreadPoolExecutor(1) as pool:
        until = time.monotonic() + options.warm_up + 60 * options.minutes
        load = SoakLoad(inputs, until)
        running = pool.submit(asyncio.run, load.run(server, options.clients))
        wait([running], options.warm_up)
        samples = sample_memory(server.pid, running.done, lambda: wait([running], options.every))
        running.result()
        death = server.find_crash(1.0)
        left = {} if death is not None else _read_busy_gauges(server, inputs.spec.name)
    seconds = options.warm_up + samples[-1][SECONDS]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(load.counts.items()))
    notes = [
        f"{load.counts.total()} requests in {seconds:.0f} s, {load.tokens / seconds:.1f} tokens/s: "
        + outcomes,
        f"at the end: gauges {left or 'at zero'}, server {death or 'alive'}",
        *(f"failed: {error}" for error in load.errors),
    ]
    data = {"counts": load.counts, "tokens": load.tokens, "left": left, "samples": samples}
    finish(options, make_growth_tables(samples, load.counts.total()), data, notes)
    bad = sum(load.counts[outcome] for outcome in _BAD)
    return 1 if bad or left or death is not None else 0


def _read_busy_gauges(server: Server, pipeline: str) -> dict[str, float]:
    """Return the gauges of the core that do not return to zero in time."""
    names = {f"{PREFIX}_{gauge}": gauge for gauge in GAUGES}
    end = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        left = {
            names[name]: value
            for name, labels, value in fetch_metrics(server.metrics_url)
            if name in names and labels.get("pipeline") == pipeline and value
        }
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(main())
