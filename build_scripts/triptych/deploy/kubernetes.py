"""`triptych deploy --target kubernetes`: from a lock and its measurements to a Kustomize folder."""

from __future__ import annotations

from pathlib import Path

from triptych.deploy.basis import Manifests, basis_of
from triptych.deploy.devices import overlay_of, resources_patch
from triptych.deploy.monitoring import pod_monitor, prometheus_rule
from triptych.deploy.options import Options
from triptych.deploy.reasons import Because
from triptych.deploy.scaling import scaled_object
from triptych.deploy.workload import deployment, disruption_budget, network_policy, service


def kubernetes_manifests(
    repository: Path, pipeline: str, options: Options, reports: Path
) -> Manifests:
    """The manifests of a built pipeline, from what `basis_of` takes.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    basis = basis_of(repository, pipeline, options, reports)
    lock, sizes = basis.lock, basis.sizes
    overlay = overlay_of(lock, options)
    base = {
        "deployment.yaml": deployment(options, sizes, basis.version),
        "service.yaml": service(options),
        "disruption-budget.yaml": disruption_budget(options),
        "network-policy.yaml": network_policy(options),
        "scaled-object.yaml": scaled_object(lock, options, sizes),
        "pod-monitor.yaml": pod_monitor(options),
        "prometheus-rule.yaml": prometheus_rule(lock, options, sizes, basis.measured),
    }
    files = {
        "base/kustomization.yaml": {**KUSTOMIZATION, "resources": list(base)},
        **{f"base/{name}": document for name, document in base.items()},
        f"overlays/{overlay}/kustomization.yaml": {
            **KUSTOMIZATION,
            "namespace": Because(
                options.namespace, "queries and alerts select it, too: change it with --namespace"
            ),
            "resources": ["../../base"],
            "patches": [{"path": "resources.yaml"}],
        },
        f"overlays/{overlay}/resources.yaml": resources_patch(lock, options, sizes, basis.measured),
    }
    return Manifests(files, basis.version, f"overlays/{overlay}", APPLY)


KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
APPLY = "kubectl apply -k {}"
