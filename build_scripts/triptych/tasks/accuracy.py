"""Metrics and limits of the accuracy gate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from triptych.base.errors import UserError
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


@dataclass(frozen=True)
class Metric:
    """A figure that compares a candidate with the reference.

    Attributes:
        name: Name in pipeline.yaml, the build manifest and the report.
        better: Direction of better values.
        says: Short description.
    """

    name: str
    better: Literal["higher", "lower"]
    says: str

    def meets(self, value: float, limit: float) -> bool:
        """Return whether `value` is at the limit or on its better side; False for NaN."""
        return value >= limit if self.better == "higher" else value <= limit


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("max_difference", "lower", "largest difference of an element of the core's output"),
        Metric(
            "batch_sensitivity",
            "lower",
            "largest change of an element by the other rows of a batch",
        ),
        Metric("edge_error", "lower", "largest relative error of a synthetic row"),
        Metric("min_cosine", "higher", "lowest cosine of a vector with the reference's"),
        Metric("mean_cosine", "higher", "mean cosine of the vectors with the reference's"),
        Metric(
            "nearest_neighbor_agreement",
            "higher",
            "texts with the same nearest neighbor, or an equally near one",
        ),
        Metric(
            "mean_neighbor_loss", "lower", "mean similarity lost by a different nearest neighbor"
        ),
        Metric(
            "max_neighbor_loss", "lower", "largest similarity lost by a different nearest neighbor"
        ),
        Metric("similarity_rank_correlation", "higher", "Spearman of the similarities of pairs"),
        Metric("label_agreement", "higher", "same first label"),
        Metric("max_probability_difference", "lower", "largest difference of a label's score"),
        Metric("confidence_shift", "lower", "difference of the mean score of the first label"),
        Metric("entity_f1", "higher", "F1 of entities against the reference's"),
        Metric("exact_match", "higher", "same answer at the same position"),
        Metric("answer_f1", "higher", "F1 of the answers' words against the reference's"),
        Metric("rank_correlation", "higher", "Spearman of the scores"),
        Metric("top1_agreement", "higher", "queries with the same first passage"),
        Metric("top_k_overlap", "higher", "fraction of the reference's tokens that are returned"),
    )
}

OWN_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("exact", "higher", "rows with the values of the reference"),
        Metric("max_difference", "lower", "largest difference relative to the largest value"),
        Metric("cosine", "higher", "lowest cosine with the reference"),
        Metric("top1", "higher", "rows with the largest element of the reference"),
        Metric("iou", "higher", "mean overlap of the boxes with those of the reference"),
        Metric("function", "higher", "lowest result of the pipeline's own comparison"),
    )
}
"""Metrics of an output that a pipeline declares; the name in a result is ``OUTPUT.METRIC``."""


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


CORE_METRICS = ("max_difference", "batch_sensitivity", "edge_error")
_LIMITS: dict[str, tuple[float, float, float | None]] = {
    "max_difference": (1e-5, 0.05, None),
    "batch_sensitivity": (1e-5, 1e-2, 3e-2),
    "edge_error": (1e-4, 0.1, 0.7),
    "min_cosine": (0.99999, 0.999, 0.97),
    "mean_cosine": (0.99999, 0.9995, 0.998),
    "nearest_neighbor_agreement": (1.0, 0.98, 0.97),
    "mean_neighbor_loss": (1e-5, 2e-4, 1e-3),
    "max_neighbor_loss": (1e-4, 0.02, 0.1),
    "similarity_rank_correlation": (0.9999, 0.999, 0.99),
    "label_agreement": (1.0, 0.99, 0.98),
    "max_probability_difference": (1e-5, 0.05, 0.15),
    "confidence_shift": (1e-5, 0.005, 0.02),
    "entity_f1": (1.0, 0.99, 0.97),
    "exact_match": (1.0, 0.98, 0.95),
    "answer_f1": (1.0, 0.99, 0.97),
    "rank_correlation": (0.9999, 0.999, 0.99),
    "top1_agreement": (1.0, 0.98, 0.95),
    "top_k_overlap": (1.0, 0.95, 0.9),
    ".exact": (1.0, 0.99, 0.98),
    ".max_difference": (1e-4, 0.05, 0.2),
    ".cosine": (0.99999, 0.999, 0.97),
    ".top1": (1.0, 0.99, 0.98),
    ".iou": (0.999, 0.98, 0.95),
    ".function": (-math.inf, -math.inf, -math.inf),
}
"""Limits by metric for the tolerances exact, close and quantized; None for no default limit.
Names that begin with a point are those of `OWN_METRICS`.

`max_difference` and `batch_sensitivity` are relative to the reference's largest element if that
is above 1. Batches of another shape add numbers in another order, which changes fp32 by 2e-7;
rounding to few levels then changes whole levels. Without any influence of other rows, MiniLM
shows 2e-4 in fp16, 2e-3 in bf16 and 1.2e-2 with int8 activations of a scale per row. With a scale
per batch, where other rows do have influence, it shows 5.6e-2.

`edge_error` is relative to each row's own reference. Calibration has not seen synthetic rows: int8
MiniLM is off by 0.07 to 0.3, and by 0.48 if one word fills a row. A missing output would be off
by 1, the output of an unrelated row by 1.4.
"""

_PROBE_LIMITS: dict[str, tuple[float, float]] = {
    "edge_error": (0.1, 0.7),
    "min_cosine": (0.999, 0.85),
    "mean_cosine": (0.9995, 0.99),
    "nearest_neighbor_agreement": (0.98, 0.93),
    "mean_neighbor_loss": (0.0001, 0.0015),
    "max_neighbor_loss": (0.01, 0.2),
    "similarity_rank_correlation": (0.999, 0.985),
    "label_agreement": (0.98, 0.95),
    "max_probability_difference": (0.1, 0.4),
    "confidence_shift": (0.005, 0.03),
    "entity_f1": (0.98, 0.93),
    "exact_match": (0.96, 0.9),
    "answer_f1": (0.98, 0.93),
    "rank_correlation": (0.999, 0.98),
    "top1_agreement": (0.95, 0.9),
    "top_k_overlap": (0.95, 0.85),
}
"""Limits by metric on the general probe for the tolerances close and quantized.

MiniLM, converted completely on its own traffic, is about half as far from 1 (or from 0): bf16 has
a mean cosine of 0.99993 and all neighbors; int8 and int8_dynamic have mean cosines of 0.995 and
0.997, 0.948 and 0.957 of the neighbors, a mean loss of 5e-4 and 8e-4, and single texts as low as
0.94 and 0.90. Fitted to traffic of one phrase with a number, int8_dynamic has 0.987, 0.918, 2.3e-3
and 0.865; int8 0.921, 0.758, 1.2e-2 and 0.60. Labels, spans and ranks have about twice the
tolerance of the traffic, because a model decides by smaller differences far from its training data.
"""

ROUNDING_MULTIPLE = 3
"""Minimum ratio of a limit to PyTorch's own rounding. The artifact rounds as much as the reference,
so they differ by twice the rounding, which is measured on a part of the rows only.
"""

_ROUNDED = (
    "max_difference",
    "batch_sensitivity",
    "max_probability_difference",
    "confidence_shift",
)
"""Metrics that are differences of the core's numbers."""

_COLUMNS: dict[Tolerance, int] = {"exact": 0, "close": 1, "quantized": 2}


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return names of a task's metrics, those of the core first."""
    return CORE_METRICS + task.metrics


def default_limits(metrics: Iterable[str], precision: str) -> dict[str, float]:
    """Return the default limit of each metric that has one for a precision."""
    column = _COLUMNS[TOLERANCES[precision]]
    keys = {name: f".{name.rpartition('.')[2]}" if "." in name else name for name in metrics}
    limits = {name: _LIMITS[key][column] for name, key in keys.items()}
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
    limits = {**default_limits(names, precision), **overrides}
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
    limits = {name: _PROBE_LIMITS[name][column] for name in ("edge_error", *task.metrics)}
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
    raised = set(_ROUNDED) - overrides.keys()
    return {name: max(limit, lowest) if name in raised else limit for name, limit in limits.items()}
