"""All checks of a folder of manifests, without a cluster, in one report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import Finding
from triptych.base.releases import Release
from triptych.deploy.checks import fleet, pods
from triptych.deploy.checks.objects import Folder, ServerPods, UnreadableFile, read_folder
from triptych.deploy.checks.pods import Known
from triptych.repository.lint.snapshot import Flaw, error

_SEVERITIES = ("error", "warning", "info")
_TAG = re.compile(r":(\d\d)\.(\d\d)\b")


class Checked(NamedTuple):
    """Folder with manifests, and the known facts about the pipeline that it serves."""

    folder: Folder
    known: Known | None
    release: Release | None


class ManifestCheck(NamedTuple):
    """Check with its subjects in a folder, and a generator of the flaws of each subject."""

    id: str
    subjects: Callable[[Checked], Iterable[Any]]
    flaws: Callable[[Any, Checked], Iterator[Flaw]]


def _alone(flaws: Callable[[Any], Iterator[Flaw]]) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """Return a check that reads only its subject."""
    return lambda subject, _: flaws(subject)


def _amid(
    flaws: Callable[[Any, Folder], Iterator[Flaw]],
) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """Return a check that also reads the other objects of the folder."""
    return lambda subject, checked: flaws(subject, checked.folder)


def _built(
    flaws: Callable[[Any, Known | None], Iterator[Flaw]],
) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """Return a check that compares with the build and its measurements."""
    return lambda subject, checked: flaws(subject, checked.known)


def _servers(checked: Checked) -> list[ServerPods]:
    return checked.folder.servers


def _autoscalers(checked: Checked) -> Iterable[Any]:
    return checked.folder.autoscalers


def _kinds(*kinds: str) -> Callable[[Checked], Iterable[Any]]:
    return lambda checked: checked.folder.of(*kinds)


def _queries(checked: Checked) -> Iterable[Any]:
    return fleet.queries(checked.folder)


# A new check is a generator of flaws and a line here. Checks of causes stand before those of
# consequences.
CHECKS = (
    ManifestCheck(
        "manifest-readable", lambda checked: checked.folder.unread, lambda one, _: _unread(one)
    ),
    ManifestCheck("serves-triton", lambda checked: [checked.folder], lambda one, _: _serves(one)),
    ManifestCheck("api-version", lambda checked: checked.folder.objects, _alone(fleet.api_version)),
    ManifestCheck("field-known", _servers, _alone(pods.field_known)),
    ManifestCheck("image-tag", _servers, _alone(pods.image_tag)),
    ManifestCheck("startup-probe", _servers, _alone(pods.startup_probe)),
    ManifestCheck("readiness-probe", _servers, _alone(pods.readiness_probe)),
    ManifestCheck("liveness-probe", _servers, _alone(pods.liveness_probe)),
    ManifestCheck("probe-timeout", _servers, _alone(pods.probe_timeout)),
    ManifestCheck("shared-memory", _servers, _alone(pods.shared_memory)),
    ManifestCheck("shared-memory-measured", _servers, _built(pods.shared_memory_measured)),
    ManifestCheck("memory-limit", _servers, _alone(pods.memory_limit)),
    ManifestCheck("memory-measured", _servers, _built(pods.memory_measured)),
    ManifestCheck("engine-gpu", _servers, _built(pods.engine_gpu)),
    ManifestCheck("pre-stop", _servers, _alone(pods.pre_stop)),
    ManifestCheck("grace", _servers, _alone(pods.grace)),
    ManifestCheck("restricted", _servers, _alone(pods.restricted)),
    ManifestCheck("model-control", _servers, _alone(pods.model_control)),
    ManifestCheck("recreated", _servers, _alone(fleet.recreated)),
    ManifestCheck("disruption-budget", _servers, _amid(fleet.disruption_budget)),
    ManifestCheck("replicas-autoscaled", _autoscalers, _amid(fleet.replicas_autoscaled)),
    ManifestCheck("one-autoscaler", _autoscalers, _amid(fleet.one_autoscaler)),
    ManifestCheck("null-values", _kinds("ScaledObject"), _alone(fleet.null_values)),
    ManifestCheck("fallback", _kinds("ScaledObject"), _alone(fleet.fallback)),
    ManifestCheck("value-metric", _kinds("ScaledObject"), _alone(fleet.value_metric)),
    ManifestCheck("scales-on-use", _queries, _alone(fleet.scales_on_use)),
    ManifestCheck("scales-on-ratio", _queries, _alone(fleet.scales_on_ratio)),
    ManifestCheck("metric-known", _queries, _alone(fleet.metric_known)),
    ManifestCheck(
        "histogram-release",
        _queries,
        lambda query, checked: fleet.histogram_release(query, checked.release),
    ),
    ManifestCheck("balanced", _kinds("Service"), _amid(fleet.balanced)),
    ManifestCheck("closed", _kinds("Service"), _amid(fleet.closed)),
    ManifestCheck("canary-percent", _kinds("InferenceService"), _alone(fleet.canary_percent)),
    ManifestCheck("grpc-port", _servers, _alone(fleet.grpc_port)),
)


def check_manifests(
    folder: Path, *, release: Release | None = None, known: Known | None = None
) -> list[Finding]:
    """Return the findings on the manifests below `folder`, errors first.

    Args:
        folder: Folder with YAML files, or folders of Kustomize as `kubectl kustomize` renders them.
        release: Release of Triton; None uses the tag of the image if the tag is a release.
        known: Facts about the built pipeline; None skips the checks that need them.

    Raises:
        UserError: The folder does not exist, or it needs kubectl, which is not installed.
    """
    read = read_folder(folder)
    checked = Checked(read, known, release or _find_release(read))
    findings = [
        Finding(check.id, **{**vars(flaw), "file": flaw.file or subject.where})
        for check in CHECKS
        for subject in check.subjects(checked)
        for flaw in check.flaws(subject, checked)
    ]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def _unread(one: UnreadableFile) -> Iterator[Flaw]:
    yield error("A file must be a readable manifest", one.reason, one.remedy, one.file)


def _serves(folder: Folder) -> Iterator[Flaw]:
    if not folder.servers and not folder.unread:
        yield error(
            "There must be a workload that runs Triton",
            f"{len(folder.objects)} objects, none with an image or command of tritonserver",
            "Name the folder of its Deployment",
            ".",
        )


def _find_release(folder: Folder) -> Release | None:
    for server in folder.servers:
        found = _TAG.search(str(server.container.get("image", "")))
        if found:
            return Release(int(found[1]), int(found[2]))
    return None
