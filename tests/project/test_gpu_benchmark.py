"""The GPU test's arithmetic on values: medians, budgets, targets, exit codes, the page."""

from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from benchmarks.gpu import engine_speed, report, targets
from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.feeds import EngineLoad
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import ALL_MET, BAD, INCOMPLETE, GpuResults
from benchmarks.gpu.served import Served
from benchmarks.gpu.systems import Call, EngineSystem
from triptych.base.tensors import TokenRow

ROWS = [TokenRow(tuple(range(1, length + 1)), length) for length in (3, 9)]
SINGLE = EngineLoad("batch 1, mixed lengths", 1, "mixed", ((ROWS[0],), (ROWS[1],)))


def quiet() -> Ledger:
    return Ledger(lambda line: None)


def speed(system: str, rows_per_s: float, *, batch: int = 1, lengths: str = "mixed") -> Speed:
    load = f"batch {batch}, {lengths}"
    return Speed("m", system, load, 3, rows_per_s, 1.0, 2.0, 0.5, 0.9, batch, lengths)


def loop(clients: int, rate: float, p50: float, p99: float, offered: float | None = None) -> Speed:
    figures = rate, rate, rate, p50, p99
    return Speed("m", "m fp16", "closed", 3, *figures, clients=clients, offered_per_s=offered)


def served(rate: float = 800.0, p99: float = 3.0, layout: str = "bucketed") -> Served:
    closed = (loop(1, 100.0, 1.0, 2.0), loop(64, rate, 5.0, 9.0))
    return Served("m", "fp16", layout, closed, loop(0, 0.7 * rate, 1.5, p99, 0.7 * rate))


SPEEDS = [
    speed("engine fp16 packed", 300.0),
    speed("engine fp16 bucketed, CUDA graphs", 400.0),
    speed("engine fp16 bucketed, CUDA graphs", 1000.0, batch=32),
    speed("engine fp16 bucketed, no graphs", 900.0, batch=32),
    speed("engine int8 bucketed, CUDA graphs", 9e9),
    speed("engine fp16 packed", 9e9, batch=32, lengths="equal"),
    speed("torch eager fp32", 100.0),
    speed("torch eager fp32", 9e9, batch=32),
]


def test_a_turn_takes_whole_passes_and_at_least_some_calls() -> None:
    clock = count(0.0, 0.25)
    done: list[str] = []
    calls: list[Call] = [lambda: done.append("a"), lambda: done.append("b")]
    turn = engine_speed.time_calls(calls, SINGLE, 2.6, lambda: next(clock))
    assert turn == {"rate_per_s": 4.0, "p50_ms": 250.0, "p99_ms": 250.0}
    assert done.count("a") == done.count("b") == 6
    engine_speed.time_calls(calls, SINGLE, 0.0, lambda: next(clock))
    assert len(done) == 12 + engine_speed.MIN_CALLS


def measure(
    entries: list[EngineSystem], ledger: Ledger, seconds: float, budget: Budget
) -> list[tuple[str, int]]:
    """Return the systems that were measured, with their numbers of rounds."""
    found = engine_speed.measure(
        "m", entries, [SINGLE], rounds=3, seconds=seconds, budget=budget, ledger=ledger
    )
    return [(one.system, one.rounds) for one in found]


def test_systems_take_turns_and_one_that_breaks_is_told_and_left_out() -> None:
    order: list[str] = []

    def system(name: str, *, breaks_at: float = inf) -> EngineSystem:
        calls = count()

        def call() -> None:
            order.append(name)
            if next(calls) >= breaks_at:
                raise RuntimeError("out\nof memory")

        return EngineSystem(name, lambda rows: call)

    ledger = quiet()
    entries = [system("a"), system("b"), system("c", breaks_at=4)]
    assert measure(entries, ledger, 0.0, Budget(inf)) == [("a", 3), ("b", 3)]
    assert [(one.what, one.reason) for one in ledger.failed] == [
        ("m, c", "RuntimeError: out of memory")
    ]
    turns = "".join(order)
    assert turns.startswith("aaaabbbbcccc")  # both batches, twice: the warm-up
    assert turns[12:] == "a" * 10 + "b" * 10 + "c" + "b" * 10 + "a" * 10 + "a" * 10 + "b" * 10


def test_a_short_budget_names_what_it_drops() -> None:
    ledger = quiet()
    entries = [EngineSystem(name, lambda rows: lambda: None) for name in "abc"]
    entries.insert(1, EngineSystem("compiled", lambda rows: lambda: None, warm_up_s=60.0))
    assert measure(entries, ledger, 0.01, Budget(0.025, lambda: 0.0)) == [("a", 1), ("b", 1)]
    assert [one.what for one in ledger.not_run] == ["m, compiled", "m, c"]
    assert ledger.notes == ["m: 1 instead of 3 rounds: the time is short"]


def test_targets_are_judged_by_their_figures() -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["met", "met", "met"]),
        ({"torch eager fp32": 101.0}, ["missed", "met", "met"]),
        ({"rate": 699.0}, ["met", "missed", "met"]),
        ({"p99": 3.1}, ["met", "met", "missed"]),
        ({"served": None}, ["met", "not run", "not run"]),
        ({"layout": "packed"}, ["met", "missed", "met"]),
    ]
    for changes, statuses in cases:
        speeds = [
            replace(one, rate_per_s=changes.get(one.system, one.rate_per_s))
            if one.batch_size == 1
            else one
            for one in SPEEDS
        ]
        speeds.append(speed("engine fp16 packed", 1200.0, batch=8))
        options = {key: changes[key] for key in ("rate", "p99", "layout") if key in changes}
        every = [] if "served" in changes else [served(**options)]
        found = [target.status for target in targets.judge("m", speeds, every)]
        assert found == statuses, changes
    # A load that was not answered misses the tail, whatever the latency of the rest.
    slow = replace(served(), poisson=loop(0, 400.0, 0.1, 0.1, 560.0))
    assert targets.judge("m", SPEEDS, [slow])[2].status == "missed"
    for lacking in ("engine fp16", "torch eager fp32"):
        speeds = [one for one in SPEEDS if not one.system.startswith(lacking)]
        target = targets.judge("m", speeds, [])[0]
        assert (target.status, lacking in target.figures) == ("not run", True)


def findings(*, fakes: tuple[str, ...] = (), finished: bool = True) -> GpuResults:
    found = GpuResults(Machine({"GPU": "H"}, {}), fakes, finished)
    found.speeds, found.served = list(SPEEDS), [served()]
    found.targets = targets.judge("m", SPEEDS, [served()])
    return found


def with_entries(*, skipped: int = 0, failed: int = 0) -> Ledger:
    ledger = quiet()
    for _ in range(skipped):
        ledger.skip("onnxruntime-gpu", "it is not installed")
    for _ in range(failed):
        ledger.fail("engine of m", "out of memory")
    return ledger


def test_the_exit_code_is_0_only_where_all_ran_and_was_met() -> None:
    missed = findings()
    missed.targets[0] = replace(missed.targets[0], status="missed")
    for found, ledger, code in (
        (findings(), quiet(), ALL_MET),
        (findings(), with_entries(skipped=1), INCOMPLETE),
        (findings(fakes=("tensorrt",)), quiet(), INCOMPLETE),
        (findings(finished=False), quiet(), INCOMPLETE),
        (replace(findings(), targets=[]), quiet(), INCOMPLETE),
        (findings(), with_entries(skipped=1, failed=1), BAD),
        (missed, with_entries(skipped=1), BAD),
    ):
        assert report.exit_code(found, ledger) == code, (found, ledger)
