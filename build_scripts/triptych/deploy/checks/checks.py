"""All checks of a folder of manifests, without a cluster, in one report."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from triptych.base.errors import Finding
from triptych.base.releases import Release
from triptych.deploy.checks import fleet, objects, pods
from triptych.deploy.checks.objects import Folder, ManifestObject, read_folder
from triptych.deploy.checks.pods import BuildInfo
from triptych.repository.lint.snapshot import LintCheck, find_flaws

_servers, _autoscalers = attrgetter("servers"), attrgetter("autoscalers")


def _kinds(*kinds: str) -> Callable[[Folder], list[ManifestObject]]:
    return lambda folder: folder.of(*kinds)


# A new check is a generator of flaws and a line here. Checks of causes stand before those of
# consequences. What kube-linter finds in manifests of any server is not checked again.
CHECKS = (
    LintCheck("manifest-readable", attrgetter("unread"), objects.manifest_readable),
    LintCheck("serves-triton", Folder.itself, objects.serves_triton),
    LintCheck("startup-probe", _servers, pods.startup_probe),
    LintCheck("readiness-probe", _servers, pods.readiness_probe),
    LintCheck("liveness-probe", _servers, pods.liveness_probe),
    LintCheck("probe-timeout", _servers, pods.probe_timeout),
    LintCheck("shared-memory", _servers, pods.shared_memory),
    LintCheck("shared-memory-measured", _servers, pods.shared_memory_measured),
    LintCheck("memory-measured", _servers, pods.memory_measured),
    LintCheck("cores-planned", _servers, pods.cores_planned),
    LintCheck("engine-gpu", _servers, pods.engine_gpu),
    LintCheck("pre-stop", _servers, pods.pre_stop),
    LintCheck("grace", _servers, pods.grace),
    LintCheck("model-control", _servers, pods.model_control),
    LintCheck("disruption-budget", _servers, fleet.disruption_budget),
    LintCheck("replicas-autoscaled", _autoscalers, fleet.replicas_autoscaled),
    LintCheck("one-autoscaler", _autoscalers, fleet.one_autoscaler),
    LintCheck("null-values", _kinds("ScaledObject"), fleet.null_values),
    LintCheck("fallback", _kinds("ScaledObject"), fleet.fallback),
    LintCheck("value-metric", _kinds("ScaledObject"), fleet.value_metric),
    LintCheck("scales-on-use", fleet.queries, fleet.scales_on_use),
    LintCheck("scales-on-ratio", fleet.queries, fleet.scales_on_ratio),
    LintCheck("metric-known", fleet.queries, fleet.metric_known),
    LintCheck("histogram-release", fleet.queries, fleet.histogram_release),
    LintCheck("balanced", _kinds("Service"), fleet.balanced),
    LintCheck("closed", _kinds("Service"), fleet.closed),
    LintCheck("canary-percent", _kinds("InferenceService"), fleet.canary_percent),
    LintCheck("grpc-port", _servers, fleet.grpc_port),
)


def check_manifests(
    folder: Path, *, release: Release | None = None, build: BuildInfo | None = None
) -> list[Finding]:
    """Return the findings on the manifests below `folder`, errors first.

    Args:
        folder: Folder with YAML files, or folders of Kustomize as `kubectl kustomize` renders them.
        release: Release of Triton; None uses the tag of the image if the tag is a release.
        build: Information about the built pipeline; None skips the checks that need it.

    Raises:
        UserError: The folder does not exist, or it needs kubectl, which is not installed.
    """
    return find_flaws(CHECKS, read_folder(folder, release, build))
