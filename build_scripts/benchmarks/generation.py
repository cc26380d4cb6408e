"""Compare text generation with vLLM's own OpenAI server, and with transformers' `generate`.

All systems have the same model, precision and prompts, both servers the same build of vLLM and the
same settings. All run from the beginning. Clients are coroutines of this process: over gRPC for
the ensemble, over HTTP for vLLM's server, through a pipe for transformers, where a client waits for
those before it.

Usage: ``python build_scripts/benchmarks/generation.py [--clients 1 8 32] [--rounds 3]``, after
``make setup-generation``.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.harness import Series, Turn, finish, make_parser, progress, run_rounds, tabulate
from benchmarks.model import CACHE, CHAT
from benchmarks.servers import HOST, run_server
from triptych.building.build import build
from triptych.building.generation.build import GeneratingStages
from triptych.building.generation.inputs import GenerationInputs, Prompt, read_generation
from triptych.building.stages import BuildOptions
from triptych.client import AsyncClient
from triptych.runtime.engine_vllm import DTYPES, PRIVATE
from triptych.serving.bench.resources import process_tree
from triptych.serving.generation_environment import environment_python
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

MAX_TOKENS = 32
_TIMEOUT_S = 900.0
ENSEMBLE, VLLM, TRANSFORMERS = "ensemble", "vLLM's server", "transformers"
COMPARED_CLIENTS, MAX_CLIENTS = 8, 32
"""Clients for the comparison of the systems, and the load at which the rate may not fall."""

Chunks = AsyncIterator[int]
"""Numbers of new tokens, chunk by chunk."""
Generate = Callable[[Prompt], Chunks]


def main() -> int:
    """Build, start all systems, measure in rounds."""
    title = "Text generation and vLLM's own server (`make compare-generation`)"
    parser = make_parser(__doc__, "generation", title, rounds=3)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="requests of each client in a load")
    options = parser.parse_args()
    inputs = read_generation(load_generation_spec(CHAT), progress)
    prompts = [prompt for prompt in inputs.prompts if prompt.messages is not None]
    repository = CACHE / "generation"
    build(GeneratingStages(), inputs, BuildOptions(repository=repository, progress=progress))
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        ensemble = stack.enter_context(Server(repository))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-benchmarks-"))
        port = stack.enter_context(reserve_ports(HOST, {"port": 0}))["port"]
        command = _make_vllm_command(inputs, port)
        variables = {**PRIVATE, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        where = port, "health", Path(folder), variables, _TIMEOUT_S
        vllm_pid = stack.enter_context(run_server(VLLM, command, *where))
        clients = AsyncExitStack()
        stack.callback(lambda: runner.run(clients.aclose()))
        systems = runner.run(_open_systems(clients, inputs, ensemble, port, vllm_pid))

        def make_turn(name: str, count: int) -> Turn:
            generate, pid = systems[name]
            measure = partial(_measure, generate, pid, prompts, count, options.requests)
            return Turn(name, lambda: [(str(count), runner.run(measure()))])

        for generate, _ in systems.values():
            runner.run(_load(generate, prompts, clients=1, requests=2))
        # transformers answers one request at a time: more clients would only wait longer.
        groups = [
            [
                make_turn(name, count)
                for name in systems
                if name != TRANSFORMERS or count == COMPARED_CLIENTS
            ]
            for count in options.clients
        ]
        found = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    table = tabulate(
        f"{inputs.spec.name}, {MAX_TOKENS} tokens an answer, greedy",
        found,
        {
            "clients": lambda one: one.load,
            "system": lambda one: one.system,
            "tokens/s": lambda one: one.text("tokens_per_s", 1),
            "lowest-highest": lambda one: one.range("tokens_per_s", 1),
            "first token, ms": lambda one: one.text("first_ms", 1),
            "between chunks, ms": lambda one: one.text("gap_ms", 1),
            "core-ms per token": lambda one: one.text("core_ms", 1),
        },
    )
    finish(options, [table], found, _judge(found))
    return 0


def _make_vllm_command(inputs: GenerationInputs, port: int) -> list[str]:
    """Return the command of vLLM's OpenAI server with the settings of the core."""
    core = inputs.spec.core
    return [
        str(environment_python()), "-m", "vllm.entrypoints.openai.api_server",
        *("--model", str(inputs.weights), "--served-model-name", inputs.spec.name),
        *("--host", HOST, "--port", str(port), "--dtype", DTYPES[core.precision]),
        *("--max-model-len", str(inputs.max_length), "--max-num-seqs", str(core.max_num_seqs)),
        *("--max-num-batched-tokens", str(core.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(core.kv_cache.memory_mib << 20)),
        *("--generation-config", "vllm", "--enforce-eager", "--disable-uvicorn-access-log"),
        "--enable-prefix-caching" if core.enable_prefix_caching else "--no-enable-prefix-caching",
    ]  # fmt: skip


async def _open_systems(
    clients: AsyncExitStack, inputs: GenerationInputs, ensemble: Server, port: int, vllm_pid: int
) -> dict[str, tuple[Generate, int]]:
    """Return the client of each system and the process whose tree does the work."""
    client = AsyncClient(inputs.spec.name, ensemble.grpc_url, timeout_s=_TIMEOUT_S)
    await clients.enter_async_context(client)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    session = await clients.enter_async_context(aiohttp.ClientSession(connector=connector))
    worker = await clients.enter_async_context(_run_transformers(inputs))
    url = f"http://{HOST}:{port}/v1/chat/completions"
    return {
        ENSEMBLE: (partial(_generate_by_ensemble, client), ensemble.pid),
        VLLM: (partial(_generate_by_vllm, session, url), vllm_pid),
        TRANSFORMERS: (partial(_generate_by_transformers, worker, asyncio.Lock()), worker.pid),
    }


@asynccontextmanager
async def _run_transformers(inputs: GenerationInputs) -> AsyncIterator[asyncio.subprocess.Process]:
    worker = Path(__file__).with_name("generation_transformers.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(str(environment_python()), str(worker), str(inputs.weights), str(MAX_TOKENS)),
        stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        if process.stdout is None or not await process.stdout.readline():
            raise SystemExit("transformers did not start.")
        yield process
    finally:
        process.kill()
        await process.wait()


async def _generate_by_ensemble(client: AsyncClient, prompt: Prompt) -> Chunks:
    messages = prompt.messages or []
    async for chunk in client.chat(messages, max_tokens=MAX_TOKENS, temperature=0.0):
        yield len(chunk.token_ids)


async def _generate_by_transformers(
    process: asyncio.subprocess.Process, lock: asyncio.Lock, prompt: Prompt
) -> Chunks:
    async with lock:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{json.dumps(prompt.ids)}\n".encode())
        while (await process.stdout.readline()).strip():
            yield 1


async def _generate_by_vllm(session: aiohttp.ClientSession, url: str, prompt: Prompt) -> Chunks:
    body = {
        "model": CHAT.name,
        "messages": prompt.messages,
        "max_tokens": MAX_TOKENS,
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


async def _measure(
    generate: Generate, pid: int, prompts: Sequence[Prompt], clients: int, requests: int
) -> Mapping[str, float]:
    """Return tokens/s, medians of the latencies in ms, and processor time for each token."""
    began, used = time.perf_counter(), _read_cpu_s(pid)
    answered = await _load(generate, prompts, clients=clients, requests=requests)
    took, used = time.perf_counter() - began, _read_cpu_s(pid) - used
    tokens = sum(tokens for chunks in answered for _, tokens in chunks)
    times = [[at for at, tokens in chunks if tokens] for chunks in answered]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    return {
        "tokens_per_s": tokens / took,
        "first_ms": 1e3 * median(each[0] for each in times),
        "gap_ms": 1e3 * median(gaps),
        "core_ms": 1e3 * used / tokens,
    }


def _read_cpu_s(pid: int) -> float:
    """Return the processor time of a process and its descendants, in seconds."""
    times = [process.cpu_times() for process in process_tree(pid)]
    return sum(one.user + one.system for one in times)


async def _load(
    generate: Generate, prompts: Sequence[Prompt], *, clients: int, requests: int
) -> list[list[tuple[float, int]]]:
    """Return the chunks of each request: seconds since it was sent, and tokens."""

    async def send(number: int) -> list[tuple[float, int]]:
        began = time.perf_counter()
        chunks = generate(prompts[number % len(prompts)])
        return [(time.perf_counter() - began, tokens) async for tokens in chunks]

    async def run_client(index: int) -> list[list[tuple[float, int]]]:
        return [await send(index * requests + turn) for turn in range(requests)]

    done = await asyncio.gather(*(run_client(index) for index in range(clients)))
    return [chunks for client in done for chunks in client]


def _judge(found: Sequence[Series]) -> list[str]:
    """Return the project's targets for these figures, each with ``met`` or ``missed``."""
    known = {(one.system, one.load): one for one in found}
    own, most = (known.get((ENSEMBLE, str(count))) for count in (COMPARED_CLIENTS, MAX_CLIENTS))
    vllm, plain = (known.get((name, str(COMPARED_CLIENTS))) for name in (VLLM, TRANSFORMERS))
    lines = []
    for name, better, worse, minimum in (
        (f"{MAX_CLIENTS} clients by {COMPARED_CLIENTS}", most, own, 1.0),
        (f"ensemble by {VLLM}", own, vllm, 0.93),
        (f"ensemble by {TRANSFORMERS}", own, plain, 3.0),
    ):
        if better is not None and worse is not None:
            ratio = better.median("tokens_per_s") / worse.median("tokens_per_s")
            word = "met" if ratio >= minimum else "missed"
            lines.append(f"tokens/s, {name}: {ratio:.2f}, at least {minimum}: {word}")
    for metric, maximum in (("first_ms", 15.0), ("gap_ms", 2.0)):
        if own is not None and vllm is not None:
            more = own.median(metric) - vllm.median(metric)
            word = "met" if more <= maximum else "missed"
            lines.append(f"{metric} more than {VLLM}: {more:+.1f}, at most +{maximum:g}: {word}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
