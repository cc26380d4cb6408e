"""`triptych deploy --target kubernetes`: from a lock and its measurements to a Kustomize folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.deploy import envoy
from triptych.deploy.alertmanager import alertmanager
from triptych.deploy.basis import Basis, Manifests, basis_of
from triptych.deploy.candidate import beside
from triptych.deploy.dashboard import dashboard_map
from triptych.deploy.devices import overlay_of, resources_patch
from triptych.deploy.gateway import behind_gateway
from triptych.deploy.monitoring import pod_monitor, prometheus_rule
from triptych.deploy.options import Options
from triptych.deploy.rollout import progressive
from triptych.deploy.samples import sampling, watching
from triptych.deploy.scaling import scaled_object
from triptych.deploy.workload import deployment, disruption_budget
from triptych.fleet.reasons import Because

KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
APPLY = "kubectl apply -k {}"


def kubernetes_manifests(
    repository: Path, pipeline: str, options: Options, reports: Path
) -> Manifests:
    """The manifests of a built pipeline, from what `basis_of` takes.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    basis = basis_of(repository, pipeline, options, reports)
    lock, sizes, metrics = basis.lock, basis.sizes, basis.metrics
    overlay = overlay_of(lock, options)
    sample = lock.spec.serving.sample
    base = {
        "deployment.yaml": servers(basis),
        "disruption-budget.yaml": disruption_budget(options),
        **_front(basis),
        **({} if sample is None else watching(basis, sample)),
        "scaled-object.yaml": scaled_object(lock, options, sizes, metrics),
        "pod-monitor.yaml": pod_monitor(options),
        "prometheus-rule.yaml": prometheus_rule(lock, options, sizes, basis.measured, metrics),
        "dashboard.yaml": dashboard_map(
            lock, options, metrics, basis.measured.capacity_per_s.value
        ),
    }
    if options.rollout is not None:
        base = progressive(basis, base)
    kustomization: dict[str, Any] = {**KUSTOMIZATION, "resources": list(base)}
    files = {f"base/{name}": document for name, document in base.items()}
    if options.gateway is None:
        name = envoy.proxy_name(options)
        kustomization["configMapGenerator"] = [
            {
                "name": Because(name, "its hash becomes part of its name: a change rolls out"),
                "files": ["envoy.yaml"],
            }
        ]
        files["base/envoy.yaml"] = envoy.configuration(basis, envoy.replicas_name(options))
    files = {
        "base/kustomization.yaml": kustomization,
        **files,
        f"overlays/{overlay}/kustomization.yaml": {
            **KUSTOMIZATION,
            "namespace": Because(
                options.namespace, "queries and alerts select it, too: change it with --namespace"
            ),
            "resources": ["../../base"],
            "patches": [{"path": "resources.yaml"}],
        },
        f"overlays/{overlay}/resources.yaml": resources_patch(lock, options, sizes, basis.measured),
        "alertmanager.example.yaml": alertmanager(),
    }
    return Manifests(files, basis.version, f"overlays/{overlay}", APPLY)


def servers(basis: Basis) -> dict[str, Any]:
    """The Deployment of the servers, with the samples' volume where they sample."""
    made = deployment(basis.options, basis.sizes, basis.version)
    pod = made["spec"]["template"]
    template = sampling(pod, basis.options, basis.lock.spec.serving.sample)
    return {**made, "spec": {**made["spec"], "template": template}}


def _front(basis: Basis) -> dict[str, Any]:
    """What takes requests for the servers."""
    if basis.options.gateway is None:
        askers = envoy.proxy_askers(basis.options)
        return {**envoy.behind_envoy(basis), **beside(basis, askers)}
    return behind_gateway(basis)
