"""Systems timed in interleaved rounds on all loads, and the medians of any load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.gpu.feeds import EngineLoad
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.systems import Call, EngineSystem
from benchmarks.harness import Metrics, Series, Turn, run_rounds

MIN_CALLS = 10


@dataclass(frozen=True)
class Speed:
    """One system under one load, as medians over its rounds.

    Attributes:
        rate_per_s: Rate of rows; on a server, of answered texts.
        lowest_per_s: Rate of the slowest round.
        p50_ms: Median duration of a call; on a server, of a request.
        batch_size: Rows in a call; 0 on a server.
        lengths: ``mixed`` or ``equal``; empty on a server.
        clients: Number of clients of a closed loop; 0 for calls and for Poisson arrivals.
        offered_per_s: Rate of Poisson arrivals; None for anything else.
    """

    model: str
    system: str
    load: str
    rounds: int
    rate_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p50_ms: float
    p99_ms: float
    batch_size: int = 0
    lengths: str = ""
    clients: int = 0
    offered_per_s: float | None = None


def summarize(model: str, system: str, load: str, series: Series, **facts: Any) -> Speed:
    """Return the medians of a series; `facts` are the other fields of `Speed`."""
    rates = series.values("rate_per_s")
    return Speed(
        model, system, load, len(rates), series.median("rate_per_s"), min(rates), max(rates),
        series.median("p50_ms"), series.median("p99_ms"), **facts,
    )  # fmt: skip


def measure(
    model: str,
    systems: Sequence[EngineSystem],
    loads: Sequence[EngineLoad],
    *,
    rounds: int,
    seconds: float,
    budget: Budget,
    ledger: Ledger,
) -> list[Speed]:
    """Warm up all systems, then time them; a system that fails is left out.

    Args:
        systems: Systems in the order of importance: without time left the last are dropped.
        budget: Time for everything; one round runs in any case.
    """
    turns: list[Turn] = []
    turn_s = len(loads) * seconds
    for system in systems:
        what = f"{model}, {system.name}"
        if budget.left() < system.warm_up_s + (len(turns) + 1) * turn_s:
            ledger.skip(what, "no time left")
            continue
        with ledger.attempt(what):
            calls = _warm_up(system, loads)
            turns.append(Turn(system.name, partial(_time_loads, calls, seconds)))
    found = run_rounds(
        [turns],
        rounds,
        max_minutes=budget.left() / 60,
        on_error=lambda name, error: ledger.fail(f"{model}, {name}", error),
    )
    if found and len(found[0].rounds) < rounds:
        count = len(found[0].rounds)
        ledger.note(f"{model}: {count} instead of {rounds} rounds: the time is short")
    by_name = {load.name: load for load in loads}
    speeds = []
    for one in found:
        load = by_name[one.load]
        facts = {"batch_size": load.batch_size, "lengths": load.lengths}
        speeds.append(summarize(model, one.system, one.load, one, **facts))
    return speeds


def _time_loads(
    calls: Mapping[EngineLoad, Sequence[Call]], seconds: float
) -> list[tuple[str, Metrics]]:
    return [(load.name, time_calls(own, load, seconds)) for load, own in calls.items()]


def _warm_up(system: EngineSystem, loads: Sequence[EngineLoad]) -> dict[EngineLoad, list[Call]]:
    """Return the calls of every load, each called twice, so that all compilation is done."""
    calls = {load: [system.prepare(rows) for rows in load.batches] for load in loads}
    for _ in range(2):
        for load in loads:
            for call in calls[load]:
                call()
    return calls


def time_calls(
    calls: Sequence[Call],
    load: EngineLoad,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Call all batches in turn for `seconds`, each of them equally often; return the metrics."""
    took: list[float] = []
    start = end = clock()
    for number, call in enumerate(cycle(calls)):
        is_pass = number % len(calls) == 0  # long and short batches have their true shares
        if is_pass and end - start >= seconds and number >= MIN_CALLS:
            break
        began = end
        call()
        end = clock()
        took.append(end - began)
    p50, p99 = np.percentile(took, [50, 99]) * 1e3
    rate = load.batch_size * len(took) / (end - start)
    return {"rate_per_s": rate, "p50_ms": float(p50), "p99_ms": float(p99)}
