"""A Gateway of the cluster in front of the replicas: GRPCRoute, in place of a proxy of our own."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.basis import Deployed
from triptych.deploy.candidate import beside, candidate_name
from triptych.deploy.options import DeployOptions
from triptych.deploy.workload import (
    PORTS,
    gateway_askers,
    labels,
    metadata,
    servers_policy,
    service,
)

STABLE, CANARY = "stable", "canary"
_MILLION = 10**6


def behind_gateway(basis: Deployed) -> dict[str, Any]:
    """Route, Services and network: file to document."""
    options = basis.options
    namespace, _ = _gateway(options)
    files = {
        "route.yaml": _route(options),
        "service.yaml": service(options, labels(options)),
        "network-policy.yaml": servers_policy(options, gateway_askers(options, namespace)),
        **beside(basis, gateway_askers(options, namespace)),
    }
    if options.rollout is not None:
        canary = service(options, labels(options))
        canary["metadata"] = {**canary["metadata"], "name": canary_name(options)}
        files["canary-service.yaml"] = canary
    return files


def canary_name(options: DeployOptions) -> str:
    """Of the Service of the new build's pods, which Argo Rollouts selects."""
    return f"{options.name}-{CANARY}"


def _gateway(options: DeployOptions) -> tuple[str, str]:
    """Namespace and name."""
    namespace, _, name = (options.gateway or "").rpartition("/")
    return namespace or options.namespace, name


def _route(options: DeployOptions) -> dict[str, Any]:
    namespace, name = _gateway(options)
    backends: list[dict[str, Any]] = [_backend(options.name)]
    rule: dict[str, Any] = {"backendRefs": backends}
    if options.rollout is not None:
        backends[0]["weight"] = ExplainedValue(
            100, "of the old build; Argo Rollouts moves both, and an apply amid that resets them"
        )
        backends.append({**_backend(canary_name(options)), "weight": 0})
    if options.mirrored is not None:
        share = options.mirrored.share
        copies = {
            "backendRef": _backend(candidate_name(options)),
            "fraction": ExplainedValue(
                {"numerator": round(share * _MILLION), "denominator": _MILLION},
                f"--mirror: {share:g} of the requests; what the candidate answers is thrown away",
            ),
        }
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": copies}]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GRPCRoute",
        "metadata": metadata(options),
        "spec": {
            "parentRefs": [{"name": name, "namespace": namespace}],
            "rules": ExplainedValue(
                [rule],
                "every host name and method of the gateway's listener: add hostnames where it has "
                "other routes",
            ),
        },
    }


def _backend(name: str) -> dict[str, Any]:
    return {"name": name, "port": PORTS["grpc"]}
