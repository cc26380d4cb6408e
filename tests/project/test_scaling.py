"""The simulation of a fleet: the autoscaler's formula, and replicas that batch."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

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
from deploy_cases import options, write_built
from triptych.base.explained import plain
from triptych.deploy.context import read_context
from triptych.deploy.kubernetes import render_scaled_object

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
    assert steps(fleet, [40.0], 4) == [4]
    assert steps(fleet, [43.0], 4) == [4]
    assert steps(fleet, [45.0], 4) == [5]
    assert steps(fleet, [float("nan")], 4) == [4]
    assert steps(fleet, [1.0], 4) == [2]
    # Twice as many, or four more, in 15 s.
    assert steps(fleet, [400.0] * 5, 2) == [6, 12, 24, 40, 40]
    ratio = Trigger(lambda seen: seen.queue_by_compute, 1.0, "replica", 60.0)
    assert steps(replace(fleet, triggers=(ratio,)), [1.5, 1.05, 0.5], 4) == [6, 6, 3]


def test_replicas_go_when_the_load_was_lower_for_long_enough() -> None:
    patient = Scaling(
        "rate", (RATE,), min_replicas=1, max_replicas=40, down=ScalingPolicy(60.0, replicas=0)
    )
    assert steps(patient, [80.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0], 8) == [8] * 5 + [2] * 2
    slow = ScalingPolicy(60.0, period_s=30.0, replicas=1, ratio=0.0)
    assert steps(replace(patient, up=slow), [80.0] * 9, 2) == [3, 3, 4, 4, 5, 5, 6, 6, 7]


def test_a_scaled_object_scales_as_the_own_autoscaler_does(tmp_path: Path) -> None:
    given = options(
        rps_per_replica=100.0, cpu_cores=1.0, memory_mib=4096, max_growth=0.6, startup_seconds=25.0
    )
    context = read_context(write_built(tmp_path), "minilm", given, tmp_path)
    spec = plain(render_scaled_object(context))["spec"]
    rate, guard = (trigger["metadata"]["query"] for trigger in spec["triggers"])
    for offered, wish in ((400.0, 0.0), (100.0, 0.0), (100.0, 3.0), (float("nan"), 0.0)):
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
