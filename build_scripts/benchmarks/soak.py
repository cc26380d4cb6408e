"""Watch memory over many requests: whether tritonserver, a Python step or /dev/shm grows.

Usage: ``python build_scripts/benchmarks/soak.py --requests 200000``.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median

from benchmarks.harness import closed_loop, finish, make_parser
from benchmarks.memory import make_growth_table, sample_memory
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.serving.bench import perf_analyzer
from triptych.serving.server import Server

_MIN_RATE_PER_S = 5.0
"""Rate below which the run is given up; slower than any machine that it runs on."""

_MAX_REQUESTS_PER_LOAD = 20_000
"""Maximum number of requests of one load, because perf_analyzer keeps all inputs and outputs."""


def main() -> int:
    """Serve, load and sample; a load that fails ends the benchmark with its error."""
    parser = make_parser(__doc__, "soak", "Memory over many requests (`make soak`)")
    add, longest_help = parser.add_argument, "maximum number of characters in a text"
    add("--requests", type=int, default=200_000)
    add("--longest", type=int, default=sys.maxsize, help=longest_help)
    add("--clients", type=int, default=32)
    add("--warm-up", type=float, default=10.0, help="seconds of load before")
    add("--every", type=float, default=2.0, help="seconds between two samples")
    add("--repository", type=Path, help="repository; by default it is built")
    add("--model", default=PIPELINE.name)
    options = parser.parse_args()
    texts = [text for text in traffic_texts() if len(text) <= options.longest]
    with (
        Server(options.repository or build(CACHE / "packed")) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        url, model, clients = server.grpc_url, options.model, options.clients
        closed_loop(url, model, texts, clients=clients, seconds=options.warm_up)

        def run_loads() -> list[perf_analyzer.LoadResult]:
            starts = range(0, options.requests, _MAX_REQUESTS_PER_LOAD)
            counts = [min(_MAX_REQUESTS_PER_LOAD, options.requests - start) for start in starts]
            return [
                perf_analyzer.run(
                    url, model, texts, concurrency=clients, request_count=count,
                    timeout_s=600 + count / _MIN_RATE_PER_S,
                )
                for count in counts
            ]  # fmt: skip

        running = pool.submit(run_loads)
        samples = sample_memory(server.pid, running.done, lambda: wait([running], options.every))
        loads = running.result()
    load = {
        "requests": sum(one.requests for one in loads),
        "rate_per_s": median(one.throughput_per_s for one in loads),
        "p99_ms": median(one.percentile_us(99) for one in loads) / 1e3,
    }
    note = "{requests} requests, {rate_per_s:.0f}/s, p99 {p99_ms:.0f} ms".format(**load)
    table = make_growth_table(samples, int(load["requests"]))
    finish(options, [table], {"load": load, "samples": samples}, [note])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
