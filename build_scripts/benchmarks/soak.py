"""Watch a server over many requests: whether memory, open files, threads or /dev/shm grow.

Usage: ``python build_scripts/benchmarks/soak.py --requests 200000``. With ``--emulated`` the core
takes no time, so that many requests pass the steps in little time; with ``--gateway`` clients of
the gateway send requests as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.emulated_core import CORES, write_pipeline
from benchmarks.harness import closed_loop, finish, make_parser
from benchmarks.memory import make_growth_tables, sample_memory
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.perf_analyzer import Duration
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.server import Server

_MIN_RATE_PER_S = 5.0
"""Rate below which the run is given up; slower than any machine that it runs on."""

_MAX_REQUESTS_PER_LOAD = 20_000
"""Maximum number of requests of one load, because perf_analyzer keeps all inputs and outputs."""


def main() -> int:
    """Serve, load and sample; a load that fails ends the benchmark with its error."""
    parser = make_parser(__doc__, "soak", "A server over many requests (`make soak`)")
    add, longest_help = parser.add_argument, "maximum number of characters in a text"
    add("--requests", type=int, default=200_000)
    add("--longest", type=int, default=sys.maxsize, help=longest_help)
    add("--clients", type=int, default=32)
    add("--warm-up", type=float, default=10.0, help="seconds of load before")
    add("--every", type=float, default=2.0, help="seconds between two samples")
    add("--repository", type=Path, help="repository; by default it is built")
    add("--model", default=PIPELINE.name)
    add("--emulated", action="store_true", help="a core that takes no time")
    add("--gateway", type=int, default=0, help="number of clients of the gateway")
    options = parser.parse_args()
    texts = [text for text in traffic_texts() if len(text) <= options.longest]
    repository = options.repository or build(CACHE / "packed")
    if options.emulated:
        target = CACHE / "soak_emulated"
        repository = write_pipeline(repository, options.model, target, CORES["zero"])
    with ExitStack() as stack:
        server = stack.enter_context(Server(repository))
        pool = stack.enter_context(ThreadPoolExecutor(1 + options.gateway))
        url, model, clients = server.grpc_url, options.model, options.clients
        beside = None
        if options.gateway:
            beside, address = stack.enter_context(_gateway(repository, url))
        closed_loop(url, model, texts, clients=clients, seconds=options.warm_up)

        def run_loads() -> list[perf_analyzer.LoadResult]:
            starts = range(0, options.requests, _MAX_REQUESTS_PER_LOAD)
            counts = [min(_MAX_REQUESTS_PER_LOAD, options.requests - start) for start in starts]
            return [
                perf_analyzer.run(
                    url, model, texts, OfferedLoad("concurrency", clients),
                    Duration(request_count=count), timeout_s=600 + count / _MIN_RATE_PER_S,
                )
                for count in counts
            ]  # fmt: skip

        running = pool.submit(run_loads)
        posted = [
            pool.submit(_post_until, running.done, address, model) for _ in range(options.gateway)
        ]
        samples = sample_memory(
            server.pid, running.done, lambda: wait([running], options.every), beside
        )
        loads = running.result()
        through_gateway = sum(each.result() for each in posted)
    load = {
        "requests": sum(one.requests for one in loads) + through_gateway,
        "through_gateway": through_gateway,
        "rate_per_s": median(one.throughput_per_s for one in loads),
        "p99_ms": median(one.percentile_us(99) for one in loads) / 1e3,
    }
    note = (
        "{requests} requests, {through_gateway} of them by the gateway, {rate_per_s:.0f}/s, "
        "p99 {p99_ms:.0f} ms"
    ).format(**load)
    tables = make_growth_tables(samples, int(load["requests"]))
    finish(options, tables, {"load": load, "samples": samples}, [note])
    return 0


@contextmanager
def _gateway(repository: Path, url: str) -> Iterator[tuple[int, str]]:
    """Run a gateway in front of the server at `url`; yield its process id and its address."""
    words = ["gateway", "--repository", str(repository), "--url", url, "--port=0", "--json"]
    triptych = str(Path(sys.executable).with_name("triptych"))
    with subprocess.Popen([triptych, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["http"]
        finally:
            process.terminate()


def _post_until(is_over: Callable[[], bool], address: str, model: str) -> int:
    """Send requests to the gateway until `is_over`; return how many were answered."""
    body = json.dumps({"model": model, "input": "a text of a few words"}).encode()
    headers = {"Content-Type": "application/json"}
    posted = 0
    while not is_over():
        request = urllib.request.Request(f"{address}/v1/embeddings", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
        posted += 1
    return posted


if __name__ == "__main__":
    raise SystemExit(main())
