"""What the accuracy gate demands by default, and what a spec may override."""

import math
from itertools import pairwise, product
from typing import get_args

from mistakes import refusal
from triptych.spec.backends import Precision
from triptych.spec.fields import Custom
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import METRICS, TOLERANCES, metrics_of, thresholds
from triptych.spec.tasks.custom import custom_task


def test_every_task_has_limits_in_every_precision() -> None:
    for task, precision in product(TASKS.values(), get_args(Precision)):
        limits = thresholds(task, precision, {})
        unlimited = {"max_difference"} if TOLERANCES[precision] == "quantized" else set()
        assert limits.keys() == set(metrics_of(task)) - unlimited, (task.name, precision)
        assert limits.keys() <= METRICS.keys()


def test_limits_never_tighten_with_fewer_bits() -> None:
    for task in TASKS.values():
        steps = [thresholds(task, precision, {}) for precision in ("fp32", "fp16", "int8")]
        for tight, loose in pairwise(steps):
            for name in loose:
                assert METRICS[name].meets(tight[name], loose[name]), (task.name, name)


def test_a_custom_task_is_judged_by_what_its_core_returns() -> None:
    common = {"max_difference", "batch_sensitivity", "edge_error"}
    outputs = [{"name": "x", "dtype": "FP32", "dims": [1]}]
    for reads, returns, own in (
        ("pooled", "vector", {"min_cosine", "mean_cosine"}),
        ("row", "scores", {"label_agreement"}),
        ("tokens", "token_scores", {"label_agreement"}),
        ("row", "logits", set()),
    ):
        core = {"auto_class": "AutoModel", "head_input": reads, "core_output": returns}
        task = custom_task(Custom.model_validate({**core, "outputs": outputs}))
        assert thresholds(task, "fp32", {}).keys() == common | own, (reads, returns)


def test_an_override_replaces_or_adds_a_limit_of_what_the_task_measures() -> None:
    limits = thresholds(TASKS["text-embedding"], "int8", {"max_difference": 0.1, "min_cosine": 0.9})
    assert (limits["max_difference"], limits["min_cosine"]) == (0.1, 0.9)
    for name in ("entity_f1", "nonsense"):
        error = refusal(thresholds, TASKS["text-embedding"], "fp32", {name: 0.5})
        assert error.field == f"accuracy.{name}"
        assert "nearest_neighbor_agreement" in error.remedy


def test_a_metric_meets_its_limit_from_the_better_side_alone() -> None:
    for name, metric in METRICS.items():
        better = 0.1 if metric.better == "higher" else -0.1
        met = [metric.meets(value, 0.5) for value in (0.5, 0.5 + better, 0.5 - better, math.nan)]
        assert met == [True, True, False, False], name
