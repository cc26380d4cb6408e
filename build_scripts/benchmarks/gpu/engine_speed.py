"""Systems timed in interleaved rounds on all loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

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
        lengths: ``mixed`` or ``equal``.
        lowest_per_s: Rate of the slowest round.
        p50_ms: Median duration of a call.
    """

    model: str
    system: str
    load: str
    batch_size: int
    lengths: str
    rounds: int
    rows_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p50_ms: float
    p99_ms: float


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
        seconds: Duration of one measurement.
        budget: Time for everything; one round runs in any case.
        ledger: Receives what was dropped or failed.
    """
    turns: list[Turn] = []
    turn_s = len(loads) * seconds
    for system in systems:
        what = f"{model}, {system.name}"
        if budget.left() < system.warm_up_s + (len(turns) + 1) * turn_s:
            ledger.skip(what, "no time left")
            continue
        try:
            calls = _warm_up(system, loads)
        except Exception as error:  # whatever prevents a run is reported
            ledger.fail(what, error)
            continue

        def time_loads(calls: Mapping[EngineLoad, list[Call]] = calls) -> list[tuple[str, Metrics]]:
            return [(load.name, time_calls(calls[load], load, seconds)) for load in loads]

        turns.append(Turn(system.name, time_loads))
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
    return [summarize(model, one, by_name[one.load]) for one in found]


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
    return {"rows_per_s": rate, "p50_ms": float(p50), "p99_ms": float(p99)}


def summarize(model: str, series: Series, load: EngineLoad) -> Speed:
    """Return the medians of one system under one load."""
    rates = series.values("rows_per_s")
    return Speed(
        model, series.system, load.name, load.batch_size, load.lengths, len(rates),
        series.median("rows_per_s"), min(rates), max(rates),
        series.median("p50_ms"), series.median("p99_ms"),
    )  # fmt: skip
