"""Checks of what is asked of Prometheus: by autoscalers, rules and analyses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from triptych.base.errors import closest
from triptych.base.releases import Release
from triptych.deploy.checks.objects import Folder, Object, mapping, sequence
from triptych.repository.latencies import COUNTED_FROM, HISTOGRAM
from triptych.repository.lint.flaw import Flaw, error, warning
from triptych.runtime.generation_series import NAMES, PREFIX

# docs/user_guide/metrics.md of the server.
METRICS = (
    *("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count"),
    *("nv_inference_exec_count", "nv_inference_pending_request_count"),
    *(f"nv_inference_{what}_duration_us" for what in ("request", "queue", "compute_input")),
    *(f"nv_inference_{what}_duration_us" for what in ("compute_infer", "compute_output")),
    *(f"nv_inference_{what}_summary_us" for what in ("request", "queue", "compute_input")),
    *(f"nv_inference_{what}_summary_us" for what in ("compute_infer", "compute_output")),
    HISTOGRAM,
    *("nv_model_load_duration_secs", "nv_energy_consumption", "nv_pinned_memory_pool_total_bytes"),
    *("nv_pinned_memory_pool_used_bytes", "nv_gpu_utilization", "nv_gpu_power_usage"),
    *("nv_gpu_power_limit", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"),
    *("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"),
)
_SERIES = {
    *METRICS,
    *(f"{name}_{part}" for name in METRICS if "_summary_" in name for part in ("count", "sum")),
    *(f"{HISTOGRAM}_{part}" for part in ("count", "sum", "bucket")),
    *NAMES,
}
# Backends and caches add names of their own: what is checked are Triton's own families, and those
# of pipelines that generate text.
_NAME = re.compile(rf"\b(?:nv_(?:inference|gpu|cpu|energy|pinned|model)|{PREFIX})_[a-z0-9_]+")
_UTILIZATION = re.compile(
    r"DCGM_FI\w*|nv_gpu_utilization|nv_gpu_power_usage|duty_cycle|accelerator\w*", re.IGNORECASE
)


class Query(NamedTuple):
    """An expression, or a metric's name, and what it is for."""

    owner: Object
    text: str
    scales: bool

    @property
    def where(self) -> str:
        return self.owner.where


def queries(folder: Folder) -> list[Query]:
    """Every expression of a folder."""
    return [query for one in folder.objects for query in _of(one)]


def metric_known(query: Query) -> Iterator[Flaw]:
    for name in sorted(set(_NAME.findall(query.text))):
        if name not in _SERIES:
            yield error(
                "A metric must be one that Triton has: an unknown one is empty, and never fires",
                name,
                f"{closest(name, (*METRICS, *NAMES))}See the metrics page of the server",
            )


def histogram_release(query: Query, release: Release | None) -> Iterator[Flaw]:
    if release is not None and release < COUNTED_FROM and HISTOGRAM in query.text:
        yield error(
            "A histogram must be of a release that counts ordinary models in it",
            f"{HISTOGRAM}, which is empty before {COUNTED_FROM}; the image is {release}",
            f"Serve with {COUNTED_FROM} or later, or ask a proxy for latencies",
        )


def scales_on_use(query: Query) -> Iterator[Flaw]:
    found = _UTILIZATION.search(query.text)
    if query.scales and found:
        yield warning(
            "Replicas should follow the rate: a GPU says that it is busy long before it is full, "
            "and nothing of what waits",
            found[0],
            "Scale on the rate over the capacity that was measured (triptych bench --find-rate)",
        )


def scales_on_ratio(query: Query) -> Iterator[Flaw]:
    asked = query.text.replace("_", " ").replace(":", " ")
    is_ratio = "nv_inference_queue_duration" in query.text and "/" in query.text
    if query.scales and (is_ratio or re.search(r"queue compute|queue ratio", asked)):
        yield warning(
            "Replicas should follow the rate: queue time explodes near saturation and says nothing "
            "before; an ensemble's own leaves out that of its steps",
            "a queue time over another one or over requests",
            "Scale on the rate over the capacity that was measured (triptych bench --find-rate)",
        )


def _of(one: Object) -> Iterator[Query]:
    if one.kind == "ScaledObject":
        for trigger in sequence(one.spec.get("triggers")):
            data = mapping(mapping(trigger).get("metadata"))
            yield Query(one, str(data.get("query", "")), scales=True)
    elif one.kind == "HorizontalPodAutoscaler":
        for metric in sequence(one.spec.get("metrics")):
            yield Query(one, _metric_name(mapping(metric)), scales=True)
    elif one.kind == "PrometheusRule":
        for group in sequence(one.spec.get("groups")):
            for rule in sequence(mapping(group).get("rules")):
                yield Query(one, str(mapping(rule).get("expr", "")), scales=False)
    elif one.kind in ("AnalysisTemplate", "ClusterAnalysisTemplate"):
        for metric in sequence(one.spec.get("metrics")):
            provider = mapping(mapping(metric).get("provider"))
            query = mapping(provider.get("prometheus")).get("query", "")
            yield Query(one, str(query), scales=False)


def _metric_name(metric: dict[str, object]) -> str:
    """Of an HPA's metric, in the forms of v2beta1 and later."""
    for kind in ("pods", "object", "external"):
        value = mapping(metric.get(kind))
        if value:
            return str(mapping(value.get("metric")).get("name") or value.get("metricName") or "")
    return ""
