"""A candidate beside the replicas, which gets copies of their requests and samples its answers."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.basis import Basis, Deployed
from triptych.deploy.devices import placement
from triptych.deploy.options import DeployOptions
from triptych.deploy.samples import MOUNT, sampling
from triptych.deploy.workload import (
    PORTS,
    USER,
    deployment,
    disruption_budget,
    headless_service,
    isolated,
    labels,
    metadata,
    network_policy,
    service,
)
from triptych.repository.manifest import read_manifest
from triptych.serving.fleet.envoy import EndpointNames, Mirror
from triptych.serving.fleet.mirror_option import FOLDER


def candidate_name(options: DeployOptions) -> str:
    """Of all its objects."""
    return f"{options.name}-candidate"


def mirror(options: DeployOptions) -> Mirror | None:
    """What Envoy is told of it."""
    if options.mirrored is None:
        return None
    at = EndpointNames(candidate_name(options), PORTS["grpc"], PORTS["http"])
    return Mirror(options.mirrored.share, at)


def beside(basis: Deployed, askers: ExplainedValue) -> dict[str, Any]:
    """All objects of the candidate, which `askers` alone reach: file to document."""
    options = basis.options
    if options.mirrored is None:
        return {}
    name = candidate_name(options)
    own = labels(options, name)
    found = service(options, own)
    if options.envoy is not None:
        found = headless_service(options, name)
        found["spec"]["selector"] = own
    nobody = ExplainedValue([], "as the replicas: it calls nobody")
    return {
        "candidate-deployment.yaml": _deployment(basis),
        "candidate-service.yaml": {**found, "metadata": metadata(options, name)},
        "candidate-disruption-budget.yaml": disruption_budget(options, name),
        "candidate-network-policy.yaml": network_policy(options, askers, nobody, name),
    }


def _deployment(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    if not isinstance(basis, Basis) or basis.candidate is None or options.mirrored is None:
        raise ValueError("no candidate")
    lock = read_manifest(options.mirrored.repository, basis.lock.spec.name)
    name = candidate_name(options)
    own = labels(options, name)
    made = deployment(options, basis.sizes, basis.candidate)
    pod = sampling(made["spec"]["template"], options, lock.spec.serving.sample, f"{MOUNT}/{FOLDER}")
    resources, node = placement(lock, options, basis.sizes, basis.measured)
    (container,) = pod["spec"]["containers"]
    spec = {
        **pod["spec"],
        **isolated(own, USER),
        "securityContext": pod["spec"]["securityContext"],
        **node,
        "containers": [{**container, "resources": resources}],
    }
    return {
        **made,
        "metadata": metadata(options, name),
        "spec": {
            **made["spec"],
            "replicas": ExplainedValue(
                1,
                "it gets a share alone, and nobody waits for it. Its metrics are scraped by "
                "nobody: they would count as the replicas'",
            ),
            "selector": {"matchLabels": own},
            "template": {
                "metadata": {"labels": {**own, "app.kubernetes.io/version": basis.candidate}},
                "spec": spec,
            },
        },
    }
