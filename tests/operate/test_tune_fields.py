"""Which settings tuning tries: by what was measured, and with the reason."""

from dataclasses import replace
from typing import Any

from triptych.operate.tune.fields import FIELDS, Observation, Proposal
from triptych.spec.tuned import TUNABLE
from tune_cases import evidence, measurement, step


def found_for(key: str, given: Observation[Any]) -> Proposal:
    return next(found for propose in FIELDS if (found := propose(given)).key == key)


def test_every_field_that_is_tried_is_tunable() -> None:
    keys = [propose(evidence()).key for propose in FIELDS]
    assert set(keys) <= set(TUNABLE)
    assert len(set(keys)) == len(FIELDS)
    assert keys[0] == "serving.queue.max_delay_us"


def test_idle_steps_get_no_more_instances_and_busy_ones_do() -> None:
    assert not found_for("serving.instances.preprocess", evidence()).values
    proposal = found_for("serving.instances.core", evidence())
    assert proposal.values[0] == 2
    assert "100%" in proposal.reason


def test_no_delay_where_batches_fill_by_themselves_nor_beyond_the_promise() -> None:
    full = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
    assert not found_for("serving.queue.max_delay_us", evidence(full)).values
    tight = replace(evidence(), limits_us={"p99": 4e3})
    assert not found_for("serving.queue.max_delay_us", tight).values
    loose = found_for(
        "serving.queue.max_delay_us", replace(evidence(), limits_us={"p50": 9e9, "p99": 50e3})
    )
    assert loose.values == (1000, 4000)


def test_the_batch_limit_is_raised_only_where_batches_reach_it() -> None:
    assert not found_for("core.max_batch_size", evidence()).values
    full = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
    found = found_for("core.max_batch_size", evidence(full))
    assert found.values == (64, 128)


def test_fewer_threads_are_tried_on_a_cpu_with_several_cores() -> None:
    key = "core.threads"
    assert not found_for(key, evidence(device="gpu")).values
    assert not found_for(key, evidence(cores=1)).values
    for cores, threads in ((2, 1), (8, 4)):
        found = found_for(key, evidence(cores=cores))
        assert found.values == (threads,)
    chosen = found_for(key, evidence(cores=4, threads=2))
    assert chosen.values == (None,)


def test_the_other_layout_is_tried_unless_a_build_fell_back_to_this_one() -> None:
    for named in ("packed", "auto"):
        found = found_for("core.layout", evidence(layout=named))
        assert found.values == ("bucketed",)
    fallen = evidence()
    fallen.plan.layout = "bucketed"
    assert not found_for("core.layout", fallen).values
