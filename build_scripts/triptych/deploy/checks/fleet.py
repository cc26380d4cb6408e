"""Checks of the objects around the pods: API versions, autoscalers, Services, budgets, KServe.

Queries of Prometheus in autoscalers, rules and analyses are checked here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from triptych.base.errors import closest
from triptych.deploy.checks.objects import Folder, ManifestObject, ServerPods, mapping, sequence
from triptych.repository.config import COUNTED_FROM, HISTOGRAM
from triptych.repository.lint.snapshot import Flaw, error, warning
from triptych.runtime.generation_metrics import NAMES, PREFIX

_AUTHENTICATES = re.compile(
    r"require_client_certificate\W+true|(jwt_authn|api_key_auth|basic_auth|ext_authz|oauth2)\.v3"
)
"""Settings of Envoy by which clients authenticate."""
_STANDARD = ("Standard", "RawDeployment", "")


def replicas_autoscaled(autoscaler: ManifestObject) -> Iterator[Flaw]:
    kind, name = target_of(autoscaler)
    for one in autoscaler.folder.of(kind):
        if one.name == name and "replicas" in one.spec:
            yield error(
                "A workload with an autoscaler must not set `replicas`: every apply resets them",
                f"replicas: {one.spec['replicas']} of {kind} {name}, which {autoscaler.kind} "
                f"{autoscaler.name} scales",
                "Leave it out",
            )


def one_autoscaler(autoscaler: ManifestObject) -> Iterator[Flaw]:
    target = target_of(autoscaler)
    same = [one for one in autoscaler.folder.autoscalers if target_of(one) == target]
    if len(same) > 1 and same[0] is autoscaler:
        yield error(
            "Only one autoscaler must set the replicas, because two counteract each other",
            " and ".join(f"{one.kind} {one.name}" for one in same),
            "Keep one; KEDA creates its own HPA",
        )


def null_values(autoscaler: ManifestObject) -> Iterator[Flaw]:
    for trigger in triggers(autoscaler):
        data = mapping(trigger.get("metadata"))
        if trigger.get("type") == "prometheus" and str(data.get("ignoreNullValues")) != "false":
            yield error(
                "Lost metrics must not count as no load: KEDA would remove replicas (keda#3065)",
                f"ignoreNullValues: {data.get('ignoreNullValues', 'not set, which is true')}",
                'Set ignoreNullValues: "false", and a fallback',
            )


def fallback(autoscaler: ManifestObject) -> Iterator[Flaw]:
    asked = [one for one in triggers(autoscaler) if one.get("type") == "prometheus"]
    if asked and "fallback" not in autoscaler.spec:
        yield warning(
            "Without metrics the fleet should have a chosen size",
            "no fallback",
            "Set fallback: {failureThreshold: 3, replicas: N, behavior: currentReplicasIfHigher}",
        )


def value_metric(autoscaler: ManifestObject) -> Iterator[Flaw]:
    for trigger in triggers(autoscaler):
        query = str(mapping(trigger.get("metadata")).get("query", ""))
        if trigger.get("metricType") == "Value" and ("queue" in query or "latency" in query):
            yield warning(
                "Waiting time must not multiply replicas, because it grows without limit near "
                "saturation",
                "a queue or latency metric with metricType: Value",
                "Scale on the rate over the measured capacity (AverageValue); let waiting add at "
                "most one replica",
            )


def balanced(service: ManifestObject) -> Iterator[Flaw]:
    spec = service.spec
    if spec.get("clusterIP") == "None" or not _grpc_ports(service):
        return
    routes = service.folder.of("GRPCRoute", "HTTPRoute", "VirtualService")
    if any(service.name in str(route.spec) for route in routes):
        return
    chosen = [server for server in service.folder.servers if selects(service, server)]
    if chosen:
        yield warning(
            "A gRPC client keeps one connection: behind one address it stays on one replica",
            f"a Service with one address for the gRPC port of {chosen[0].owner.name}",
            "Put a proxy or a Gateway in front, or make the Service headless (clusterIP: None)",
        )


def closed(service: ManifestObject) -> Iterator[Flaw]:
    kind = service.spec.get("type")
    if kind not in ("LoadBalancer", "NodePort"):
        return
    if any(selects(service, server) for server in service.folder.servers):
        yield error(
            "Triton does not authenticate clients, so it must not be reachable from outside",
            f"type: {kind}",
            "Make it ClusterIP, behind a gateway that authenticates clients",
        )
    configs = " ".join(json.dumps(one.data) for one in service.folder.of("ConfigMap"))
    if _AUTHENTICATES.search(configs) is None and any(
        _within(mapping(service.spec.get("selector")), labels)
        for labels in _proxies(service.folder)
    ):
        yield error(
            "A proxy that is reachable from outside must authenticate clients",
            f"type: {kind}, and an Envoy without keys and client certificates",
            "Add --envoy-client-ca to `triptych deploy`, or make it ClusterIP",
        )


def _proxies(folder: Folder) -> Iterator[dict[str, object]]:
    """Yield the labels of the pods that run Envoy."""
    for one in folder.of("Deployment", "DaemonSet"):
        template = mapping(one.spec.get("template"))
        containers = sequence(mapping(template.get("spec")).get("containers"))
        if any("envoy" in str(mapping(each).get("image", "")) for each in containers):
            yield mapping(mapping(template.get("metadata")).get("labels"))


def disruption_budget(server: ServerPods) -> Iterator[Flaw]:
    if server.owner.kind not in ("Deployment", "StatefulSet", "Rollout"):
        return
    budgets = [
        one
        for one in server.owner.folder.of("PodDisruptionBudget")
        if _within(mapping(mapping(one.spec.get("selector")).get("matchLabels")), server.labels)
    ]
    if not budgets:
        yield warning(
            "Draining nodes must not end all replicas at once",
            "no PodDisruptionBudget selects these pods",
            "Add one with maxUnavailable: 1",
        )


def canary_percent(service: ManifestObject) -> Iterator[Flaw]:
    predictor = mapping(service.spec.get("predictor"))
    mode = str(service.annotations.get("serving.kserve.io/deploymentMode", ""))
    if "canaryTrafficPercent" in predictor and mode in _STANDARD:
        yield error(
            "canaryTrafficPercent must be with Knative: elsewhere KServe ignores it, and the new "
            "build gets all requests (kserve#5335)",
            f"canaryTrafficPercent: {predictor['canaryTrafficPercent']} with deploymentMode "
            f"{mode or 'not set'}",
            "Set deploymentMode: Serverless, or use spec.canary of KServe 0.20",
        )


def grpc_port(server: ServerPods) -> Iterator[Flaw]:
    if server.owner.kind not in ("InferenceService", "ServingRuntime", "ClusterServingRuntime"):
        return
    ports = [str(mapping(port).get("name", "")) for port in sequence(server.container.get("ports"))]
    if not any("grpc" in name or "h2c" in name for name in ports):
        yield warning(
            "KServe needs a named gRPC port, otherwise it opens only HTTP (kserve#2961)",
            f"ports: {', '.join(ports) or 'none'}",
            "Name one grpc (with Knative: h2c, and no other)",
        )


def triggers(autoscaler: ManifestObject) -> list[dict[str, object]]:
    return [mapping(one) for one in sequence(autoscaler.spec.get("triggers"))]


def target_of(autoscaler: ManifestObject) -> tuple[str, str]:
    """Return kind and name of the scaled object; KEDA's default kind is Deployment."""
    target = mapping(autoscaler.spec.get("scaleTargetRef"))
    return str(target.get("kind", "Deployment")), str(target.get("name", ""))


def selects(service: ManifestObject, server: ServerPods) -> bool:
    return _within(mapping(service.spec.get("selector")), server.labels)


def _within(selector: dict[str, object], labels: dict[str, object]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _grpc_ports(service: ManifestObject) -> list[dict[str, object]]:
    ports = [mapping(port) for port in sequence(service.spec.get("ports"))]
    return [
        port
        for port in ports
        if "grpc" in str(port.get("name", ""))
        or "8001" in (str(port.get("port")), str(port.get("targetPort")))
    ]


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
# Backends and caches add names, so only the families of Triton itself and of pipelines that
# generate text are checked.
_NAME = re.compile(rf"\b(?:nv_(?:inference|gpu|cpu|energy|pinned|model)|{PREFIX})_[a-z0-9_]+")
_UTILIZATION = re.compile(
    r"DCGM_FI\w*|nv_gpu_utilization|nv_gpu_power_usage|duty_cycle|accelerator\w*", re.IGNORECASE
)


class Query(NamedTuple):
    """Expression or name of a metric, and its purpose."""

    owner: ManifestObject
    text: str
    scales: bool

    @property
    def where(self) -> str:
        return self.owner.where


def queries(folder: Folder) -> list[Query]:
    """Return the expressions of a folder."""
    return [query for one in folder.objects for query in _of(one)]


def metric_known(query: Query) -> Iterator[Flaw]:
    for name in sorted(set(_NAME.findall(query.text))):
        if name not in _SERIES:
            yield error(
                "A metric must exist in Triton: a query of an unknown one is empty and never fires",
                name,
                f"{closest(name, (*METRICS, *NAMES))}See the metrics page of the server",
            )


def histogram_release(query: Query) -> Iterator[Flaw]:
    release = query.owner.folder.release
    if release is not None and release < COUNTED_FROM and HISTOGRAM in query.text:
        yield error(
            "The release must count ordinary models in the histogram",
            f"{HISTOGRAM}, which is empty before {COUNTED_FROM}; the image is {release}",
            f"Serve with {COUNTED_FROM} or later, or use the latencies of a proxy",
        )


def scales_on_use(query: Query) -> Iterator[Flaw]:
    found = _UTILIZATION.search(query.text)
    if query.scales and found:
        yield warning(
            "Replicas should follow the rate: GPU utilization is high long before the GPU is full, "
            "and excludes waiting requests",
            found[0],
            "Scale on the rate over the measured capacity (triptych bench --find-max-rate)",
        )


def scales_on_ratio(query: Query) -> Iterator[Flaw]:
    asked = query.text.replace("_", " ").replace(":", " ")
    is_ratio = "nv_inference_queue_duration" in query.text and "/" in query.text
    if query.scales and (is_ratio or re.search(r"queue compute|queue ratio", asked)):
        yield warning(
            "Replicas should follow the rate: queue time is low until it grows without limit near "
            "saturation, and that of an ensemble excludes its steps",
            "a queue time over another one or over requests",
            "Scale on the rate over the measured capacity (triptych bench --find-max-rate)",
        )


def _of(one: ManifestObject) -> Iterator[Query]:
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
    """Return the name of an HPA's metric, in the forms of v2beta1 and later."""
    for kind in ("pods", "object", "external"):
        value = mapping(metric.get(kind))
        if value:
            return str(mapping(value.get("metric")).get("name") or value.get("metricName") or "")
    return ""
