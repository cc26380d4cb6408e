"""The benchmarks: rounds, results and their page, the simulated fleet, figures of the GPU run."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness, results
from benchmarks.autoscaler import (
    Autoscaler,
    Observed,
    Scaling,
    ScalingPolicy,
    Trigger,
    deployed,
    fixed,
    own,
)
from benchmarks.fleet_simulation import Fleet, Service, arrivals, capacity
from benchmarks.gpu import engine_speed, report, targets
from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.feeds import EngineLoad
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import ALL_MET, BAD, INCOMPLETE, GpuResults
from benchmarks.gpu.served import Served
from benchmarks.gpu.systems import Call, EngineSystem
from benchmarks.harness import Series, Turn, run_rounds
from benchmarks.results import Table
from deploy_cases import options, write_built
from triptych.base.explained import plain
from triptych.base.tensors import TokenRow
from triptych.deploy.context import read_context
from triptych.deploy.kubernetes import render_scaled_object


def turn(name: str, order: list[str], *, breaks_at: float = inf) -> Turn:
    calls = count()

    def measure() -> list[tuple[str, dict[str, float]]]:
        order.append(name)
        if next(calls) >= breaks_at:
            raise RuntimeError("out of memory")
        return [("8 clients", {"rate_per_s": float(len(order))})]

    return Turn(name, measure)


def test_systems_take_turns_until_one_fails_or_the_time_is_over() -> None:
    order: list[str] = []
    found = run_rounds([[turn(name, order) for name in "abc"], [turn("d", order)]], 3)
    assert "".join(order) == "abcd" + "bcad" + "cabd"
    assert [(one.system, one.load, len(one.rounds)) for one in found] == [
        (name, "8 clients", 3) for name in "abcd"
    ]
    order.clear()
    errors: list[str] = []
    turns = [turn("a", order), turn("b", order, breaks_at=1)]
    found = run_rounds([turns], 3, on_error=lambda name, error: errors.append(f"{name}: {error}"))
    assert [one.system for one in found] == ["a"]
    assert (errors, order.count("b")) == (["b: out of memory"], 2)
    with pytest.raises(RuntimeError):
        run_rounds([[turn("b", order, breaks_at=0)]], 1)
    clock: Callable[[], float] = iter([0.0, 0.0, 50.0, 50.0, 110.0, 110.0]).__next__
    found = run_rounds([[turn("a", [])]], 9, max_minutes=2.0, clock=clock)
    assert len(found[0].rounds) == 2
    series = Series("a", "8", [{"p50_ms": value} for value in (3.0, 1.0, 8.25)])
    assert (series.text("p50_ms", 1), series.range("p50_ms")) == ("3.0", "1-8")


def test_results_are_printed_written_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "PUBLISHED", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "_LOAD_AT_START", 2.5)
    monkeypatch.setattr("sys.argv", [str(results.ROOT / "build_scripts/x.py"), "--only", "a b"])
    parser = harness.make_parser("Measure.\n\nMore.", "x", "X", rounds=1, seconds=1.0)
    output = tmp_path / "x.json"
    given = parser.parse_args(["--output", str(output), "--publish"])
    table = Table("Title", ("system", "texts/s"), [("a", "7")])
    harness.finish(given, [table], [Series("a", "", [{"rate_per_s": 7.0}])], ["note"])
    assert "| a | 7 |" in capsys.readouterr().out
    assert json.loads(output.read_text())["measurements"][0]["rounds"] == [{"rate_per_s": 7.0}]
    page = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    renew = "- Renew: `python build_scripts/x.py --only 'a b'`"
    for part in ("## X\n", "| a | 7 |", "- note", renew, "load average 2.5"):
        assert part in page


def test_the_page_of_results_is_that_of_the_published_files() -> None:
    files = sorted(results.PUBLISHED.glob("*.json"))
    page = results.render_page([json.loads(file.read_text(encoding="utf-8")) for file in files])
    assert results.PAGE.read_text(encoding="utf-8") == page


SEEN = Observed(0.0, 0.0, 0.0, 0.0, replicas=4)
RATE = Trigger(lambda seen: seen.offered_per_s, 10.0, "fleet", 60.0)
SERVICE = Service((0.0, 0.1, 0.11, 0.12, 0.13), max_wait_s=2.0)


def always(seen: Observed, _window_s: float) -> Observed:
    return seen


def steps(scaling: Scaling, values: list[float], first: int, seconds: float = 15.0) -> list[int]:
    """Replicas after each look, at these rates."""
    autoscaler, replicas, found = Autoscaler(scaling), first, []
    for index, value in enumerate(values):
        seen = replace(SEEN, offered_per_s=value, queue_by_compute=value, replicas=replicas)
        replicas = autoscaler.replicas(index * seconds, replicas, partial(always, seen))
        found.append(replicas)
    return found


def test_the_formula_is_that_of_kubernetes() -> None:
    fleet = Scaling(
        "rate", (RATE,), min_replicas=2, max_replicas=40, down=ScalingPolicy(0.0, replicas=0)
    )
    # ceil(value / target), within bounds; 10 % off is left alone; NaN too.
    for value, replicas in ((40.0, 4), (43.0, 4), (45.0, 5), (nan, 4), (1.0, 2)):
        assert steps(fleet, [value], 4) == [replicas], value
    # Twice as many, or four more, in 15 s.
    assert steps(fleet, [400.0] * 5, 2) == [6, 12, 24, 40, 40]
    ratio = Trigger(lambda seen: seen.queue_by_compute, 1.0, "replica", 60.0)
    assert steps(replace(fleet, triggers=(ratio,)), [1.5, 1.05, 0.5], 4) == [6, 6, 3]
    # Replicas go when the load was lower for long enough.
    patient = replace(fleet, min_replicas=1, down=ScalingPolicy(60.0, replicas=0))
    assert steps(patient, [80.0, *[20.0] * 6], 8) == [8] * 5 + [2] * 2
    slow = ScalingPolicy(60.0, period_s=30.0, replicas=1, ratio=0.0)
    assert steps(replace(patient, up=slow), [80.0] * 9, 2) == [3, 3, 4, 4, 5, 5, 6, 6, 7]


def test_a_scaled_object_scales_as_the_own_autoscaler_does(tmp_path: Path) -> None:
    given = options(
        rps_per_replica=100.0, cpu_cores=1.0, memory_mib=4096, max_growth=0.6, startup_seconds=25.0
    )
    context = read_context(write_built(tmp_path), "minilm", given, tmp_path)
    spec = plain(render_scaled_object(context))["spec"]
    rate, guard = (trigger["metadata"]["query"] for trigger in spec["triggers"])
    for offered, wish in ((400.0, 0.0), (100.0, 0.0), (100.0, 3.0), (nan, 0.0)):
        read = deployed(spec, {rate: offered, guard: wish}.__getitem__, 8)
        simulated = own(100.0, 1.0, 0.6, 25.0, 8)
        assert (read.min_replicas, read.max_replicas, read.down) == (2, 8, simulated.down)
        seen = replace(SEEN, offered_per_s=offered, waiting_s=0.6 if wish else 0.0, replicas=2)
        found, expected = (
            Autoscaler(scaling).replicas(0.0, 2, partial(always, seen))
            for scaling in (read, simulated)
        )
        assert found == expected, (offered, wish)
    assert deployed(spec, float, 4).max_replicas == 4


def test_a_fleet_answers_what_it_can_and_changes_with_its_load() -> None:
    came = arrivals([(50.0, 20.0)], seed=1)
    found = Fleet(SERVICE, fixed(2), 1.0, 0.0).run(came, 2)
    assert found.offered == len(came)
    assert found.missed == 0
    assert found.replica_s == pytest.approx(2 * came[-1])
    assert 0.1 <= found.latency_s[50] < found.latency_s[99] < 0.5
    # Four rows in 0.13 s are 30.8 a second: under twice that, half is refused or late.
    flooded = Fleet(SERVICE, fixed(1), 1.0, 0.0).run(arrivals([(60.0, 62.0)], seed=1), 1)
    assert flooded.mean_batch == pytest.approx(4.0, abs=0.05)
    assert flooded.missed / flooded.offered > 0.5
    assert 20 < capacity(SERVICE, 0.5, 0.01) < 31
    # With its autoscaler, the fleet grows with its load and shrinks again.
    load = arrivals([(300.0, 20.0), (300.0, 60.0), (900.0, 20.0)], seed=2)
    scaled = Fleet(SERVICE, own(25.0, 1.0, 0.5, 10.0, 20), 1.0, 10.0).run(load, 2)
    most = scaled.max_replicas
    constant = Fleet(SERVICE, fixed(most), 1.0, 0.0).run(load, most)
    assert most >= 60 / 25
    assert scaled.replica_s < 0.9 * constant.replica_s
    assert np.isfinite(list(scaled.latency_s.values())).all()


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
    packed = speed("engine fp16 packed", 1200.0, batch=8)
    fast_torch = [
        replace(one, rate_per_s=101.0)
        if (one.system, one.batch_size) == ("torch eager fp32", 1)
        else one
        for one in SPEEDS
    ]
    # A load that was not answered misses the tail, whatever the latency of the rest.
    slow = replace(served(), poisson=loop(0, 400.0, 0.1, 0.1, 560.0))
    cases: list[tuple[list[Speed], list[Served], list[str]]] = [
        ([*SPEEDS, packed], [served()], ["met", "met", "met"]),
        ([*fast_torch, packed], [served()], ["missed", "met", "met"]),
        ([*SPEEDS, packed], [served(rate=699.0)], ["met", "missed", "met"]),
        ([*SPEEDS, packed], [served(p99=3.1)], ["met", "met", "missed"]),
        ([*SPEEDS, packed], [], ["met", "not run", "not run"]),
        ([*SPEEDS, packed], [served(layout="packed")], ["met", "missed", "met"]),
        (SPEEDS, [slow], ["met", "met", "missed"]),
    ]
    for speeds, every, statuses in cases:
        assert [target.status for target in targets.judge("m", speeds, every)] == statuses
    for lacking in ("engine fp16", "torch eager fp32"):
        speeds = [one for one in SPEEDS if not one.system.startswith(lacking)]
        target = targets.judge("m", speeds, [])[0]
        assert (target.status, lacking in target.figures) == ("not run", True)


def findings(*, fakes: tuple[str, ...] = (), finished: bool = True) -> GpuResults:
    found = GpuResults(Machine({"GPU": "H"}, {}), fakes, finished)
    found.speeds, found.served = list(SPEEDS), [served()]
    found.targets = targets.judge("m", SPEEDS, [served()])
    return found


def test_the_exit_code_is_0_only_where_all_ran_and_was_met() -> None:
    missed = findings()
    missed.targets[0] = replace(missed.targets[0], status="missed")
    for found, has_skipped, has_failed, code in (
        (findings(), False, False, ALL_MET),
        (findings(), True, False, INCOMPLETE),
        (findings(fakes=("tensorrt",)), False, False, INCOMPLETE),
        (findings(finished=False), False, False, INCOMPLETE),
        (replace(findings(), targets=[]), False, False, INCOMPLETE),
        (findings(), True, True, BAD),
        (missed, True, False, BAD),
    ):
        ledger = quiet()
        if has_skipped:
            ledger.skip("onnxruntime-gpu", "it is not installed")
        if has_failed:
            ledger.fail("engine of m", "out of memory")
        assert report.exit_code(found, ledger) == code, (found, ledger)
