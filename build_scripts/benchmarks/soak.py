"""Watch memory over many requests: whether tritonserver, a Python step or /dev/shm grows.

Usage: ``python build_scripts/benchmarks/soak.py --requests 200000``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from statistics import median

from benchmarks.ensemble import Ensemble
from benchmarks.harness import finish, make_parser, say
from benchmarks.memory import SECONDS, make_growth_table, read_memory
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.base.errors import UserError
from triptych.serving.bench import perf_analyzer

_MIN_RATE_PER_S = 5.0
"""Rate below which the run is given up; slower than any machine that it runs on."""

_MAX_REQUESTS_PER_LOAD = 20_000
"""Maximum number of requests of one load, because perf_analyzer keeps all inputs and outputs."""


def main() -> int:
    """Serve, load and sample; return 1 if the load fails."""
    parser = make_parser(__doc__, "soak")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument(
        "--longest", type=int, default=sys.maxsize, help="maximum number of characters in a text"
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of load before")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--repository", type=Path, help="repository; by default it is built")
    parser.add_argument("--model", default=PIPELINE.name)
    options = parser.parse_args()
    texts = [text for text in traffic_texts() if len(text) <= options.longest]
    repository = options.repository or build(CACHE / "packed")
    loads: list[perf_analyzer.LoadResult] = []
    failures: list[UserError] = []

    with Ensemble("soak", repository, options.model) as server:

        def load() -> None:
            remaining = options.requests
            while remaining > 0 and not failures:
                count = min(remaining, _MAX_REQUESTS_PER_LOAD)
                try:
                    loads.append(
                        perf_analyzer.run(
                            server.grpc_url,
                            options.model,
                            texts,
                            concurrency=options.clients,
                            request_count=count,
                            timeout_s=600 + count / _MIN_RATE_PER_S,
                        )
                    )
                except UserError as error:
                    failures.append(error)
                remaining -= count

        server.load(texts, clients=options.clients, seconds=options.warm_up)
        runner = threading.Thread(target=load)
        runner.start()
        samples: list[dict[str, float]] = []
        began = time.monotonic()
        while runner.is_alive():
            samples.append({SECONDS: time.monotonic() - began, **read_memory(server.pid)})
            runner.join(options.every)
    if failures:
        say(f"the load failed after {samples[-1][SECONDS]:.0f} s: {failures[0]}")
        return 1
    load_metrics = {
        "requests": sum(one.requests for one in loads),
        "rate_per_s": median(one.throughput_per_s for one in loads),
        "p99_ms": median(one.percentile_us(99) for one in loads) / 1e3,
    }
    table = make_growth_table(samples, int(load_metrics["requests"]))
    note = "{requests} requests, {rate_per_s:.0f}/s, p99 {p99_ms:.0f} ms".format(**load_metrics)
    data = {"load": load_metrics, "samples": samples}
    finish(options, "soak", "Memory over many requests (`make soak`)", [table], data, [note])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
