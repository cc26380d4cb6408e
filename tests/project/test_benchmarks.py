"""The benchmarks: rounds, results and their page, and the simulated fleet."""

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
from benchmarks.harness import Series, Turn, run_rounds
from benchmarks.results import Table
from tests.support.deploy_cases import options, write_built
from triptych.base.explained import plain
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
