"""`triptych deploy --target kubernetes`: a Kustomize folder of a built pipeline of any task."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy import envoy
from triptych.deploy.alertmanager import alertmanager
from triptych.deploy.basis import Deployed, Manifests
from triptych.deploy.candidate import beside
from triptych.deploy.devices import resources_patch
from triptych.deploy.gateway import behind_gateway
from triptych.deploy.monitoring import pod_monitor
from triptych.deploy.rollout import progressive
from triptych.deploy.samples import sampling, watching
from triptych.deploy.workload import deployment, disruption_budget

KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
APPLY = "kubectl apply -k {}"


def kubernetes_manifests(basis: Deployed) -> Manifests:
    """The manifests.

    Raises:
        UserError: something cannot work; says what and what to do.
    """
    options, sample = basis.options, basis.sample
    overlay = basis.overlay()
    base = {
        "deployment.yaml": servers(basis),
        "disruption-budget.yaml": disruption_budget(options),
        **_front(basis),
        **({} if sample is None else watching(basis, sample)),
        "scaled-object.yaml": basis.scaled(),
        "pod-monitor.yaml": pod_monitor(options),
        "prometheus-rule.yaml": basis.rule(),
        "dashboard.yaml": basis.dashboard(),
    }
    if options.rollout is not None:
        base = progressive(basis, base)
    kustomization: dict[str, Any] = {**KUSTOMIZATION, "resources": list(base)}
    files = {f"base/{name}": document for name, document in base.items()}
    if options.gateway is None:
        name = envoy.proxy_name(options)
        kustomization["configMapGenerator"] = [
            {
                "name": ExplainedValue(
                    name, "its hash becomes part of its name: a change rolls out"
                ),
                "files": ["envoy.yaml"],
            }
        ]
        files["base/envoy.yaml"] = envoy.configuration(basis, envoy.replicas_name(options))
    files = {
        "base/kustomization.yaml": kustomization,
        **files,
        f"overlays/{overlay}/kustomization.yaml": {
            **KUSTOMIZATION,
            "namespace": ExplainedValue(
                options.namespace, "queries and alerts select it, too: change it with --namespace"
            ),
            "resources": ["../../base"],
            "patches": [{"path": "resources.yaml"}],
        },
        f"overlays/{overlay}/resources.yaml": resources_patch(options, *basis.placement()),
        "alertmanager.example.yaml": alertmanager(),
    }
    return Manifests(files, basis.version, f"overlays/{overlay}", APPLY)


def servers(basis: Deployed) -> dict[str, Any]:
    """The Deployment of the servers, with the samples' volume where they sample."""
    made = deployment(basis.options, basis.sizes, basis.version)
    pod = made["spec"]["template"]
    pod["spec"]["containers"][0]["env"] += [
        {"name": name, "value": value} for name, value in basis.environment.items()
    ]
    template = sampling(pod, basis.options, basis.sample)
    return {**made, "spec": {**made["spec"], "template": template}}


def _front(basis: Deployed) -> dict[str, Any]:
    """What takes requests for the servers."""
    if basis.options.gateway is None:
        askers = envoy.proxy_askers(basis.options)
        return {**envoy.behind_envoy(basis), **beside(basis, askers)}
    return behind_gateway(basis)
