"""Triton's histogram of a pipeline's latencies: its name, and its edges, at which alerts count."""

from __future__ import annotations

from typing import Any

from triptych.base.releases import Release, first_release, parse_release
from triptych.spec.slo import Slo
from triptych.spec.spec import PipelineSpec

HISTOGRAM = "nv_inference_first_response_histogram_ms"
USUAL_EDGES_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's own: src/metric_model_reporter.h of its core."""
COUNTED_FROM = first_release("metrics-config.histogram_latencies")
"""The first release whose histogram counts ordinary models."""


def latency_buckets(slo: Slo) -> dict[str, Any]:
    """Buckets of the histogram with an edge at each promised latency, in milliseconds.

    Triton rounds what it counts down to whole milliseconds (`UpdateResponseMetrics` of its core),
    so the edge of 50 takes in what is below 51.
    """
    edges = sorted({*USUAL_EDGES_MS, *slo.limits_ms.values()})
    return {
        "metric_identifier": {"family": HISTOGRAM},
        "histogram_options": {"buckets": edges},
    }


def has_edge(spec: PipelineSpec, limit_ms: float, release: Release) -> bool:
    """Whether the histogram of a server of `release` tells which requests kept to a limit."""
    promised = (
        parse_release(spec.serving.triton) >= first_release("model_metrics")
        and limit_ms in spec.serving.slo.limits_ms.values()
    )
    return release >= COUNTED_FROM and (promised or limit_ms in USUAL_EDGES_MS)
