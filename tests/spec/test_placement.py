"""The plan for the machine that serves: its numbers, their reasons, and errors of its name."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.plan_cases import facts
from tests.support.project import write_pipeline
from triptych.base.errors import UserError
from triptych.spec.fields import CoreSettings
from triptych.spec.placement import (
    ASSUMED,
    BATCH_SIZES,
    GIVEN,
    MachinePlan,
    StepCost,
    with_measured,
)
from triptych.spec.plan import Plan, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import Tuned, write_tuned
from triptych.tasks.catalog import text_embedding

LENGTHS = Lengths.of([12, 20, 30, 52], max_length=256)
GPU = ("core.device=gpu", "core.precision=fp16")


def plan_on(folder: Path, machine: str, *overrides: str, **info: Any) -> Plan:
    """Return the plan of a new pipeline for a machine."""
    place = folder / f"a{len(list(folder.iterdir()))}"
    spec = load_spec(write_pipeline(place), (f"serving.machine={machine}", *overrides))
    return make_plan(spec, facts(**info), text_embedding.TASK, {}, LENGTHS)


def placement_of(plan: Plan) -> MachinePlan:
    assert plan.placement is not None
    return plan.placement


def counts(plan: Plan) -> tuple[int, int, int]:
    """Return the instances of preprocess, core and postprocess."""
    instances = plan.spec.serving.instances
    return instances.preprocess, instances.core, instances.postprocess


def test_two_cores_have_one_process_of_each_step(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, "cpu2")
    assert counts(plan) == (1, 1, 1)
    assert (plan.spec.core.threads, plan.max_batch_size) == (2, 32)


def test_cores_are_shared_by_sessions_of_a_few_threads(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, "cpu32")
    assert (plan.spec.serving.instances.core, plan.spec.core.threads) == (4, 8)


def test_a_fast_gpu_has_as_many_python_processes_as_it_needs(tmp_path: Path) -> None:
    small, large = plan_on(tmp_path, "h200x4", *GPU), plan_on(tmp_path, "h200x16", *GPU)
    assert counts(small)[0] < counts(large)[0]
    assert counts(large) == (8, 2, 2)  # by hand on an H200: 6 and 6, with 1 to 3 cores
    assert large.max_batch_size in BATCH_SIZES[2:]
    rates = placement_of(large).rates_per_s
    assert rates[32] > rates[1] > placement_of(small).rates_per_s[1]


def test_every_number_has_a_reason_and_costs_are_marked(tmp_path: Path) -> None:
    placement = placement_of(plan_on(tmp_path, "l4x8", *GPU))
    assert placement.costs.source == ASSUMED
    for field, value in placement.values.items():
        assert len(value.reason) > 10, field


def test_numbers_of_the_user_win(tmp_path: Path) -> None:
    fixed = ("serving.instances.preprocess=3", "core.max_batch_size=48", "serving.instances.core=5")
    plan = plan_on(tmp_path, "h200x16", *GPU, *fixed)
    assert counts(plan)[:2] == (3, 5)
    assert (plan.max_batch_size, plan.request_rows) == (48, 48)
    values = placement_of(plan).values
    assert [name for name, value in values.items() if value.reason == GIVEN] == [
        "core.max_batch_size",
        "serving.instances.core",
        "serving.instances.preprocess",
    ]


def test_the_rows_of_a_request_are_the_same_on_every_machine(tmp_path: Path) -> None:
    plans = [plan_on(tmp_path, name, *GPU) for name in ("l4x4", "h200x16")]
    assert {plan.request_rows for plan in plans} == {32}
    assert {plan.row_settings["max_core_rows"] for plan in plans} == {32}


def test_a_batch_is_bounded_by_memory_and_the_slo(tmp_path: Path) -> None:
    free = plan_on(tmp_path, "h200x16", *GPU)
    row_mib = (free.batch_mib or 0) / free.max_batch_size
    numbers = f"{{gpu: h200, cores: 16, memory_gib: {row_mib * 4 * 150 / 1024:.3f}}}"
    assert plan_on(tmp_path, numbers, *GPU).max_batch_size < free.max_batch_size
    costs = placement_of(free).costs
    limit = f"serving.slo.p99_ms={2.01 * costs.core_ms(64):.3f}"
    assert plan_on(tmp_path, "h200x16", *GPU, limit).max_batch_size == 64


def test_a_plan_that_is_made_again_is_the_same(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, "h200x16", *GPU)
    asked = plan.asked
    assert isinstance(asked.core, CoreSettings)
    assert "max_batch_size" not in asked.core.model_fields_set
    again = make_plan(plan.encoder_spec, plan.info, plan.task, {}, LENGTHS)
    assert (counts(again), again.max_batch_size) == (counts(plan), plan.max_batch_size)


def test_requests_of_many_rows_cost_less_a_row() -> None:
    assert StepCost(1.0, 0.5).of_row(1) == 1.5
    assert StepCost(1.0, 0.5).of_row(4) == 0.75


@pytest.mark.parametrize(
    ("machine", "overrides", "rule"),
    [
        ("h900x16", GPU, "the name of a machine"),
        ("cpu0", (), "the name of a machine"),
        ("cpu", (), "the name of a machine"),
        ("cpu20000", (), "the name of a machine"),
        ("{gpu: h900, cores: 4}", GPU, "the name of a machine"),
        ("cpu1", (), "a core for each of the 2 Python steps"),
        ("cpu8", GPU, "a GPU for core.device: gpu"),
        ("{gpu: l4, cores: 8, memory_gib: 0.001}", GPU, "memory for a row"),
    ],
)
def test_a_machine_that_does_not_fit_is_an_error(
    tmp_path: Path, machine: str, overrides: tuple[str, ...], rule: str
) -> None:
    with pytest.raises(UserError, match=re.escape(rule)) as error:
        plan_on(tmp_path, machine, *overrides)
    assert error.value.field == "serving.machine"
    assert error.value.remedy


def test_costs_that_tune_measured_replace_assumed_ones(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    costs = {"rows": 1.0, "preprocess": 3.67, "postprocess": 0}
    overrides = {"serving.queue.max_delay_us": 0}
    write_tuned(folder, Tuned(overrides, {"costs": costs}))
    spec = load_spec(folder, ("serving.machine=h200x16", *GPU))
    placement = placement_of(make_plan(spec, facts(), text_embedding.TASK, {}, LENGTHS))
    assumed = placement_of(plan_on(tmp_path, "h200x16", *GPU)).costs
    assert placement.costs.steps["preprocess"].of_row(1) == pytest.approx(3.67)
    assert placement.costs.steps["postprocess"] == assumed.steps["postprocess"]
    assert placement.costs.source == f"preprocess measured by `tune`, others {ASSUMED}"
    assert placement.values["serving.instances.postprocess"].value == 1  # preprocess is the limit
    assert with_measured(assumed, {"rows": "many", "preprocess": None}) == assumed
