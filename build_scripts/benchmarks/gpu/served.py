"""A served pipeline under perf_analyzer: highest rate, one client alone, Poisson arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.harness import Series, Turn, run_rounds
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.measure import WINDOWS, run_longer
from triptych.serving.server import Server

CLIENTS = (1, 16, 64, 256)
POISSON_RATIO = 0.7
"""Rate of the Poisson arrivals as a ratio of the highest rate."""
OVERHEAD_S, START_S = 2.0, 30.0
"""Durations of a start of perf_analyzer and of the server."""
WARM_UP_REQUESTS = 200
MIN_ANSWERED_RATIO = 0.93
"""Minimum ratio of answered to offered requests for a valid Poisson load."""


@dataclass(frozen=True)
class LoadPoint:
    """One load, as medians over its rounds.

    Attributes:
        clients: Number of clients of a closed loop; 0 for Poisson arrivals.
        offered_per_s: Rate of Poisson arrivals; None for a closed loop.
        rate_per_s: Rate of answered texts.
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
    """Loads of a served pipeline: closed loops, and Poisson arrivals."""

    model: str
    precision: str
    layout: str
    closed: tuple[LoadPoint, ...]
    poisson: LoadPoint

    @property
    def top(self) -> LoadPoint:
        """Closed loop with the highest rate."""
        return max(self.closed, key=lambda point: point.rate_per_s)

    @property
    def single(self) -> LoadPoint:
        """Closed loop of the fewest clients."""
        return min(self.closed, key=lambda point: point.clients)


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
    """Serve the pipeline on a real tritonserver and load it; return None without time left.

    Args:
        names: `model`, `precision` and `layout` of the result.
        requests: Traffic of one text each.
        seconds: Duration of one measurement.
        budget: Time for everything; one round runs in any case.

    Raises:
        UserError: The server does not start, or responds with errors.
    """
    what, turn_s = f"served {pipeline}", seconds + OVERHEAD_S
    if budget.left() < START_S + (len(clients) + 1) * turn_s:
        ledger.skip(what, "no time left")
        return None
    with Server(repository, models=[pipeline]) as server:

        def load(**offered: Any) -> list[tuple[str, dict[str, float]]]:
            def run(windows_s: float) -> perf_analyzer.LoadResult:
                window_s, url = windows_s / WINDOWS, server.grpc_url
                return perf_analyzer.run(url, pipeline, requests, window_s=window_s, **offered)

            found = run_longer(run, seconds)
            p50, p99 = found.percentiles_us(50, 99)
            metrics = {"rate_per_s": found.throughput_per_s, "p50_ms": p50 / 1e3}
            return [("", {**metrics, "p99_ms": p99 / 1e3})]

        turns = [
            Turn(str(n), lambda n=n: load(concurrency=n, warmup_requests=WARM_UP_REQUESTS))  # type: ignore[misc]
            for n in clients
        ]
        minutes = (budget.left() - turn_s) / 60
        found = run_rounds([turns], rounds, max_minutes=minutes)
        points = tuple(make_point(one, int(one.system), None) for one in found)
        offered = POISSON_RATIO * max(point.rate_per_s for point in points)
        done = points[0].rounds
        if done < rounds:
            ledger.note(f"{what}: {done} instead of {rounds} rounds: the time is short")
        turn = Turn("Poisson", lambda: load(request_rate_per_s=offered))
        poisson = make_point(run_rounds([[turn]], done)[0], 0, offered)
    if poisson.rate_per_s < MIN_ANSWERED_RATIO * offered:
        rate = poisson.rate_per_s
        ledger.note(f"{what}: of {offered:.0f}/s offered, {rate:.0f}/s were answered")
    return Served(**names, closed=points, poisson=poisson)


def make_point(series: Series, clients: int, offered_per_s: float | None) -> LoadPoint:
    """Return the medians of one load."""
    rates = series.values("rate_per_s")
    return LoadPoint(
        clients, offered_per_s, len(rates), series.median("rate_per_s"), min(rates), max(rates),
        series.median("p50_ms"), series.median("p99_ms"),
    )  # fmt: skip
