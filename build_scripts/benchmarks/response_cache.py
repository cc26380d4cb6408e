"""Measure `serving.response_cache`: a request that is new to the server, and one it has answered.

New requests have texts that no earlier request had; repeated ones are a few texts again and again.
The same pipeline without a cache answers the new requests, too.

Usage: ``python build_scripts/benchmarks/response_cache.py [--clients 1 32] [--rounds 5]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count, cycle, islice

from tritonclient import grpc

from benchmarks.harness import Metrics, Turn, finish, make_parser, run_load, run_rounds, tabulate
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.container.flags import cache_flags
from triptych.serving.bench.resources import process_tree
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.server import Server

_NAME = PIPELINE.name
NEW, REPEATED, WITHOUT = "new requests", "repeated requests", "new requests, no cache"
_NEW_TEXTS = 20_000
"""Number of texts of a turn; more than a server answers in that time."""
_REPEATED_TEXTS = 64
COST = "core-ms of the server"


def main() -> int:
    """Serve both pipelines, measure in rounds, compare with new requests."""
    parser = make_parser(__doc__, "response_cache", "Response cache", rounds=5, seconds=3.0)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 32])
    options = parser.parse_args()
    texts, numbers = traffic_texts(), count()

    def new_texts() -> list[str]:
        return [f"{next(numbers)} {text}" for text in islice(cycle(texts), _NEW_TEXTS)]

    with ExitStack() as stack:
        servers = {}
        for is_cached in (True, False):
            value = str(is_cached).lower()
            repository = build(CACHE / f"cache-{value}", f"serving.response_cache={value}")
            flags = cache_flags(repository)
            servers[is_cached] = stack.enter_context(Server(repository, extra_args=flags))
        systems: dict[str, tuple[Server, Callable[[], list[str]]]] = {
            NEW: (servers[True], new_texts),
            REPEATED: (servers[True], lambda: texts[:_REPEATED_TEXTS]),
            WITHOUT: (servers[False], new_texts),
        }

        def make_turn(name: str, clients: int) -> Turn:
            def measure() -> list[tuple[str, Metrics]]:
                server, make = systems[name]
                metrics = _measure(server, make(), clients, options.seconds)
                return [(f"{clients} clients", metrics)]

            return Turn(name, measure)

        groups = [[make_turn(name, clients) for name in systems] for clients in options.clients]
        found = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    new = {one.load: one for one in found if one.system == NEW}
    table = tabulate(
        "Medians of the rounds, with the range",
        found,
        {
            "requests": lambda one: one.system,
            "load": lambda one: one.load,
            "requests/s": lambda one: f"{one.text('rate_per_s')} ({one.range('rate_per_s')})",
            "p50 ms": lambda one: one.text("p50_ms", 2),
            COST: lambda one: f"{one.text(COST, 3)} ({one.range(COST, 3)})",
            "of a new request": lambda one: f"{one.median(COST) / new[one.load].median(COST):.3f}",
            "answered from the cache": lambda one: f"{one.median('hits'):.1%}",
        },
    )
    finish(options, [table], {"series": found})
    return 0


def _measure(server: Server, texts: Sequence[str], clients: int, seconds: float) -> Metrics:
    """Return rate, latency, processor time of the server for a request, and share of hits."""
    before = _read(server)
    load = OfferedLoad("concurrency", clients)
    result = run_load(server.grpc_url, _NAME, texts, seconds, load)
    used_ms, answered, hits = (now - then for now, then in zip(_read(server), before, strict=True))
    return {**result, COST: used_ms / answered, "hits": hits / answered}


def _read(server: Server) -> tuple[float, int, int]:
    """Return the processor time in ms, the answered requests, and those from the cache."""
    used_s = 0.0
    for process in process_tree(server.pid):
        times = process.cpu_times()
        used_s += times.user + times.system
    with grpc.InferenceServerClient(server.grpc_url) as client:
        (model,) = client.get_inference_statistics(_NAME).model_stats
    stats = model.inference_stats
    return 1e3 * used_s, stats.success.count, stats.cache_hit.count


if __name__ == "__main__":
    raise SystemExit(main())
