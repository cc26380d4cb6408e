"""What the accuracy gate demands by default, and what a spec may override."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest

from triptych.base.errors import UserError
from triptych.spec.fields import Custom, Precision
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, TOLERANCES, Metric, metrics_of, thresholds
from triptych.spec.tasks.custom import custom_task

ORDER = {"higher": 1, "lower": -1}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_task_has_limits_in_every_precision(task: str, precision: str) -> None:
    limits = thresholds(TASKS[task], precision, {})
    unlimited = {"max_difference"} if TOLERANCES[precision] == "quantized" else set()
    assert limits.keys() == set(metrics_of(TASKS[task])) - unlimited
    assert limits.keys() <= METRICS.keys()


@pytest.mark.parametrize("task", TASKS)
def test_limits_never_tighten_with_fewer_bits(task: str) -> None:
    steps = [thresholds(TASKS[task], precision, {}) for precision in ("fp32", "fp16", "int8")]
    for tight, loose in pairwise(steps):
        for name in loose:
            assert METRICS[name].meets(tight[name], loose[name]), name


def test_precisions_of_a_tolerance_have_the_same_limits() -> None:
    for same in (("fp16", "bf16"), ("int8", "int8_dynamic", "fp8")):
        limits = [thresholds(TASKS["reranking"], precision, {}) for precision in same]
        assert all(each == limits[0] for each in limits)


def test_the_limits_of_embeddings_are_those_promised() -> None:
    quantized = thresholds(TASKS["text-embedding"], "int8", {})
    assert quantized["mean_cosine"] == 0.998
    assert quantized["nearest_neighbor_agreement"] == 0.97
    exact = thresholds(TASKS["text-embedding"], "fp32", {})
    assert (exact["max_difference"], exact["min_cosine"]) == (1e-5, 0.99999)
    assert exact["nearest_neighbor_agreement"] == 1.0


@pytest.mark.parametrize(
    ("reads", "returns", "own"),
    [
        ("pooled", "vector", {"min_cosine", "mean_cosine"}),
        ("row", "scores", {"label_agreement"}),
        ("tokens", "token_scores", {"label_agreement"}),
        ("row", "logits", set()),
    ],
)
def test_a_custom_task_is_judged_by_what_its_core_returns(
    reads: str, returns: str, own: set[str]
) -> None:
    custom = {"auto_class": "AutoModel", "outputs": [{"name": "x", "dtype": "FP32", "dims": [1]}]}
    task = custom_task(
        Custom.model_validate({**custom, "head_input": reads, "core_output": returns})
    )
    limits = thresholds(task, "fp32", {})
    assert limits.keys() == {"max_difference", "batch_sensitivity", "edge_error"} | own


def test_an_override_replaces_the_default_and_adds_a_limit_that_has_none() -> None:
    limits = thresholds(TASKS["text-embedding"], "int8", {"max_difference": 0.1, "min_cosine": 0.9})
    assert (limits["max_difference"], limits["min_cosine"]) == (0.1, 0.9)
    assert limits["mean_cosine"] == 0.998


@pytest.mark.parametrize("name", ["entity_f1", "nonsense"])
def test_an_override_of_what_the_task_does_not_measure_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        thresholds(TASKS["text-embedding"], "fp32", {name: 0.5})
    assert caught.value.field == f"accuracy.{name}"
    assert "nearest_neighbor_agreement" in caught.value.remedy


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_metric_meets_its_limit_from_the_better_side_alone(metric: Metric) -> None:
    sign = ORDER[metric.better]
    assert metric.meets(0.5, 0.5)
    assert metric.meets(0.5 + sign * 0.1, 0.5)
    assert not metric.meets(0.5 - sign * 0.1, 0.5)
    assert not metric.meets(float("nan"), 0.5)
