"""The accuracy gate: what is right passes, and each way of being wrong is stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gate_cases import (
    CHOOSING,
    CLASSES,
    EVERY,
    FLOATS,
    KEPT,
    SAMPLES,
    Case,
    answer,
    make,
    requests_of,
)
from triptych.core.gate.check import check
from triptych.core.gate.runs import RowOutputs
from triptych.core.requests import Expected, Sample
from triptych.repository.records import GateResult
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import CORE_METRICS, metrics_of
from triptych.spec.tasks.task import Returns

LIMITS = {"max_difference": 1e-5, "batch_sensitivity": 1e-5}


@pytest.fixture(params=EVERY)
def case(request: pytest.FixtureRequest) -> Case:
    return make(request.param)


@pytest.fixture(params=FLOATS)
def floats(request: pytest.FixtureRequest) -> Case:
    return make(request.param)


@pytest.fixture(params=CHOOSING)
def choosing(request: pytest.FixtureRequest) -> Case:
    return make(request.param)


def test_a_right_artifact_passes(case: Case) -> None:
    result = case.check(case.right)
    assert result.passed, result.failures
    assert (result.rows, result.edge_case_rows, result.finite) == (10, 0, True)
    assert (result.value("max_difference"), result.value("batch_sensitivity")) == (0.0, 0.0)
    assert (result.value("min_cosine") is not None) == (case.core.returns == "vector")
    has_labels = case.core.returns in (*CHOOSING, "token_scores", "logits")
    assert result.value("label_agreement") == (1.0 if has_labels else None)
    assert json.loads(json.dumps(result.as_dict()))["failures"] == []


def test_a_difference_above_the_threshold_fails(case: Case) -> None:
    name = case.names[-1]

    def damage(outputs: RowOutputs) -> None:
        outputs[name].ravel()[0] += 1e-3

    result = case.broken(damage)
    assert not result.passed
    assert f"{name}" in result.failures[0]
    assert "1e-05" in result.failures[0]
    assert result.value("max_difference") == pytest.approx(1e-3, rel=0.9)
    assert next(v.metric for v in result.verdicts if not v.passed) == "max_difference"
    assert result.value("batch_sensitivity") == 0.0


def test_the_threshold_is_relative_to_large_elements() -> None:
    case = make("logits")
    step = np.float32(1e-3)
    large: list[Expected] = [(logits * np.float32(1000),) for (logits,) in case.expected]
    shifted = Case(case.core, [(logits + step,) for (logits,) in large])
    assert Case(case.core, large).check(shifted.right).passed
    small = Case(case.core, [(logits + step,) for (logits,) in case.expected])
    assert not case.check(small.right).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_fails(case: Case, value: float) -> None:
    result = case.broken(lambda outputs: outputs[case.names[-1]].put(0, value))
    assert not result.finite
    assert "results are not all finite" in result.failures
    assert len(result.failures) >= 2  # the difference itself fails, too


def test_a_reference_that_is_not_finite_fails(case: Case) -> None:
    case.expected[2][0].ravel()[0] = np.nan
    assert not case.check(case.right).passed


@pytest.mark.parametrize("when", ["alone", "together", "reversed", "longest first"])
def test_a_row_that_its_neighbors_change_fails(floats: Case, when: str) -> None:
    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        rows = floats.right(batch)
        first, last = SAMPLES.index(batch[0]), SAMPLES.index(batch[-1])
        lengths = [len(sample[0]) for sample in batch]
        changed = {
            "alone": len(batch) == 1,
            "together": len(batch) > 1,
            "reversed": first > last and first - last == len(batch) - 1,
            "longest first": len(set(lengths)) == 1 and len(batch) > 1,
        }[when]
        if changed:
            rows[0][floats.names[0]] = rows[0][floats.names[0]] + np.float32(1e-3)
        return rows

    result = floats.check(run)
    assert any("neighbors" in failure for failure in result.failures)
    effect = result.value("batch_sensitivity")
    assert effect is not None
    assert effect > 1e-5


def test_choices_that_neighbors_change_fail(choosing: Case) -> None:
    """Alone, a row gives its second-best class under its own score: only this run shows it."""
    ids, scores = choosing.names

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        rows = choosing.right(batch)
        if len(batch) == 1:
            every = choosing.expected[SAMPLES.index(batch[0])][0]
            order = np.argsort(-every, axis=-1)
            second = order[1 : 1 + KEPT] if choosing.core.returns == "choices" else order[:, 1]
            axis = second if every.ndim == 1 else second[:, None]
            rows[0][ids] = second.astype(np.int32)
            rows[0][scores] = np.take_along_axis(every, axis, -1).reshape(second.shape)
        return rows

    result = choosing.check(run)
    assert result.value("max_difference") == 0.0
    assert result.value("label_agreement") == 1.0
    assert all("neighbors" in failure for failure in result.failures)
    assert result.failures


def test_a_class_changed_by_neighbors_under_the_right_score_fails(choosing: Case) -> None:
    ids, _ = choosing.names

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        rows = choosing.right(batch)
        if len(batch) == 1:
            unused = set(range(CLASSES)) - set(rows[0][ids].tolist())
            rows[0][ids][0] = unused.pop()
        return rows

    result = choosing.check(run)
    assert any("neighbors" in failure for failure in result.failures)
    assert result.value("max_difference") == 0.0


def test_a_wrong_class_under_the_right_score_fails(choosing: Case) -> None:
    ids, _ = choosing.names

    def damage(outputs: RowOutputs) -> None:
        outputs[ids][0] = (set(range(CLASSES)) - set(outputs[ids].tolist())).pop()

    result = choosing.broken(damage)
    assert f"of each {ids}" in result.failures[0]
    agreement = result.value("label_agreement")
    assert agreement is not None
    assert agreement < 1


def test_a_wrong_class_under_its_own_score_fails(choosing: Case) -> None:
    """The class is not among the best, but its score is what the reference gives it."""
    ids, scores = choosing.names

    def damage(outputs: RowOutputs) -> None:
        every = choosing.expected[4][0].reshape(-1, CLASSES)[-1]
        worst = int(every.argmin())
        outputs[ids][-1], outputs[scores][-1] = worst, every[worst]

    result = choosing.broken(damage)
    assert "best first" in result.failures[0]


def test_choices_out_of_order_fail() -> None:
    case = make("choices")

    def damage(outputs: RowOutputs) -> None:
        for name in case.names:
            outputs[name][:] = outputs[name][::-1].copy()

    result = case.broken(damage)
    assert "best first" in result.failures[0]
    assert result.value("label_agreement") == 0.9


def test_labels_swapped_at_close_scores_fail_only_above_the_threshold() -> None:
    case = make("choices")
    ids, _ = case.names

    def swap(outputs: RowOutputs) -> None:
        outputs[ids][:2] = outputs[ids][1::-1].copy()

    def with_gap(gap: float) -> GateResult:
        every = np.full(CLASSES, 0.1, dtype=np.float32)
        every[2], every[5] = 0.3, 0.3 - gap
        case.expected[4] = (every,)
        return case.broken(swap)

    tied = with_gap(0.0)
    assert tied.passed, tied.failures
    assert tied.value("label_agreement") == 1.0
    assert with_gap(5e-6).passed
    apart = with_gap(1e-3)
    assert not apart.passed
    assert apart.value("label_agreement") == 0.9


def test_ties_that_neighbors_decide_are_no_failure(choosing: Case) -> None:
    """All classes score the same, and which are chosen depends on the batch."""
    choosing.expected[:] = [(np.full_like(every, 1 / CLASSES),) for (every,) in choosing.expected]
    ids, _ = choosing.names

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        rows = choosing.right(batch)
        for outputs in rows:
            outputs[ids] = (outputs[ids] + len(batch)) % CLASSES
        return rows

    result = choosing.check(run)
    assert result.passed, result.failures
    assert result.value("label_agreement") == 1.0


@pytest.mark.parametrize(
    ("value", "words"), [(CLASSES, "there are 7 classes"), (-1, "from -1"), (None, "twice")]
)
def test_ids_that_cannot_be_fail(value: int | None, words: str) -> None:
    case = make("choices")

    def damage(outputs: RowOutputs) -> None:
        outputs["class_id"][1] = outputs["class_id"][0] if value is None else value

    result = case.broken(damage)
    assert words in result.failures[0]
    assert "row 4" in result.failures[0]


def test_ids_of_floats_fail(choosing: Case) -> None:
    name = choosing.names[0]
    result = choosing.broken(lambda outputs: outputs.update({name: outputs[name] * 1.0}))
    assert "not a number of a class" in result.failures[0]


@pytest.mark.parametrize("returns", ["token_choices", "token_scores", "spans"])
def test_tokens_out_of_place_fail(returns: Returns) -> None:
    case = make(returns)

    def damage(outputs: RowOutputs) -> None:
        for name in case.names:
            outputs[name] = np.roll(outputs[name], 1, axis=0)

    assert not case.broken(damage).passed


@pytest.mark.parametrize("returns", ["token_choices", "token_scores", "spans"])
def test_a_token_too_few_fails(returns: Returns) -> None:
    case = make(returns)
    name = case.names[-1]
    result = case.broken(lambda outputs: outputs.update({name: outputs[name][:-1]}))
    assert f"{name} has the shape" in result.failures[0]


def test_start_and_end_exchanged_fail() -> None:
    case = make("spans")

    def damage(outputs: RowOutputs) -> None:
        start, end = outputs["start_logit"], outputs["end_logit"]
        outputs.update(start_logit=end, end_logit=start)

    failures = case.broken(damage).failures
    assert [failure.split()[0] for failure in failures] == ["start_logit", "end_logit"]


def test_a_missing_output_fails(case: Case) -> None:
    name = case.names[-1]

    def damage(outputs: RowOutputs) -> None:
        del outputs[name]

    result = case.broken(damage)
    assert f"{name} is missing" in result.failures[0]
    assert not any(verdict.passed for verdict in result.verdicts)
    assert json.loads(json.dumps(result.as_dict()))["verdicts"][0]["value"] is None


def test_missing_and_surplus_rows_fail(case: Case) -> None:
    assert (
        "gives 3 rows" in case.check(lambda batch: case.right(batch)[: len(batch) - 1]).failures[0]
    )
    doubled = case.check(lambda batch: case.right(batch) * 2)
    assert "gives 8 rows" in doubled.failures[0]


def test_an_artifact_that_does_not_run_fails(case: Case) -> None:
    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        if len(batch) == 1:
            raise RuntimeError("no kernel for one row")
        return case.right(batch)

    assert "a batch of 1 does not run" in case.check(run).failures[0]


def test_a_reference_of_another_shape_fails() -> None:
    case = make("logits")
    other = Case(case.core, [(logits[:1],) for (logits,) in case.expected])
    assert "another shape" in other.check(case.right).failures[0]


def test_no_rows_fail(case: Case) -> None:
    settings: Any = {"metrics": CORE_METRICS, "precision": "fp32", "batch_size": 3}
    result = check(case.right, [], [], case.core, LIMITS, **settings)
    assert result.failures == ("there are no rows to compare",)
    with pytest.raises(ValueError, match="10 core rows"):
        check(case.right, requests_of(SAMPLES), [], case.core, LIMITS, **settings)


def test_a_low_cosine_fails() -> None:
    case = make("vector")
    turned = Case(case.core, [(np.roll(vector, 1),) for (vector,) in case.expected])
    result = case.check(turned.right, {"min_cosine": 0.99})
    assert len(result.failures) == 1
    assert result.failures[0].startswith("min_cosine is ")
    assert result.failures[0].endswith(", below 0.99")
    assert case.check(turned.right, {}).passed
    lowest, mean = result.value("min_cosine"), result.value("mean_cosine")
    assert lowest is not None
    assert mean is not None
    assert lowest < mean < 0.99


def test_images_are_samples_too() -> None:
    pixels: list[Sample] = [np.full((2, 2, 3), i, dtype=np.uint8) for i in range(5)]
    case = make("choices")
    metrics = metrics_of(TASKS["image-classification"])
    settings: Any = {"metrics": metrics, "precision": "fp32", "batch_size": 2}

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        return [answer(case.core, case.expected[int(np.asarray(s)[0, 0, 0])]) for s in batch]

    requests = requests_of(pixels)
    result = check(run, requests, case.expected[:5], case.core, LIMITS, **settings)
    assert result.passed, result.failures
    wrong = check(run, requests, case.expected[1:6], case.core, LIMITS, **settings)
    assert not wrong.passed
