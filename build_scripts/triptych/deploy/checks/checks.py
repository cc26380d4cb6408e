"""All checks of a folder of manifests: no cluster is asked, every fault is told at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import Finding
from triptych.base.releases import Release
from triptych.deploy.checks import fleet, pods
from triptych.deploy.checks.objects import Folder, Server, Unread, read_folder
from triptych.deploy.checks.pods import Known
from triptych.repository.lint.snapshot import Flaw, error

_SEVERITIES = ("error", "warning", "info")
_TAG = re.compile(r":(\d\d)\.(\d\d)\b")


class Checked(NamedTuple):
    """What checks look at: a folder, and what is known of the pipeline that it serves."""

    folder: Folder
    known: Known | None
    release: Release | None


class Check(NamedTuple):
    """A row of the table: subjects of a folder, and the flaws of each."""

    id: str
    subjects: Callable[[Checked], Iterable[Any]]
    flaws: Callable[[Any, Checked], Iterator[Flaw]]


def _alone(flaws: Callable[[Any], Iterator[Flaw]]) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """For a check that needs nothing but its subject."""
    return lambda subject, _: flaws(subject)


def _amid(
    flaws: Callable[[Any, Folder], Iterator[Flaw]],
) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """For one that looks at the other objects of the folder."""
    return lambda subject, checked: flaws(subject, checked.folder)


def _built(
    flaws: Callable[[Any, Known | None], Iterator[Flaw]],
) -> Callable[[Any, Checked], Iterator[Flaw]]:
    """For one that compares with what was built and measured."""
    return lambda subject, checked: flaws(subject, checked.known)


def _servers(checked: Checked) -> list[Server]:
    return checked.folder.servers


def _autoscalers(checked: Checked) -> Iterable[Any]:
    return checked.folder.autoscalers


def _of(*kinds: str) -> Callable[[Checked], Iterable[Any]]:
    return lambda checked: checked.folder.of(*kinds)


def _queries(checked: Checked) -> Iterable[Any]:
    return fleet.queries(checked.folder)


# A new check is a generator of flaws and a line here. What most often causes the rest comes first.
CHECKS = (
    Check("manifest-readable", lambda checked: checked.folder.unread, lambda one, _: _unread(one)),
    Check("serves-triton", lambda checked: [checked.folder], lambda one, _: _serves(one)),
    Check("api-version", lambda checked: checked.folder.objects, _alone(fleet.api_version)),
    Check("field-known", _servers, _alone(pods.field_known)),
    Check("image-tag", _servers, _alone(pods.image_tag)),
    Check("startup-probe", _servers, _alone(pods.startup_probe)),
    Check("readiness-probe", _servers, _alone(pods.readiness_probe)),
    Check("liveness-probe", _servers, _alone(pods.liveness_probe)),
    Check("probe-timeout", _servers, _alone(pods.probe_timeout)),
    Check("shared-memory", _servers, _alone(pods.shared_memory)),
    Check("shared-memory-measured", _servers, _built(pods.shared_memory_measured)),
    Check("memory-limit", _servers, _alone(pods.memory_limit)),
    Check("memory-measured", _servers, _built(pods.memory_measured)),
    Check("engine-gpu", _servers, _built(pods.engine_gpu)),
    Check("pre-stop", _servers, _alone(pods.pre_stop)),
    Check("grace", _servers, _alone(pods.grace)),
    Check("restricted", _servers, _alone(pods.restricted)),
    Check("model-control", _servers, _alone(pods.model_control)),
    Check("recreated", _servers, _alone(fleet.recreated)),
    Check("disruption-budget", _servers, _amid(fleet.disruption_budget)),
    Check("replicas-autoscaled", _autoscalers, _amid(fleet.replicas_autoscaled)),
    Check("one-autoscaler", _autoscalers, _amid(fleet.one_autoscaler)),
    Check("null-values", _of("ScaledObject"), _alone(fleet.null_values)),
    Check("fallback", _of("ScaledObject"), _alone(fleet.fallback)),
    Check("value-metric", _of("ScaledObject"), _alone(fleet.value_metric)),
    Check("scales-on-use", _queries, _alone(fleet.scales_on_use)),
    Check("scales-on-ratio", _queries, _alone(fleet.scales_on_ratio)),
    Check("metric-known", _queries, _alone(fleet.metric_known)),
    Check(
        "histogram-release",
        _queries,
        lambda query, checked: fleet.histogram_release(query, checked.release),
    ),
    Check("balanced", _of("Service"), _amid(fleet.balanced)),
    Check("closed", _of("Service"), _amid(fleet.closed)),
    Check("canary-percent", _of("InferenceService"), _alone(fleet.canary_percent)),
    Check("grpc-port", _servers, _alone(fleet.grpc_port)),
)


def check_manifests(
    folder: Path, *, release: Release | None = None, known: Known | None = None
) -> list[Finding]:
    """Every finding on the manifests below `folder`, errors first.

    Args:
        folder: YAML files, and folders of Kustomize as `kubectl kustomize` makes them.
        release: of Triton; None takes the image's, where its tag tells.
        known: what was built and measured of the pipeline; None compares with nothing.

    Raises:
        UserError: there is no such folder, or no kubectl for one that needs it.
    """
    read = read_folder(folder)
    checked = Checked(read, known, release or _release_of(read))
    findings = [
        Finding(check.id, **{**vars(flaw), "file": flaw.file or subject.where})
        for check in CHECKS
        for subject in check.subjects(checked)
        for flaw in check.flaws(subject, checked)
    ]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def _unread(one: Unread) -> Iterator[Flaw]:
    yield error("A file must be a manifest that can be read", one.reason, one.remedy, one.file)


def _serves(folder: Folder) -> Iterator[Flaw]:
    if not folder.servers and not folder.unread:
        yield error(
            "There must be a workload that runs Triton",
            f"{len(folder.objects)} objects, none with an image or command of tritonserver",
            "Name the folder of its Deployment",
            ".",
        )


def _release_of(folder: Folder) -> Release | None:
    for server in folder.servers:
        found = _TAG.search(str(server.container.get("image", "")))
        if found:
            return Release(int(found[1]), int(found[2]))
    return None
