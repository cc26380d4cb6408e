"""Mixed load on a pipeline that generates text: does memory grow, does a stream hang?

Clients ask for streams and wholes of all lengths without a pause, and leave a fifth of them: before
the first chunk, or after some. At the end nothing may run, wait or hold KV cache.

Usage: ``python build_scripts/benchmarks/generation_soak.py [--minutes 30] [--clients 8]``,
after ``make setup-generation``. Exit code 1: a request failed or hung, or something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.model import CACHE
from benchmarks.soak import growths_of, sample, table_of
from triptych.building.generation.build import build_generation
from triptych.building.generation.inputs import GenerationInputs, read_generation
from triptych.client import (
    AsyncClient,
    AsyncGeneration,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
)
from triptych.runtime.generation_series import GAUGES, PREFIX
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

PIPELINE = Path(__file__).parents[2] / "pipelines/chat"
CANCELLED_SHARE = 0.2
REFUSED_SHARE = 0.02
WHOLE_SHARE = 0.25
MAX_TOKENS = 48
STUCK_S = 300.0
"""No answer of so few tokens takes so long: the stream hangs."""
EMPTY_S = 10.0
SEED = 19


class Load:
    """Requests until the time is over.

    Attributes:
        counts: requests by what became of them.
        tokens: that came.
        errors: what was said of those that failed, the first ones.
    """

    def __init__(self, inputs: GenerationInputs, client: AsyncClient, until: float) -> None:
        self._prompts = inputs.prompts
        self._client = client
        self._until = until
        self._random = random.Random(SEED)
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.errors: list[str] = []

    async def run(self) -> None:
        """One client."""
        while time.monotonic() < self._until:
            kind = "?"
            try:
                kind = await self._one()
            except DeadlineExceeded:
                kind = "stuck"
            except InferenceError as error:
                kind = "failed"
                self.errors = [*self.errors, str(error)][:5]
            self.counts[kind] += 1

    async def _one(self) -> str:
        dice = self._random.random()
        sampling: dict[str, Any] = {
            "max_tokens": self._random.randint(1, MAX_TOKENS),
            "temperature": self._random.choice([0.0, 1.0]),
            **self._random.choice([{}, {"logprobs": 2}, {"stop": [". "]}, {"top_p": 0.9}]),
        }
        if dice < REFUSED_SHARE:
            with suppress(InvalidRequest):
                await self._ask({**sampling, "temperature": -1}).whole()
                return "not refused"
            return "refused"
        answer = self._ask(sampling)
        if dice < REFUSED_SHARE + CANCELLED_SHARE:
            return await self._left(answer)
        if dice < REFUSED_SHARE + CANCELLED_SHARE + WHOLE_SHARE:
            self.tokens += len((await answer.whole()).token_ids)
            return "whole"
        async for chunk in answer:
            self.tokens += len(chunk.token_ids)
        return "streamed"

    async def _left(self, answer: AsyncGeneration) -> str:
        async with answer:
            if self._random.random() < 0.3:  # before, or while, the first chunk comes
                with suppress(asyncio.TimeoutError, StopAsyncIteration):
                    await asyncio.wait_for(anext(answer), self._random.random())
                return "left early"
            wanted = self._random.randint(1, MAX_TOKENS // 2)
            async for chunk in answer:
                self.tokens += len(chunk.token_ids)
                wanted -= 1
                if not wanted:
                    break
        return "left"

    def _ask(self, sampling: Mapping[str, Any]) -> AsyncGeneration:
        prompt = self._random.choice(self._prompts)
        if prompt.messages is None:
            return self._client.generate(prompt.sent["text_input"], **sampling)
        return self._client.chat(prompt.messages, **sampling)


def main() -> int:
    """Build, serve, load, sample; print what became of requests and memory, write the samples."""
    options = _parse()
    inputs = read_generation(load_generation_spec(options.pipeline), _say)
    repository = CACHE / f"soak_{inputs.spec.name}"
    build_generation(inputs, repository, _say, accept="only its memory is looked at")
    server = Server(repository)
    try:
        server.start()
        server.wait_ready()
        _say("soak", f"{options.clients} clients for {options.minutes:g} minutes ...")
        load, samples = asyncio.run(_soak(inputs, server, options))
        death = server.death(1.0)
        left = {} if death is not None else _left_behind(server, inputs.spec.name)
    finally:
        server.stop()
    requests = load.counts.total()
    growths = growths_of(samples, requests)
    seconds = samples[-1]["seconds"]
    print(f"{requests} requests in {seconds:.0f} s, {load.tokens / seconds:.1f} tokens/s")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(load.counts.items())))
    print(table_of(growths))
    print(f"left at the end: {left or 'nothing'}; server: {death or 'alive'}")
    for error in load.errors:
        print(f"failed: {error}")
    report = {
        "seconds": seconds,
        "counts": load.counts,
        "tokens": load.tokens,
        "left": left,
        "growth": [asdict(growth) for growth in growths],
        "samples": samples,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    bad = sum(load.counts[kind] for kind in ("stuck", "failed", "not refused"))
    return 1 if bad or left or death is not None else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds of load before")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--output", type=Path, default=CACHE / "generation_soak.json")
    return parser.parse_args()


async def _soak(
    inputs: GenerationInputs, server: Server, options: argparse.Namespace
) -> tuple[Load, list[dict[str, float]]]:
    """The load, and bytes of each process every few seconds since it is warm."""
    until = time.monotonic() + options.warm_up + 60 * options.minutes
    samples: list[dict[str, float]] = []
    async with AsyncClient(inputs.spec.name, server.grpc_url, timeout_s=STUCK_S) as client:
        load = Load(inputs, client, until)
        work = [asyncio.create_task(load.run()) for _ in range(options.clients)]
        await asyncio.sleep(options.warm_up)
        began = time.monotonic()
        while not all(one.done() for one in work):
            taken = await asyncio.to_thread(sample, server.pid)
            samples.append({"seconds": time.monotonic() - began, **taken})
            await asyncio.wait(work, timeout=options.every)
            if server.death(0.0) is not None:
                for one in work:
                    one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for one in work:
            if not one.cancelled():
                one.result()  # raises what no request can have caused
    return load, samples


def _left_behind(server: Server, pipeline: str) -> dict[str, float]:
    """Gauges of the core that do not return to zero."""
    end = time.monotonic() + EMPTY_S
    while True:
        with urllib.request.urlopen(server.metrics_url) as page:
            text = page.read().decode()
        form = rf'{PREFIX}_({"|".join(GAUGES)})\{{pipeline="{pipeline}"\}} (\S+)'
        left = {name: float(value) for name, value in re.findall(form, text) if float(value)}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _say(stage: str, line: str) -> None:
    print(f"{stage:9} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
