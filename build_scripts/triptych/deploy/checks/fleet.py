"""Checks of what stands around the pods: API versions, autoscalers, Services, budgets, KServe."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.deploy.checks.objects import Folder, Object, Server, mapping, sequence
from triptych.repository.lint.flaw import Flaw, error, warning

# Group and version, and the Kubernetes that has it no more (its deprecation guide).
REMOVED = {
    "autoscaling/v2beta1": ("1.25", "autoscaling/v2"),
    "autoscaling/v2beta2": ("1.26", "autoscaling/v2"),
    "policy/v1beta1": ("1.25", "policy/v1"),
    "extensions/v1beta1": ("1.22", "apps/v1 or networking.k8s.io/v1"),
    "apps/v1beta1": ("1.16", "apps/v1"),
    "apps/v1beta2": ("1.16", "apps/v1"),
    "networking.k8s.io/v1beta1": ("1.22", "networking.k8s.io/v1"),
    "batch/v1beta1": ("1.25", "batch/v1"),
}
_STANDARD = ("Standard", "RawDeployment", "")


def api_version(one: Object) -> Iterator[Flaw]:
    version = str(one.data.get("apiVersion", ""))
    if version in REMOVED:
        gone, now = REMOVED[version]
        yield error(
            "An API must be one that clusters still have",
            f"{version} {one.kind}, removed in Kubernetes {gone}",
            f"Write {now}",
        )


def replicas_autoscaled(autoscaler: Object, folder: Folder) -> Iterator[Flaw]:
    kind, name = target_of(autoscaler)
    for one in folder.of(kind):
        if one.name == name and "replicas" in one.spec:
            yield error(
                "What an autoscaler scales must not have `replicas`: every apply resets them",
                f"replicas: {one.spec['replicas']} of {kind} {name}, which {autoscaler.kind} "
                f"{autoscaler.name} scales",
                "Leave it out",
            )


def one_autoscaler(autoscaler: Object, folder: Folder) -> Iterator[Flaw]:
    others = [
        one
        for one in folder.autoscalers
        if one is not autoscaler and target_of(one) == target_of(autoscaler)
    ]
    if others and folder.autoscalers.index(autoscaler) == 0:
        yield error(
            "One autoscaler must own the replicas: two undo what the other did",
            f"{autoscaler.kind} {autoscaler.name} and "
            + ", ".join(f"{one.kind} {one.name}" for one in others),
            "Keep one; KEDA makes an HPA of its own",
        )


def null_values(autoscaler: Object) -> Iterator[Flaw]:
    for trigger in triggers(autoscaler):
        data = mapping(trigger.get("metadata"))
        if trigger.get("type") == "prometheus" and str(data.get("ignoreNullValues")) != "false":
            yield error(
                "Lost metrics must not count as no load: KEDA would remove replicas (keda#3065)",
                f"ignoreNullValues: {data.get('ignoreNullValues', 'not set, which is true')}",
                'Set ignoreNullValues: "false", and a fallback',
            )


def fallback(autoscaler: Object) -> Iterator[Flaw]:
    asked = [one for one in triggers(autoscaler) if one.get("type") == "prometheus"]
    if asked and "fallback" not in autoscaler.spec:
        yield warning(
            "Without metrics the fleet should keep a size that was chosen",
            "no fallback",
            "Set fallback: {failureThreshold: 3, replicas: N, behavior: currentReplicasIfHigher}",
        )


def value_metric(autoscaler: Object) -> Iterator[Flaw]:
    for trigger in triggers(autoscaler):
        query = str(mapping(trigger.get("metadata")).get("query", ""))
        if trigger.get("metricType") == "Value" and ("queue" in query or "latency" in query):
            yield warning(
                "Waiting time must not multiply replicas: near saturation it explodes, and so "
                "would they",
                "a queue or latency metric with metricType: Value",
                "Scale on the rate over the capacity that was measured (AverageValue); let waiting "
                "add one replica at most",
            )


def balanced(service: Object, folder: Folder) -> Iterator[Flaw]:
    spec = service.spec
    if spec.get("clusterIP") == "None" or not _grpc_ports(service):
        return
    routes = folder.of("GRPCRoute", "HTTPRoute", "VirtualService")
    if any(service.name in str(route.spec) for route in routes):
        return
    chosen = [server for server in folder.servers if selects(service, server)]
    if chosen:
        yield warning(
            "gRPC keeps one connection open: behind one address a client stays on one replica",
            f"a Service with one address for the gRPC port of {chosen[0].owner.name}",
            "Put a proxy or a Gateway in front, or make the Service headless (clusterIP: None)",
        )


def closed(service: Object, folder: Folder) -> Iterator[Flaw]:
    kind = service.spec.get("type")
    if kind in ("LoadBalancer", "NodePort") and any(
        selects(service, server) for server in folder.servers
    ):
        yield error(
            "Triton checks nobody's identity: it must not be reached from outside the cluster",
            f"type: {kind}",
            "Make it ClusterIP, behind a gateway that knows who may ask",
        )


def disruption_budget(server: Server, folder: Folder) -> Iterator[Flaw]:
    if server.owner.kind not in ("Deployment", "StatefulSet", "Rollout"):
        return
    budgets = [
        one
        for one in folder.of("PodDisruptionBudget")
        if _within(mapping(mapping(one.spec.get("selector")).get("matchLabels")), server.labels)
    ]
    if not budgets:
        yield warning(
            "Nodes that are drained must not take all replicas at once",
            "no PodDisruptionBudget selects these pods",
            "Add one with maxUnavailable: 1",
        )


def recreated(server: Server) -> Iterator[Flaw]:
    strategy = mapping(server.owner.spec.get("strategy"))
    if strategy.get("type") == "Recreate":
        yield error(
            "A new build must answer before the old one goes",
            "strategy: Recreate",
            "Leave it out, with rollingUpdate: {maxSurge: 1, maxUnavailable: 0}",
        )


def canary_percent(service: Object) -> Iterator[Flaw]:
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


def grpc_port(server: Server) -> Iterator[Flaw]:
    if server.owner.kind not in ("InferenceService", "ServingRuntime", "ClusterServingRuntime"):
        return
    ports = [str(mapping(port).get("name", "")) for port in sequence(server.container.get("ports"))]
    if not any("grpc" in name or "h2c" in name for name in ports):
        yield warning(
            "KServe must be told the gRPC port: it opens HTTP alone otherwise (kserve#2961)",
            f"ports: {', '.join(ports) or 'none'}",
            "Name one grpc (with Knative: h2c, and no other)",
        )


def triggers(autoscaler: Object) -> list[dict[str, object]]:
    return [mapping(one) for one in sequence(autoscaler.spec.get("triggers"))]


def target_of(autoscaler: Object) -> tuple[str, str]:
    """Kind and name of what it scales; KEDA's usual kind is Deployment."""
    target = mapping(autoscaler.spec.get("scaleTargetRef"))
    return str(target.get("kind", "Deployment")), str(target.get("name", ""))


def selects(service: Object, server: Server) -> bool:
    return _within(mapping(service.spec.get("selector")), server.labels)


def _within(selector: dict[str, object], labels: dict[str, object]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _grpc_ports(service: Object) -> list[dict[str, object]]:
    ports = [mapping(port) for port in sequence(service.spec.get("ports"))]
    return [
        port
        for port in ports
        if "grpc" in str(port.get("name", ""))
        or "8001" in (str(port.get("port")), str(port.get("targetPort")))
    ]
