"""Contenders timed in turns: every one once a round, all loads; medians over the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import numpy as np

from benchmarks.gpu.contenders import Call, Contender
from benchmarks.gpu.feeds import Load
from benchmarks.gpu.ledger import Budget, Ledger, fit

MIN_CALLS = 10
"""Of a measurement, however slow."""


@dataclass(frozen=True)
class Turn:
    """One measurement: rows a second, and milliseconds a call."""

    rows_per_s: float
    p50_ms: float
    p99_ms: float
    calls: int


@dataclass(frozen=True)
class Speed:
    """One contender under one load: medians over its rounds.

    Attributes:
        model: name of the model.
        contender: name of the contender.
        load: name of the load.
        batch_size: rows a call.
        lengths: ``mixed`` or ``equal``.
        rounds: that it was measured in.
        calls: of all rounds together.
        rows_per_s: rows a second.
        lowest_per_s: in the slowest round.
        highest_per_s: in the fastest.
        p50_ms: median time of a call.
        p99_ms: 99th percentile of it.
    """

    model: str
    contender: str
    load: str
    batch_size: int
    lengths: str
    rounds: int
    calls: int
    rows_per_s: float
    lowest_per_s: float
    highest_per_s: float
    p50_ms: float
    p99_ms: float


def measure(
    model: str,
    contenders: Sequence[Contender],
    loads: Sequence[Load],
    *,
    rounds: int,
    seconds: float,
    budget: Budget,
    ledger: Ledger,
) -> list[Speed]:
    """Warm up, then time all contenders in turns; one that fails is left out from then on.

    Args:
        model: name of the model.
        contenders: the most important first: the last are dropped first.
        loads: that each gets.
        rounds: wanted.
        seconds: of one measurement.
        budget: what all of it may take.
        ledger: learns what was dropped or failed.
    """
    ready: dict[str, Mapping[Load, list[Call]]] = {}
    turn_s = len(loads) * seconds
    for contender in contenders:
        what = f"{model}, {contender.name}"
        # What is ready already must still get one round.
        if budget.left() < contender.warm_s + (len(ready) + 1) * turn_s:
            ledger.skip(what, "no time left")
            continue
        try:
            ready[contender.name] = _warm(contender, loads)
        except Exception as error:  # whatever keeps a contender from running is told
            ledger.fail(what, f"{type(error).__name__}: {error}")
    fitting, kept = fit(rounds, len(ready), turn_s, budget.left())
    for name in list(ready)[kept:]:
        ledger.skip(f"{model}, {name}", "no time left")
        del ready[name]
    if fitting < rounds and ready:
        ledger.note(f"{model}: {fitting} instead of {rounds} rounds: the time is short")
    found: dict[tuple[str, Load], list[Turn]] = {}
    for number in range(fitting):
        order = list(ready)
        shift = number * len(order) // fitting
        for name in order[shift:] + order[:shift]:
            try:
                for load, calls in ready[name].items():
                    found.setdefault((name, load), []).append(time_calls(calls, load, seconds))
            except Exception as error:
                ledger.fail(f"{model}, {name}", f"{type(error).__name__}: {error}")
                del ready[name]
        ledger.tell(f"{model}: round {number + 1}/{fitting} of {len(order)} contenders")
    names = [contender.name for contender in contenders]
    return [
        summarize(model, name, load, turns)
        for (name, load), turns in sorted(found.items(), key=lambda item: names.index(item[0][0]))
        if name in ready
    ]


def _warm(contender: Contender, loads: Sequence[Load]) -> dict[Load, list[Call]]:
    """Calls of every load, each called twice: what compiles, tunes or grows does so now."""
    calls = {load: [contender.prepare(rows) for rows in load.batches] for load in loads}
    for _ in range(2):
        for of_load in calls.values():
            for call in of_load:
                call()
    return calls


def time_calls(
    calls: Sequence[Call],
    load: Load,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Turn:
    """One call after the other until `seconds` are over, and as many of each batch."""
    took: list[float] = []
    start = end = clock()
    for number, call in enumerate(cycle(calls)):
        whole = number % len(calls) == 0  # long and short batches have their true shares
        if whole and end - start >= seconds and number >= MIN_CALLS:
            break
        began = end
        call()
        end = clock()
        took.append(end - began)
    p50, p99 = np.percentile(took, [50, 99]) * 1e3
    return Turn(load.batch_size * len(took) / (end - start), float(p50), float(p99), len(took))


def summarize(model: str, contender: str, load: Load, turns: Sequence[Turn]) -> Speed:
    """The medians of one contender under one load."""
    rates = [turn.rows_per_s for turn in turns]
    return Speed(
        model=model,
        contender=contender,
        load=load.name,
        batch_size=load.batch_size,
        lengths=load.lengths,
        rounds=len(turns),
        calls=sum(turn.calls for turn in turns),
        rows_per_s=median(rates),
        lowest_per_s=min(rates),
        highest_per_s=max(rates),
        p50_ms=median(turn.p50_ms for turn in turns),
        p99_ms=median(turn.p99_ms for turn in turns),
    )
