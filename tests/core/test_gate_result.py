"""What the gate says beside pass and fail: who counts, the worst rows, the error of a core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gate_cases import CHOOSING, EVERY, SAMPLES, Case, answer, make, requests_of, task_of
from triptych.base.tensors import TokenRow
from triptych.core.gate.check import check
from triptych.core.gate.differences import core_error
from triptych.core.gate.runs import BATCH_TOKENS, RowOutputs
from triptych.core.requests import Sample
from triptych.spec.tasks.accuracy import CORE_METRICS, metrics_of, thresholds
from triptych.spec.tasks.task import Returns


@pytest.mark.parametrize("returns", ["vector", "token_choices"])
def test_made_up_rows_count_for_the_core_but_not_for_shares_and_means(returns: Returns) -> None:
    case = make(returns)
    wrong = Case(case.core, [tuple(-part for part in case.expected[0]), *case.expected[1:]])
    settings: Any = {"metrics": metrics_of(task_of(returns)), "precision": "int8", "batch_size": 4}
    metric = "min_cosine" if returns == "vector" else "label_agreement"
    limits = {metric: 0.99}
    edged = requests_of(SAMPLES, edges=1)
    result = check(wrong.right, edged, case.expected, case.core, limits, **settings)
    assert (result.rows, result.edge_case_rows) == (9, 1)
    assert result.passed, result.failures
    difference = result.value("max_difference")
    assert difference is not None
    assert difference > 0.1
    plain = check(wrong.right, requests_of(SAMPLES), case.expected, case.core, limits, **settings)
    assert not plain.passed


@pytest.mark.parametrize("returns", EVERY)
def test_a_made_up_row_like_no_other_fails_in_every_precision(returns: Returns) -> None:
    case = make(returns)
    if returns in CHOOSING:
        edge = tuple(np.full_like(part, 0.01) for part in case.expected[0])
        edge[0][..., 0] = 0.94
        flipped = tuple(part[..., ::-1] for part in edge)
    else:
        edge = tuple(np.full_like(part, 2) for part in case.expected[0])
        flipped = tuple(-part for part in edge)
    case.expected[0] = edge
    wrong = Case(case.core, [flipped, *case.expected[1:]])
    requests = requests_of(SAMPLES, edges=1)
    for precision in ("fp32", "fp16", "int8"):
        limits = thresholds(task_of(returns), precision, {})
        metrics = metrics_of(task_of(returns))
        settings: Any = {"metrics": metrics, "precision": precision, "batch_size": 4}
        result = check(wrong.right, requests, case.expected, case.core, limits, **settings)
        assert any("edge_error" in failure for failure in result.failures), result
        fine = check(case.right, requests, case.expected, case.core, limits, **settings)
        assert fine.value("edge_error") == 0


def test_few_rows_are_said_and_the_worst_come_first() -> None:
    case = make("logits")

    def damage(outputs: RowOutputs) -> None:
        outputs["logits"] += 1

    result = case.broken(damage, row=6)
    assert "only 10 rows of traffic" in result.notes[0]
    assert len(result.worst) == 10
    assert result.worst[0].preview == "row 6"
    assert result.worst[0].expected != result.worst[0].actual
    assert result.row_differences[6] == max(result.row_differences)


def test_a_long_row_bounds_its_batch_and_still_has_a_neighbor() -> None:
    case = make("logits")
    long = TokenRow(tuple(range(BATCH_TOKENS)), 3)
    rows = [long, *SAMPLES[:5], TokenRow(tuple(range(BATCH_TOKENS - 2)), 3)]
    batches: list[int] = []

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        batches.append(sum(len(row[0]) for row in batch))
        return [answer(case.core, case.expected[0]) for _ in batch]

    settings: Any = {"metrics": CORE_METRICS, "precision": "fp32", "batch_size": 32}
    expected = [case.expected[0]] * len(rows)
    assert check(run, requests_of(rows), expected, case.core, {}, **settings).passed
    assert BATCH_TOKENS < max(batches) < 2 * BATCH_TOKENS


def test_neighbors_are_not_blamed_for_the_error_of_a_class_only_one_batch_chooses() -> None:
    """Two classes that the artifact scores the same, of which the reference prefers one."""
    case = make("choices")
    ids, scores = case.names
    every = np.array([0.5, 0.2, 0.15, 0.1, 0.03, 0.01, 0.01], dtype=np.float32)
    case.expected[:] = [(every,)] * len(SAMPLES)

    def run(batch: Sequence[Sample]) -> list[RowOutputs]:
        last = 2 if len(batch) == 1 else 3
        row = {ids: np.array([0, 1, last], np.int32), scores: np.array([0.5, 0.2, 0.12], "f4")}
        return [{name: values.copy() for name, values in row.items()} for _ in batch]

    result = case.check(run, {"batch_sensitivity": 2e-3})
    assert result.passed, result.failures
    assert result.value("batch_sensitivity") == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("returns", EVERY)
def test_the_error_of_a_core_grows_with_what_is_wrong(returns: Returns) -> None:
    case = make(returns)
    name = case.names[-1]

    def off_by(amount: float) -> float:
        def run(batch: Sequence[Sample]) -> list[RowOutputs]:
            return [{**row, name: row[name] + np.float32(amount)} for row in case.right(batch)]

        return core_error(run, SAMPLES, case.expected, case.core)

    assert off_by(0) == 0
    assert 0 < off_by(0.01) < off_by(0.1)
    assert off_by(np.nan) == np.inf

    def crash(batch: Sequence[Sample]) -> list[RowOutputs]:
        raise RuntimeError

    assert core_error(crash, SAMPLES, case.expected, case.core) == np.inf
