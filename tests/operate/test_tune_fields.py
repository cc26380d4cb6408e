"""Which settings tuning tries: by what was measured, and with the reason."""

from dataclasses import replace
from typing import Any

from triptych.operate.tune.fields import FIELDS, Observation, Proposal
from triptych.spec.spec import PipelineSpec
from triptych.spec.tuned import TUNABLE
from tune_cases import evidence, measurement, step


def found_for(key: str, given: Observation[Any]) -> Proposal:
    return next(found for propose in FIELDS if (found := propose(given)).key == key)


def test_every_field_that_is_tried_is_tunable() -> None:
    keys = [propose(evidence()).key for propose in FIELDS]
    assert set(keys) <= set(TUNABLE)
    assert len(set(keys)) == len(FIELDS)
    assert keys[0] == "serving.queue.max_delay_us"


FULL = measurement(1.0, steps=(step("core", busy=1.0, batch=30),))
FALLEN = evidence()
FALLEN.plan.layout = "bucketed"  # as a build left it that could not pack
DELAY = "serving.queue.max_delay_us"
CASES: list[tuple[str, Observation[Any], tuple[Any, ...]]] = [
    ("serving.instances.preprocess", evidence(), ()),  # it is idle
    # Neither where batches fill by themselves nor beyond the SLO.
    (DELAY, evidence(FULL), ()),
    (DELAY, replace(evidence(), limits_us={"p99": 4e3}), ()),
    (DELAY, replace(evidence(), limits_us={"p50": 9e9, "p99": 50e3}), (1000, 4000)),
    # Only where batches reach the limit.
    ("core.max_batch_size", evidence(), ()),
    ("core.max_batch_size", evidence(FULL), (64, 128)),
    # Fewer, on a CPU with several cores.
    ("core.threads", evidence(device="gpu"), ()),
    ("core.threads", evidence(cores=1), ()),
    ("core.threads", evidence(cores=2), (1,)),
    ("core.threads", evidence(cores=8), (4,)),
    ("core.threads", evidence(cores=4, threads=2), (None,)),
    ("core.layout", evidence(layout="packed"), ("bucketed",)),
    ("core.layout", evidence(layout="auto"), ("bucketed",)),
    ("core.layout", FALLEN, ()),
]
"""Field, what was seen, and the values that are tried."""


def test_a_field_is_tried_where_what_was_seen_speaks_for_it() -> None:
    for key, given, values in CASES:
        assert found_for(key, given).values == values, (key, given)
    busy = found_for("serving.instances.core", evidence())
    assert (busy.values[0], "100%" in busy.reason) == (2, True)
    waiting = evidence()
    spec = waiting.plan.spec.model_dump()
    spec["serving"]["queue"]["max_delay_us"] = 400
    waiting.plan.spec = PipelineSpec.model_validate(spec)
    found = found_for(DELAY, waiting)
    assert (found.values, found.others) == ((0, 100), (800,))
