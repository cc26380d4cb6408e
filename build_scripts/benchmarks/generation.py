"""Text generation beside vLLM's own OpenAI server, and transformers' `generate`, one by one.

All have the same model, precision and prompts, both servers the same build of vLLM and settings.
All run from the beginning, and each load goes to one after the other, in rounds. They are asked by
asyncio clients of this process: the ensemble over gRPC, vLLM's server over HTTP, transformers
through a pipe, where a client waits for those before it.

Usage: ``python build_scripts/benchmarks/generation.py [--clients 1 8 32] [--rounds 3]``, after
``make setup-generation``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.model import CACHE
from triptych.building.generation.build import build_generation
from triptych.building.generation.inputs import GenerationInputs, Prompt, read_generation
from triptych.client import AsyncClient
from triptych.runtime.engine_vllm import DTYPES, PRIVATE
from triptych.serving.bench.baselines import ChildProcess
from triptych.serving.bench.resources import process_tree
from triptych.serving.environment import environment_python
from triptych.serving.ports import claim_ports
from triptych.serving.readiness import answers
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

PIPELINE = Path(__file__).parents[2] / "pipelines/chat"
TOKENS = 32
_HOST = "127.0.0.1"
_LOAD_S = 900.0
ENSEMBLE, VLLM, TRANSFORMERS = "ensemble", "vLLM's server", "transformers"
MANY, MORE = 8, 32
"""Clients at which the contenders are held against each other, and up to which nothing may fall."""

Chunks = AsyncIterator[int]
"""New tokens, chunk by chunk."""
Ask = Callable[[Prompt], Chunks]


@dataclass(frozen=True)
class Contender:
    """How it is asked, and the process whose tree does the work."""

    ask: Ask
    pid: int


@dataclass(frozen=True)
class Timing:
    """One load. Times are medians, in milliseconds.

    Attributes:
        tokens_per_s: of all answers together.
        first_ms: from a request to its first token.
        gap_ms: between two chunks of a request.
        core_ms: processor time of the contender for a token, in milliseconds of a core.
    """

    server: str
    clients: int
    tokens: int
    tokens_per_s: float
    first_ms: float
    gap_ms: float
    core_ms: float


def main() -> int:
    """Build, start both, measure in rounds, print and write."""
    options = _parse()
    inputs = read_generation(load_generation_spec(PIPELINE), _say)
    prompts = [prompt for prompt in inputs.prompts if prompt.messages is not None]
    repository = CACHE / "generation"
    build_generation(inputs, repository, _say)
    found: list[Timing] = []
    with ExitStack() as stack:
        ensemble = stack.enter_context(_ensemble(repository))
        peer, peer_pid = stack.enter_context(_vllm_server(inputs))

        async def measure() -> None:
            async with (
                AsyncClient(inputs.spec.name, ensemble.grpc_url, timeout_s=_LOAD_S) as client,
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
                ) as session,
                _transformers(inputs) as (one_by_one, turn),
            ):
                contenders = {
                    ENSEMBLE: Contender(partial(_ask_ensemble, client), ensemble.pid),
                    VLLM: Contender(partial(_ask_openai, session, peer), peer_pid),
                    TRANSFORMERS: Contender(
                        partial(_ask_transformers, one_by_one, turn), one_by_one.pid
                    ),
                }
                for one in contenders.values():
                    await _load(one.ask, prompts, clients=1, requests=2)
                for number in range(options.rounds):
                    for clients in options.clients:
                        names = list(contenders) if number % 2 == 0 else [*reversed(contenders)]
                        for name in names:
                            # One by one, more clients only wait longer.
                            if name != TRANSFORMERS or clients == MANY:
                                timing = await _timed(
                                    name, contenders[name], prompts, clients, options
                                )
                                found.append(timing)
                                _say("round", f"{number + 1}: {timing}")

        asyncio.run(measure())
    print(_table(found))
    print(_said(found))
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
def _ensemble(repository: Path) -> Iterator[Server]:
    server = Server(repository)
    try:
        server.start()
        server.wait_ready(timeout_s=_LOAD_S)
        yield server
    finally:
        server.stop()


@contextmanager
def _vllm_server(inputs: GenerationInputs) -> Iterator[tuple[str, int]]:
    """VLLM's OpenAI server with what the core asks of its engine; its address and process."""
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
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as scratch:
        log = Path(scratch, "log.txt")
        variables = {**PRIVATE, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        process = ChildProcess(command, log, variables=variables)
        try:
            end = time.monotonic() + _LOAD_S
            while not answers(f"{_HOST}:{port}", "/health"):
                if process.has_ended or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield f"http://{_HOST}:{port}/v1/chat/completions", process.pid
        finally:
            process.end(20.0)


@asynccontextmanager
async def _transformers(
    inputs: GenerationInputs,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.Lock]]:
    """The process, ready, and the lock of who asks it."""
    worker = Path(__file__).with_name("generation_transformers.py")
    process = await asyncio.create_subprocess_exec(
        str(environment_python()),
        str(worker),
        str(inputs.weights),
        str(TOKENS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        if process.stdout is None or not await process.stdout.readline():
            raise SystemExit("transformers did not start")
        yield process, asyncio.Lock()
    finally:
        process.kill()
        await process.wait()


async def _ask_ensemble(client: AsyncClient, prompt: Prompt) -> Chunks:
    messages = prompt.messages or []
    async for chunk in client.chat(messages, max_tokens=TOKENS, temperature=0.0):
        yield len(chunk.token_ids)


async def _ask_transformers(
    process: asyncio.subprocess.Process, turn: asyncio.Lock, prompt: Prompt
) -> Chunks:
    async with turn:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("there is no pipe to transformers")
        process.stdin.write(f"{json.dumps(prompt.ids)}\n".encode())
        while (await process.stdout.readline()).strip():
            yield 1


async def _ask_openai(session: aiohttp.ClientSession, url: str, prompt: Prompt) -> Chunks:
    body = {
        "model": PIPELINE.name,
        "messages": prompt.messages,
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
    contender: Contender,
    prompts: Sequence[Prompt],
    clients: int,
    options: argparse.Namespace,
) -> Timing:
    began, worked = time.perf_counter(), _cpu_s(contender.pid)
    seen = await _load(contender.ask, prompts, clients=clients, requests=options.requests)
    took, worked = time.perf_counter() - began, _cpu_s(contender.pid) - worked
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
        round(1e3 * worked / tokens, 1),
    )


def _cpu_s(pid: int) -> float:
    """Seconds of processor time that a process and all below it have taken."""
    times = [process.cpu_times() for process in process_tree(pid)]
    return sum(one.user + one.system for one in times)


async def _load(
    ask: Ask, prompts: Sequence[Prompt], *, clients: int, requests: int
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
    head = ["clients", "server", "tokens/s", "first token, ms", "between chunks, ms", "core-ms"]
    lines = [head, ["---"] * len(head)]
    for clients in sorted({one.clients for one in found}):
        for name in sorted({one.server for one in found}):
            fields = ("tokens_per_s", "first_ms", "gap_ms", "core_ms")
            values = [_typical(found, name, clients, field) for field in fields]
            if None not in values:
                lines.append([str(clients), name, *(f"{value:.1f}" for value in values)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _said(found: Sequence[Timing]) -> str:
    """What the project wants of these figures, and whether it is so."""
    rate = partial(_typical, found, field="tokens_per_s")
    lines = []
    for what, figure, base, least in (
        (f"{MORE} clients by {MANY}", rate(ENSEMBLE, MORE), rate(ENSEMBLE, MANY), 1.0),
        (f"vLLM's server, {MANY} clients", rate(ENSEMBLE, MANY), rate(VLLM, MANY), 0.93),
        (f"transformers, {MANY} clients", rate(ENSEMBLE, MANY), rate(TRANSFORMERS, MANY), 3.0),
    ):
        if figure and base:
            word = "met" if figure / base >= least else "missed"
            lines.append(f"tokens/s by {what}: {figure / base:.2f}, at least {least}: {word}")
    for field, most in (("first_ms", 15.0), ("gap_ms", 2.0)):
        ours, theirs = (_typical(found, name, MANY, field) for name in (ENSEMBLE, VLLM))
        if ours is not None and theirs is not None:
            word = "met" if ours - theirs <= most else "missed"
            lines.append(f"{field} at {MANY}: {ours - theirs:+.1f}, at most +{most:g}: {word}")
    return "\n".join(lines)


def _typical(found: Sequence[Timing], server: str, clients: int, field: str) -> float | None:
    """Median of the rounds; None where there is none."""
    own = [getattr(one, field) for one in found if (one.server, one.clients) == (server, clients)]
    return median(own) if own else None


def _say(stage: str, line: str) -> None:
    print(f"{stage:9} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
