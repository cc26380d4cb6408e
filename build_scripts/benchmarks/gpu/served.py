"""A served pipeline under perf_analyzer: its top rate, one client alone, Poisson below the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.ledger import Budget, Ledger, fit
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.measure import WINDOWS, run_longer
from triptych.serving.bench.perf_output import LoadResult
from triptych.serving.server import Server

CLIENTS = (1, 16, 64, 256)
SHARE = 0.7
"""Of the top rate: the load of the target on the tail."""

OVERHEAD_S = 2.0
"""What a start of perf_analyzer takes besides what it measures."""

START_S = 30.0
WARM_UP_REQUESTS = 200
MIN_ANSWERED = 0.93
"""Share of the rate asked for that must be answered: else the load was not the one asked for."""


@dataclass(frozen=True)
class Loop:
    """One load: medians over its rounds.

    Attributes:
        clients: of a closed loop; 0 for Poisson arrivals.
        offered_per_s: Poisson arrivals a second; None for a closed loop.
        rounds: that it was measured in.
        rate_per_s: texts answered a second.
        lowest_per_s: in the slowest round.
        highest_per_s: in the fastest.
        p50_ms: median latency.
        p99_ms: 99th percentile of it.
    """

    clients: int
    offered_per_s: float | None
    rounds: int
    rate_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Served:
    """A served pipeline.

    Attributes:
        model: name of the model.
        precision: of the core.
        layout: of the core.
        closed: closed loops by number of clients.
        poisson: at `SHARE` of the top rate.
    """

    model: str
    precision: str
    layout: str
    closed: tuple[Loop, ...]
    poisson: Loop

    @property
    def top(self) -> Loop:
        """The closed loop with the highest rate."""
        return max(self.closed, key=lambda loop: loop.rate_per_s)

    @property
    def alone(self) -> Loop:
        """One client."""
        return min(self.closed, key=lambda loop: loop.clients)


def measure(
    names: Mapping[str, str],
    repository: Path,
    pipeline: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    rounds: int,
    seconds: float,
    budget: Budget,
    ledger: Ledger,
    clients: Sequence[int] = CLIENTS,
) -> Served | None:
    """Serve the pipeline on a real tritonserver and load it; None where that came to nothing.

    Args:
        names: `model`, `precision` and `layout` of the result.
        repository: folder of the models.
        pipeline: the ensemble.
        requests: the traffic, one text each.
        rounds: wanted.
        seconds: of one measurement.
        budget: what all of it may take.
        ledger: learns what was dropped or failed.
        clients: of the closed loops.

    Raises:
        UserError: the server does not start, or answers with errors.
    """
    what = f"served {pipeline}"
    turn_s = seconds + OVERHEAD_S
    # One turn more for the Poisson load.
    fitting, kept = fit(rounds, len(clients) + 1, turn_s, budget.left() - START_S)
    if kept <= len(clients):
        ledger.skip(what, "no time left")
        return None
    if fitting < rounds:
        ledger.note(f"{what}: {fitting} instead of {rounds} rounds: the time is short")
    with Server(repository, models=[pipeline]) as server:

        def load(**offered: Any) -> LoadResult:
            def run(all_windows_s: float) -> LoadResult:
                window_s = all_windows_s / WINDOWS
                return perf_analyzer.run(
                    server.grpc_url, pipeline, requests, window_s=window_s, **offered
                )

            return run_longer(run, seconds)

        closed: dict[int, list[LoadResult]] = {count: [] for count in clients}
        for number in range(fitting):
            shift = number * len(clients) // fitting
            for count in [*clients[shift:], *clients[:shift]]:
                warm = WARM_UP_REQUESTS if number == 0 else 0
                closed[count].append(load(concurrency=count, warmup_requests=warm))
            ledger.tell(f"{what}: round {number + 1}/{fitting}")
        loops = tuple(loop_of(results, count, None) for count, results in closed.items())
        offered = SHARE * max(loop.rate_per_s for loop in loops)
        results = [load(request_rate_per_s=offered) for _ in range(fitting)]
    poisson = loop_of(results, 0, offered)
    if poisson.rate_per_s < MIN_ANSWERED * offered:
        ledger.note(f"{what}: of {offered:.0f}/s offered, {poisson.rate_per_s:.0f}/s were answered")
    return Served(**names, closed=loops, poisson=poisson)


def loop_of(results: Sequence[LoadResult], clients: int, offered_per_s: float | None) -> Loop:
    """The medians of one load."""
    rates = [result.throughput_per_s for result in results]
    return Loop(
        clients=clients,
        offered_per_s=offered_per_s,
        rounds=len(results),
        rate_per_s=median(rates),
        lowest_per_s=min(rates),
        highest_per_s=max(rates),
        p50_ms=median(result.p50_us for result in results) / 1e3,
        p99_ms=median(result.p99_us for result in results) / 1e3,
    )
