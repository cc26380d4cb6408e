"""`triptych deploy --target kubernetes`: from a lock and its measurements to a Kustomize folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.container.locks import find_pipelines
from triptych.deploy.alertmanager import alertmanager
from triptych.deploy.dashboard import dashboard_map
from triptych.deploy.devices import overlay_of, resources_patch
from triptych.deploy.measured import measured_of
from triptych.deploy.metrics import Metrics
from triptych.deploy.monitoring import pod_monitor, prometheus_rule
from triptych.deploy.options import Options, check
from triptych.deploy.reasons import Because, reasons_of
from triptych.deploy.scaling import scaled_object
from triptych.deploy.sizing import sizes_of
from triptych.deploy.workload import deployment, disruption_budget, network_policy, service
from triptych.errors import UserError
from triptych.repository.lock import Lock, build_id, read_lock

_VERSION_DIGITS = 12


@dataclass(frozen=True)
class Manifests:
    """What is to be written.

    Attributes:
        files: path in the folder to its document.
        overlay: folder of the overlay that fits the core, for ``kubectl apply -k``.
        version: the start of the lock's hash, which names the repository's image or volume.
    """

    files: Mapping[str, Any]
    overlay: str
    version: str

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: files, and each number with its reason."""
        return {
            "overlay": self.overlay,
            "version": self.version,
            "files": list(self.files),
            "numbers": [
                {"file": file, "field": field, "value": value, "reason": reason}
                for file, document in self.files.items()
                for field, value, reason in reasons_of(document)
            ],
        }


def kubernetes_manifests(
    repository: Path, pipeline: str, options: Options, reports: Path
) -> Manifests:
    """The manifests of a built pipeline.

    Args:
        repository: holds the pipeline, and no other.
        pipeline: its name.
        options: the user's.
        reports: the pipeline's folder of reports, with the result of `bench`.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    check(options)
    lock = read_lock(repository, pipeline)
    _check_alone(repository, lock)
    _check_promise(lock)
    overlay = overlay_of(lock, options)
    measured = measured_of(lock, options, reports)
    sizes = sizes_of(lock, options, measured, repository)
    version = build_id(repository, pipeline)[:_VERSION_DIGITS]
    metrics = Metrics(lock.spec.name, options.namespace, options.name, options.envoy)
    base = {
        "deployment.yaml": deployment(options, sizes, version),
        "service.yaml": service(options),
        "disruption-budget.yaml": disruption_budget(options),
        "network-policy.yaml": network_policy(options),
        "scaled-object.yaml": scaled_object(lock, options, sizes, metrics),
        "pod-monitor.yaml": pod_monitor(options),
        "prometheus-rule.yaml": prometheus_rule(lock, options, sizes, measured, metrics),
        "dashboard.yaml": dashboard_map(lock, options, metrics, measured.capacity_per_s.value),
    }
    files = {
        "base/kustomization.yaml": {**_KUSTOMIZATION, "resources": list(base)},
        **{f"base/{name}": document for name, document in base.items()},
        f"overlays/{overlay}/kustomization.yaml": {
            **_KUSTOMIZATION,
            "namespace": Because(
                options.namespace, "queries and alerts select it, too: change it with --namespace"
            ),
            "resources": ["../../base"],
            "patches": [{"path": "resources.yaml"}],
        },
        f"overlays/{overlay}/resources.yaml": resources_patch(lock, options, sizes, measured),
        "alertmanager.example.yaml": alertmanager(),
    }
    return Manifests(files, f"overlays/{overlay}", version)


_KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def _check_alone(repository: Path, lock: Lock) -> None:
    """One Deployment serves one pipeline with a core of its own: its capacity was measured so."""
    name = lock.spec.name
    if lock.spec.core.share is not None:
        raise UserError(
            "core.share",
            "must not be set for a pipeline that is deployed",
            given=f"{name} uses the core of {lock.spec.core.share}",
            remedy=f"Run `triptych build {name} --set core.share=null --repository FOLDER`",
        )
    others = [pipeline.name for pipeline in find_pipelines(repository) if pipeline.name != name]
    if others:
        raise UserError(
            str(repository),
            "must hold only the pipeline that is deployed: each scales by its own rate",
            given=f"{name} and {', '.join(others)}",
            remedy=f"Run `triptych build {name} --repository FOLDER` and name that folder here",
        )


def _check_promise(lock: Lock) -> None:
    if not lock.spec.serving.slo.limits_us:
        raise UserError(
            "serving.slo",
            "must promise a latency: capacity, scaling and alerts follow from it",
            given=lock.spec.serving.slo,
            remedy=f"Set for example serving.slo.p99_ms: 50, and run `triptych build "
            f"{lock.spec.name}`",
        )
