"""Metrics and limits of the accuracy gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from triptych.base.errors import UserError
from triptych.tasks.catalog import TASKS
from triptych.tasks.metric import CORE_METRICS, OWN_METRICS, Metric
from triptych.tasks.task import Task

Tolerance = Literal["exact", "close", "quantized"]
"""Closeness to the reference: that of fp32, of a shorter mantissa, or of few levels."""

TOLERANCES: dict[str, Tolerance] = {
    "fp32": "exact",
    "fp16": "close",
    "bf16": "close",
    "int8": "quantized",
    "int8_dynamic": "quantized",
    "fp8": "quantized",
}
"""Tolerance by precision of the core."""


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (*CORE_METRICS, *(each for task in TASKS.values() for each in task.metrics))
}
"""Metrics of all tasks by name."""


def find_metric(name: str) -> Metric | None:
    """Return the metric with a name, which may begin with the name of an output."""
    output, _, kind = name.rpartition(".")
    return (OWN_METRICS if output else METRICS).get(kind)


def is_lower_better(name: str) -> bool:
    """Return whether lower values of a metric are better; False for an unknown name."""
    metric = find_metric(name)
    return metric is not None and metric.better == "lower"


def is_met(name: str, value: float, limit: float) -> bool:
    """Return whether a value of a metric meets its limit; True for an unknown name."""
    metric = find_metric(name)
    return metric is None or metric.meets(value, limit)


ROUNDING_MULTIPLE = 3
"""Minimum ratio of a limit to PyTorch's own rounding. The artifact rounds as much as the reference,
so they differ by twice the rounding, which is measured on a part of the rows only.
"""

_COLUMNS: dict[Tolerance, int] = {"exact": 0, "close": 1, "quantized": 2}


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return names of a task's metrics, those of the core first."""
    return tuple(metric.name for metric in (*CORE_METRICS, *task.metrics))


def default_limits(metrics: Iterable[Metric], precision: str) -> dict[str, float]:
    """Return the default limit of each metric that has one for a precision."""
    column = _COLUMNS[TOLERANCES[precision]]
    limits = {metric.name: metric.limits[column] for metric in metrics}
    return {name: limit for name, limit in limits.items() if limit is not None}


def thresholds(task: Task, precision: str, overrides: Mapping[str, float]) -> dict[str, float]:
    """Return the limit of each metric for a candidate.

    Args:
        task: Task, which determines the metrics.
        precision: Precision of the candidate, a key of `TOLERANCES`.
        overrides: Limits in ``accuracy`` of the spec by metric, in place of the defaults.

    Raises:
        UserError: An override names a metric that the task does not have.
    """
    names = metrics_of(task)
    for name, limit in overrides.items():
        if name not in names:
            raise UserError(
                f"accuracy.{name}",
                f"is not a metric of {task.name}",
                given=limit,
                remedy=f"Choose from: {', '.join(names)}",
            )
    limits = {**default_limits((*CORE_METRICS, *task.metrics), precision), **overrides}
    return {name: limits[name] for name in names if name in limits}


def probe_limits(task: Task, precision: str, overrides: Mapping[str, float]) -> dict[str, float]:
    """Return the limit of each metric for a candidate on the general probe.

    An override that is looser than the probe's limit applies to the probe too.

    Args:
        task: Task, which determines the metrics.
        precision: Precision of the candidate, other than fp32.
        overrides: See `thresholds`.
    """
    column = _COLUMNS[TOLERANCES[precision]] - 1
    every = (*CORE_METRICS, *task.metrics)
    limits = {metric.name: metric.probe[column] for metric in every if metric.probe is not None}
    return {
        name: overrides[name] if _is_looser(name, overrides, limit) else limit
        for name, limit in limits.items()
    }


def _is_looser(metric: str, overrides: Mapping[str, float], limit: float) -> bool:
    return metric in overrides and METRICS[metric].meets(limit, overrides[metric])


def above_rounding(
    limits: Mapping[str, float], rounding: float | None, overrides: Mapping[str, float]
) -> dict[str, float]:
    """Return `limits` with defaults raised to what PyTorch's own rounding explains.

    Args:
        limits: Result of `thresholds`.
        rounding: See `GateResult`; None if not measured.
        overrides: See `thresholds`; limits set by the user are not raised.
    """
    lowest = ROUNDING_MULTIPLE * (rounding or 0.0)
    rounded = {name for name, metric in METRICS.items() if metric.is_rounded}
    raised = rounded - overrides.keys()
    return {name: max(limit, lowest) if name in raised else limit for name, limit in limits.items()}
