"""Text generation beside vLLM's own OpenAI server: the same build, settings, model and prompts.

Both servers run from the beginning, and each load goes to one after the other, in rounds. Both are
asked by asyncio clients of this process: the ensemble over gRPC, the other over HTTP.

Usage: ``.venv/bin/python build_scripts/peers/generation.py [--clients 1 8 32] [--rounds 3]``, after
``make setup-generation``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from peers.model import CACHE
from triptych.bench.child_process import ChildProcess
from triptych.client import AsyncClient
from triptych.generation.build import build_generation
from triptych.generation.environment import environment_python
from triptych.generation.inputs import GenerationInputs, read_generation
from triptych.pipeline.generation_spec import load_generation_spec
from triptych.runtime.engine_vllm import DTYPES, PRIVATE
from triptych.server.http_probe import answers
from triptych.server.ports import claim_ports
from triptych.server.server import Server

PIPELINE = Path(__file__).parents[2] / "pipelines/chat"
TOKENS = 32
_HOST = "127.0.0.1"
_LOAD_S = 900.0
Messages = Sequence[Mapping[str, str]]
Chunks = AsyncIterator[int]
"""New tokens, chunk by chunk."""
Ask = Callable[[Messages], Chunks]


@dataclass(frozen=True)
class Timing:
    """One load. Times are medians, in milliseconds.

    Attributes:
        tokens_per_s: of all answers together.
        first_ms: from a request to its first token.
        gap_ms: between two chunks of a request.
    """

    server: str
    clients: int
    tokens: int
    tokens_per_s: float
    first_ms: float
    gap_ms: float


def main() -> int:
    """Build, start both, measure in rounds, print and write."""
    options = _parse()
    inputs = read_generation(load_generation_spec(PIPELINE), _say)
    prompts = [prompt.messages for prompt in inputs.prompts if prompt.messages is not None]
    repository = CACHE / "generation"
    build_generation(inputs, repository, _say)
    found: list[Timing] = []
    with ExitStack() as stack:
        ensemble = stack.enter_context(_ensemble(repository))
        peer = stack.enter_context(_vllm_server(inputs))

        async def measure() -> None:
            async with (
                AsyncClient(inputs.spec.name, ensemble, timeout_s=_LOAD_S) as client,
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            ):
                asks: dict[str, Ask] = {
                    "ensemble": lambda messages: _ask_ensemble(client, messages),
                    "vLLM's server": lambda messages: _ask_openai(session, peer, messages),
                }
                for ask in asks.values():
                    await _load(ask, prompts, clients=1, requests=2)
                for number in range(options.rounds):
                    for clients in options.clients:
                        names = list(asks) if number % 2 == 0 else [*reversed(asks)]
                        for name in names:
                            timing = await _timed(name, asks[name], prompts, clients, options)
                            found.append(timing)
                            _say("round", f"{number + 1}: {timing}")

        asyncio.run(measure())
    print(_table(found))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="of each client in a load")
    parser.add_argument("--output", type=Path, default=CACHE / "generation.json")
    return parser.parse_args()


@contextmanager
def _ensemble(repository: Path) -> Iterator[str]:
    server = Server(repository)
    try:
        server.start()
        server.wait_ready(timeout_s=_LOAD_S)
        yield server.grpc_url
    finally:
        server.stop()


@contextmanager
def _vllm_server(inputs: GenerationInputs) -> Iterator[str]:
    """VLLM's OpenAI server with what the pipeline's core asks of its engine; its address."""
    core = inputs.spec.core
    port = claim_ports(_HOST, {"port": 0})["port"]
    command = [
        str(environment_python()), "-m", "vllm.entrypoints.openai.api_server",
        *("--model", str(inputs.weights), "--served-model-name", inputs.spec.name),
        *("--host", _HOST, "--port", str(port), "--dtype", DTYPES[core.precision]),
        *("--max-model-len", str(inputs.max_length), "--max-num-seqs", str(core.max_sequences)),
        *("--max-num-batched-tokens", str(core.max_batched_tokens)),
        *("--kv-cache-memory-bytes", str(core.kv_cache.memory_mib << 20)),
        *("--generation-config", "vllm", "--enforce-eager", "--disable-uvicorn-access-log"),
        "--enable-prefix-caching" if core.prefix_caching else "--no-enable-prefix-caching",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="triptych-peers-") as scratch:
        log = Path(scratch, "log.txt")
        variables = {**PRIVATE, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        process = ChildProcess(command, log, variables=variables)
        try:
            end = time.monotonic() + _LOAD_S
            while not answers(f"{_HOST}:{port}", "/health"):
                if process.has_ended or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield f"http://{_HOST}:{port}/v1/chat/completions"
        finally:
            process.end(20.0)


async def _ask_ensemble(client: AsyncClient, messages: Messages) -> Chunks:
    async for chunk in client.chat(messages, max_tokens=TOKENS, temperature=0.0):
        yield len(chunk.token_ids)


async def _ask_openai(session: aiohttp.ClientSession, url: str, messages: Messages) -> Chunks:
    body = {
        "model": PIPELINE.name,
        "messages": list(messages),
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                if choice.get("token_ids"):
                    yield len(choice["token_ids"])


async def _timed(
    name: str,
    ask: Ask,
    prompts: Sequence[Messages],
    clients: int,
    options: argparse.Namespace,
) -> Timing:
    began = time.perf_counter()
    seen = await _load(ask, prompts, clients=clients, requests=options.requests)
    took = time.perf_counter() - began
    tokens = sum(tokens for one in seen for _, tokens in one)
    times = [[at for at, tokens in one if tokens] for one in seen]
    gaps = [after - before for one in times for before, after in pairwise(one)]
    return Timing(
        name,
        clients,
        tokens,
        round(tokens / took, 2),
        round(1e3 * median(one[0] for one in times), 1),
        round(1e3 * median(gaps), 2),
    )


async def _load(
    ask: Ask, prompts: Sequence[Messages], *, clients: int, requests: int
) -> list[list[tuple[float, int]]]:
    """Of each request its chunks: seconds since it was sent, and tokens."""

    async def one(number: int) -> list[tuple[float, int]]:
        began = time.perf_counter()
        chunks = ask(prompts[number % len(prompts)])
        return [(time.perf_counter() - began, tokens) async for tokens in chunks]

    async def client(index: int) -> list[list[tuple[float, int]]]:
        return [await one(index * requests + turn) for turn in range(requests)]

    work: list[Awaitable[list[list[tuple[float, int]]]]] = [client(n) for n in range(clients)]
    return [one for done in await asyncio.gather(*work) for one in done]


def _table(found: Sequence[Timing]) -> str:
    head = ["clients", "server", "tokens/s", "first token, ms", "between chunks, ms"]
    lines = [head, ["---"] * len(head)]
    for clients in sorted({one.clients for one in found}):
        for name in sorted({one.server for one in found}):
            own = [one for one in found if (one.clients, one.server) == (clients, name)]
            values: list[Any] = [
                median(getattr(one, field) for one in own)
                for field in ("tokens_per_s", "first_ms", "gap_ms")
            ]
            lines.append([str(clients), name, *(f"{value:.1f}" for value in values)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _say(stage: str, line: str) -> None:
    print(f"{stage:9} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
