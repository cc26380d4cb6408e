"""Metrics of the accuracy gate, with the limits that a candidate must meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A figure that compares a candidate with the reference."""

    name: str  # Name in pipeline.yaml, the build manifest and the report
    better: Literal["higher", "lower"]  # Direction of better values
    says: str  # Short description
    # Default limits for the tolerances exact, close and quantized; None for no limit.
    limits: tuple[float, float, float | None]
    # Default limits on the general probe for the tolerances close and quantized; None if the probe
    # does not measure it.
    probe: tuple[float, float] | None = None
    # Whether the metric is a difference of the core's numbers, which PyTorch's own rounding
    # changes.
    is_rounded: bool = False

    def meets(self, value: float, limit: float) -> bool:
        """Return whether `value` is at the limit or on its better side; False for NaN."""
        return value >= limit if self.better == "higher" else value <= limit

    def of_output(self, output: str) -> Metric:
        """Return the metric of one output of a pipeline around an own model."""
        return replace(self, name=f"{output}.{self.name}")


# Both differences are relative to the reference's largest element if that is above 1. Batches of
# another shape add numbers in another order, which changes fp32 by 2e-7; rounding to few levels
# then changes whole levels. Without any influence of other rows, MiniLM shows 2e-4 in fp16, 2e-3 in
# bf16 and 1.2e-2 with int8 activations of a scale per row. With a scale per batch, where other rows
# do have influence, it shows 5.6e-2.
MAX_DIFFERENCE = Metric(
    "max_difference",
    "lower",
    "largest difference of an element of the core's output",
    limits=(1e-5, 0.05, None),
    is_rounded=True,
)
BATCH_SENSITIVITY = Metric(
    "batch_sensitivity",
    "lower",
    "largest change of an element by the other rows of a batch",
    limits=(1e-5, 1e-2, 3e-2),
    is_rounded=True,
)
# Relative to each row's own reference. Calibration has not seen synthetic rows: int8 MiniLM is off
# by 0.07 to 0.3, and by 0.48 if one word fills a row. A missing output would be off by 1, the
# output of an unrelated row by 1.4.
EDGE_ERROR = Metric(
    "edge_error",
    "lower",
    "largest relative error of a synthetic row",
    limits=(1e-4, 0.1, 0.7),
    probe=(0.1, 0.7),
)
CORE_METRICS = (MAX_DIFFERENCE, BATCH_SENSITIVITY, EDGE_ERROR)
"""Metrics of every task."""

OWN_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("exact", "higher", "rows with the values of the reference", (1.0, 0.99, 0.98)),
        Metric(
            "max_difference",
            "lower",
            "largest difference relative to the largest value",
            (1e-4, 0.05, 0.2),
        ),
        Metric("cosine", "higher", "lowest cosine with the reference", (0.99999, 0.999, 0.97)),
        Metric(
            "top1", "higher", "rows with the largest element of the reference", (1.0, 0.99, 0.98)
        ),
        Metric(
            "iou",
            "higher",
            "mean overlap of the boxes with those of the reference",
            (0.999, 0.98, 0.95),
        ),
        Metric(
            "function",
            "higher",
            "lowest result of the pipeline's own comparison",
            (-math.inf, -math.inf, -math.inf),
        ),
    )
}
"""Metrics of an output that a pipeline declares; the name in a result is ``OUTPUT.METRIC``."""
