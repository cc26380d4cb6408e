"""Built candidates against each other, each on a real server, under the pipeline's own traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from triptych.base.errors import Progress
from triptych.serving.bench import perf_analyzer
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.server import Server
from triptych.spec.precisions import Precision

ROUNDS = 3
WINDOW_S = 1.5
FAR_BEHIND = 0.75
"""A candidate slower than this share of the fastest is not measured again, but for the baseline."""

WARM_UP_REQUESTS = 100


@dataclass(frozen=True)
class Throughput:
    """How fast one candidate answered: medians over its rounds.

    Attributes:
        throughput_per_s: requests answered a second, of one row each.
        lowest_per_s: in the slowest round.
        highest_per_s: in the fastest.
        p99_ms: 99th percentile of the latency.
        rounds: that it was measured in.
    """

    throughput_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p99_ms: float
    rounds: int


def race(
    repositories: Mapping[Precision, Path],
    pipeline: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    baseline: Precision,
    clients: int,
    progress: Progress,
) -> dict[Precision, Throughput]:
    """Measure every candidate in turn, round after round; their servers run all the while.

    A server without requests costs no time, and what drifts on the machine hits all alike.

    Args:
        repositories: candidate to the repository it was built into.
        pipeline: name of the ensemble, the same in each.
        requests: the traffic, a row each.
        baseline: the candidate that the others are compared with.
        clients: each with one request under way.
        progress: told each measurement.

    Raises:
        UserError: a server does not start, or answers with an error.
    """
    results: dict[Precision, list[perf_analyzer.LoadResult]] = {name: [] for name in repositories}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(path, models=[pipeline], environment=UNSAMPLED))
            for name, path in repositories.items()
        }
        running = list(servers)
        for number in range(1, ROUNDS + 1):
            shift = number % len(running)  # no candidate always comes first
            for name in running[shift:] + running[:shift]:
                result = perf_analyzer.run(
                    servers[name].grpc_url,
                    pipeline,
                    requests,
                    concurrency=clients,
                    window_s=WINDOW_S,
                    warmup_requests=WARM_UP_REQUESTS if number == 1 else 0,
                )
                results[name].append(result)
                progress(
                    "race",
                    f"round {number}/{ROUNDS}: {name} {result.throughput_per_s:.0f}/s, "
                    f"p99 {result.p99_us / 1e3:.0f} ms",
                )
            fastest = max(results[name][-1].throughput_per_s for name in running)
            running = [
                name
                for name in running
                if name == baseline or results[name][-1].throughput_per_s >= FAR_BEHIND * fastest
            ]
    return {name: _throughput(of_one) for name, of_one in results.items()}


def _throughput(results: Sequence[perf_analyzer.LoadResult]) -> Throughput:
    rates = [result.throughput_per_s for result in results]
    return Throughput(
        throughput_per_s=median(rates),
        lowest_per_s=min(rates),
        highest_per_s=max(rates),
        p99_ms=median(result.p99_us for result in results) / 1e3,
        rounds=len(results),
    )
