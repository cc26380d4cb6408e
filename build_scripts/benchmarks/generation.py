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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.harness import Series, Turn, finish, make_parser, progress, run_rounds
from benchmarks.model import CACHE, CHAT
from benchmarks.results import Table
from triptych.building.build import build
from triptych.building.generation.inputs import GenerationInputs, Prompt, read_generation
from triptych.client import AsyncClient
from triptych.runtime.engine_vllm import DTYPES, PRIVATE
from triptych.serving.bench.baselines import ChildProcess
from triptych.serving.bench.resources import process_tree
from triptych.serving.environment import environment_python
from triptych.serving.ports import reserve_ports
from triptych.serving.readiness import responds_ok
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

MAX_TOKENS = 32
_HOST = "127.0.0.1"
_TIMEOUT_S = 900.0
ENSEMBLE, VLLM, TRANSFORMERS = "ensemble", "vLLM's server", "transformers"
COMPARED_CLIENTS, MAX_CLIENTS = 8, 32
"""Clients for the comparison of the systems, and the load at which the rate may not fall."""

Chunks = AsyncIterator[int]
"""Numbers of new tokens, chunk by chunk."""
Generate = Callable[[Prompt], Chunks]


def main() -> int:
    """Build, start all systems, measure in rounds."""
    parser = make_parser(__doc__, "generation", rounds=3)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="requests of each client in a load")
    options = parser.parse_args()
    inputs = read_generation(load_generation_spec(CHAT), progress)
    prompts = [prompt for prompt in inputs.prompts if prompt.messages is not None]
    repository = CACHE / "generation"
    build(inputs, repository, progress)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        ensemble = stack.enter_context(_serve(repository))
        url, vllm_pid = stack.enter_context(_serve_vllm(inputs))
        clients = AsyncExitStack()
        stack.callback(lambda: runner.run(clients.aclose()))
        systems = runner.run(_open_systems(clients, inputs, ensemble, url, vllm_pid))

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
    rows = [
        (
            one.load,
            one.system,
            one.text("tokens_per_s", 1),
            one.range("tokens_per_s", 1),
            one.text("first_ms", 1),
            one.text("gap_ms", 1),
            one.text("core_ms", 1),
        )
        for one in found
    ]
    head = ("clients", "system", "tokens/s", "lowest-highest", "first token, ms")
    head += ("between chunks, ms", "core-ms per token")  # type: ignore[assignment]
    title = "Text generation and vLLM's own server (`make compare-generation`)"
    table = Table(f"{inputs.spec.name}, {MAX_TOKENS} tokens an answer, greedy", head, rows)
    finish(options, "generation", title, [table], found, _judge(found))
    return 0


@contextmanager
def _serve(repository: Path) -> Iterator[Server]:
    server = Server(repository)
    try:
        server.start()
        server.wait_ready(timeout_s=_TIMEOUT_S)
        yield server
    finally:
        server.stop()


@contextmanager
def _serve_vllm(inputs: GenerationInputs) -> Iterator[tuple[str, int]]:
    """Run vLLM's OpenAI server with the settings of the core; yield its URL and process id."""
    core = inputs.spec.core
    port = reserve_ports(_HOST, {"port": 0})["port"]
    command = [
        str(environment_python()), "-m", "vllm.entrypoints.openai.api_server",
        *("--model", str(inputs.weights), "--served-model-name", inputs.spec.name),
        *("--host", _HOST, "--port", str(port), "--dtype", DTYPES[core.precision]),
        *("--max-model-len", str(inputs.max_length), "--max-num-seqs", str(core.max_num_seqs)),
        *("--max-num-batched-tokens", str(core.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(core.kv_cache.memory_mib << 20)),
        *("--generation-config", "vllm", "--enforce-eager", "--disable-uvicorn-access-log"),
        "--enable-prefix-caching" if core.enable_prefix_caching else "--no-enable-prefix-caching",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as scratch:
        log = Path(scratch, "log.txt")
        variables = {**PRIVATE, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        process = ChildProcess(command, log, variables=variables)
        try:
            end = time.monotonic() + _TIMEOUT_S
            while not responds_ok(f"{_HOST}:{port}", "/health"):
                if process.has_ended or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield f"http://{_HOST}:{port}/v1/chat/completions", process.pid
        finally:
            process.end(20.0)


async def _open_systems(
    clients: AsyncExitStack,
    inputs: GenerationInputs,
    ensemble: Server,
    vllm_url: str,
    vllm_pid: int,
) -> dict[str, tuple[Generate, int]]:
    """Return the client of each system and the process whose tree does the work."""
    client = AsyncClient(inputs.spec.name, ensemble.grpc_url, timeout_s=_TIMEOUT_S)
    await clients.enter_async_context(client)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    session = await clients.enter_async_context(aiohttp.ClientSession(connector=connector))
    worker = await clients.enter_async_context(_run_transformers(inputs))
    lock = asyncio.Lock()
    return {
        ENSEMBLE: (partial(_ask_ensemble, client), ensemble.pid),
        VLLM: (partial(_ask_openai, session, vllm_url), vllm_pid),
        TRANSFORMERS: (partial(_ask_transformers, worker, lock), worker.pid),
    }


@asynccontextmanager
async def _run_transformers(inputs: GenerationInputs) -> AsyncIterator[asyncio.subprocess.Process]:
    worker = Path(__file__).with_name("generation_transformers.py")
    process = await asyncio.create_subprocess_exec(
        *(str(environment_python()), str(worker), str(inputs.weights), str(MAX_TOKENS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        if process.stdout is None or not await process.stdout.readline():
            raise SystemExit("transformers did not start.")
        yield process
    finally:
        process.kill()
        await process.wait()


async def _ask_ensemble(client: AsyncClient, prompt: Prompt) -> Chunks:
    messages = prompt.messages or []
    async for chunk in client.chat(messages, max_tokens=MAX_TOKENS, temperature=0.0):
        yield len(chunk.token_ids)


async def _ask_transformers(
    process: asyncio.subprocess.Process, lock: asyncio.Lock, prompt: Prompt
) -> Chunks:
    async with lock:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("transformers has no pipe.")
        process.stdin.write(f"{json.dumps(prompt.ids)}\n".encode())
        while (await process.stdout.readline()).strip():
            yield 1


async def _ask_openai(session: aiohttp.ClientSession, url: str, prompt: Prompt) -> Chunks:
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
    lines = []
    ours = known.get((ENSEMBLE, str(COMPARED_CLIENTS)))
    for name, system, clients, minimum in (
        (f"{MAX_CLIENTS} clients by {COMPARED_CLIENTS}", ENSEMBLE, MAX_CLIENTS, 1.0),
        (f"ensemble by {VLLM}", VLLM, COMPARED_CLIENTS, 0.93),
        (f"ensemble by {TRANSFORMERS}", TRANSFORMERS, COMPARED_CLIENTS, 3.0),
    ):
        other = known.get((system, str(clients)))
        if ours is not None and other is not None:
            ratio = ours.median("tokens_per_s") / other.median("tokens_per_s")
            ratio = 1 / ratio if system == ENSEMBLE else ratio
            word = "met" if ratio >= minimum else "missed"
            lines.append(f"tokens/s, {name}: {ratio:.2f}, at least {minimum}: {word}")
    vllm = known.get((VLLM, str(COMPARED_CLIENTS)))
    for metric, maximum in (("first_ms", 15.0), ("gap_ms", 2.0)):
        if ours is not None and vllm is not None:
            more = ours.median(metric) - vllm.median(metric)
            word = "met" if more <= maximum else "missed"
            lines.append(f"{metric} more than {VLLM}: {more:+.1f}, at most +{maximum:g}: {word}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
