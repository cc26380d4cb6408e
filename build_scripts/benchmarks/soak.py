"""Watch memory over many requests: whether tritonserver, a Python step or /dev/shm grows.

Usage: ``python build_scripts/benchmarks/soak.py --requests 200000``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from benchmarks.ensemble import Ensemble
from benchmarks.harness import finish, make_parser, say
from benchmarks.memory import SECONDS, make_growth_table, read_memory
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.base.errors import UserError
from triptych.serving.bench import perf_analyzer

_MIN_RATE_PER_S = 5.0
"""Rate below which the run is given up; slower than any machine that it runs on."""


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
    outcome: list[perf_analyzer.LoadResult | UserError] = []

    with Ensemble("soak", repository, options.model) as server:

        def load() -> None:
            try:
                result = perf_analyzer.run(
                    server.grpc_url,
                    options.model,
                    texts,
                    concurrency=options.clients,
                    request_count=options.requests,
                    timeout_s=600 + options.requests / _MIN_RATE_PER_S,
                )
            except UserError as error:
                outcome.append(error)
            else:
                outcome.append(result)

        server.load(texts, clients=options.clients, seconds=options.warm_up)
        runner = threading.Thread(target=load)
        runner.start()
        samples: list[dict[str, float]] = []
        began = time.monotonic()
        while runner.is_alive():
            samples.append({SECONDS: time.monotonic() - began, **read_memory(server.pid)})
            runner.join(options.every)
    (result,) = outcome
    if isinstance(result, UserError):
        say(f"the load failed after {samples[-1][SECONDS]:.0f} s: {result}")
        return 1
    table = make_growth_table(samples, result.requests)
    p99_ms = result.p99_us / 1e3
    note = f"{result.requests} requests, {result.throughput_per_s:.0f}/s, p99 {p99_ms:.0f} ms"
    data = {"load": result.as_dict(), "samples": samples}
    finish(options, "soak", "Memory over many requests (`make soak`)", [table], data, [note])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
