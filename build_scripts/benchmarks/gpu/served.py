"""A served pipeline under perf_analyzer: highest rate, one client alone, Poisson arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.engine_speed import Speed, summarize
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.harness import Turn, run_load, run_rounds
from triptych.serving.bench import perf_analyzer
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
class Served:
    """Loads of a served pipeline: closed loops, and Poisson arrivals."""

    model: str
    precision: str
    layout: str
    closed: tuple[Speed, ...]
    poisson: Speed

    @property
    def top(self) -> Speed:
        """Closed loop with the highest rate."""
        return max(self.closed, key=lambda point: point.rate_per_s)

    @property
    def single(self) -> Speed:
        """Closed loop of the fewest clients."""
        return min(self.closed, key=lambda point: point.clients)


def measure(
    names: tuple[str, str, str],
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
        names: Model, precision and layout of the result.
        budget: Time for everything; one round runs in any case.

    Raises:
        UserError: The server does not start, or responds with errors.
    """
    what, turn_s = f"served {pipeline}", seconds + OVERHEAD_S
    if budget.left() < START_S + (len(clients) + 1) * turn_s:
        ledger.skip(what, "no time left")
        return None
    model, system = names[0], " ".join(names)
    with Server(repository, models=[pipeline]) as server:

        def make_turn(name: str, **load: float) -> Turn:
            url = server.grpc_url
            return Turn(name, lambda: [("", run_load(url, pipeline, requests, seconds, **load))])

        turns = [
            make_turn(str(count), concurrency=count, warmup_requests=WARM_UP_REQUESTS)
            for count in clients
        ]
        minutes = (budget.left() - turn_s) / 60
        closed = tuple(
            summarize(model, system, f"clients: {one.system}", one, clients=int(one.system))
            for one in run_rounds([turns], rounds, max_minutes=minutes)
        )
        offered = POISSON_RATIO * max(point.rate_per_s for point in closed)
        done = closed[0].rounds
        if done < rounds:
            ledger.note(f"{what}: {done} instead of {rounds} rounds: the time is short")
        (series,) = run_rounds([[make_turn("Poisson", request_rate_per_s=offered)]], done)
    load = f"Poisson, {offered:.0f}/s"
    poisson = summarize(model, system, load, series, offered_per_s=offered)
    if poisson.rate_per_s < MIN_ANSWERED_RATIO * offered:
        rate = poisson.rate_per_s
        ledger.note(f"{what}: of {offered:.0f}/s offered, {rate:.0f}/s were answered")
    return Served(*names, closed, poisson)
