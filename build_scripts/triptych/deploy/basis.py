"""What every target starts from: the lock, the figures of one replica and the numbers they give.

`Deployed` is all that targets know, whatever the task; `Basis` is of a pipeline that answers at
once, `generation.GenerationBasis` of one that generates text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue, reasons_of
from triptych.container.locks import find_pipelines
from triptych.deploy.dashboard import dashboard_map, rows_of
from triptych.deploy.devices import overlay_of, placement
from triptych.deploy.metrics import Metrics
from triptych.deploy.monitoring import Objective, Promised, objectives, prometheus_rule
from triptych.deploy.numbers import Measured, Sizes, measured_of, sizes_of
from triptych.deploy.options import DeployOptions, check_options
from triptych.deploy.scaling import scaled_object
from triptych.repository.manifest import BuildManifest, build_id, read_manifest
from triptych.spec.fields import Sample

VERSION_DIGITS = 12


class Deployed(Protocol):
    """What the targets know of a built pipeline that can be deployed."""

    @property
    def repository(self) -> Path:
        """Holds the pipeline, and no other."""

    @property
    def options(self) -> DeployOptions:
        """The user's."""

    @property
    def sizes(self) -> Sizes:
        """The numbers of a replica and of the fleet."""

    @property
    def version(self) -> str:
        """The start of the lock's hash, which names the repository's image or volume."""

    @property
    def in_place(self) -> str | None:
        """Likewise of the build that is replaced; None where it is not told."""

    @property
    def name(self) -> str:
        """Of the pipeline."""

    @property
    def sample(self) -> Sample | None:
        """What is sampled."""

    @property
    def gpus(self) -> int:
        """Of a replica."""

    @property
    def cores(self) -> ExplainedValue:
        """That a replica keeps busy."""

    @property
    def limits_ms(self) -> Sequence[float]:
        """Promised, of what Envoy can time: whole answers."""

    @property
    def environment(self) -> Mapping[str, ExplainedValue]:
        """Variables of the server, beside those that all have."""

    @property
    def requests_at_once(self) -> ExplainedValue | None:
        """That a replica is given, where that scales it; None where their rate does."""

    def overlay(self) -> str:
        """``cpu``, ``gpu`` or ``mig``."""

    def placement(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resources of the container; fields of the pod that choose its node."""

    def objectives(self) -> Sequence[Objective]:
        """What is promised of requests and can be counted."""

    def rule(self) -> dict[str, Any]:
        """The PrometheusRule."""

    def scaled(self) -> dict[str, Any]:
        """The ScaledObject."""

    def dashboard(self) -> dict[str, Any]:
        """The ConfigMap of the dashboard."""


@dataclass(frozen=True)
class Basis:
    """A built pipeline that can be deployed.

    Attributes:
        repository: holds the pipeline, and no other.
        version: the start of the lock's hash, which names the repository's image or volume.
        candidate: likewise of a build that gets copies of requests; None without one.
        in_place: likewise of the build that is replaced; None where it is not told.
    """

    repository: Path
    lock: BuildManifest
    options: DeployOptions
    measured: Measured
    sizes: Sizes
    version: str
    candidate: str | None = None
    in_place: str | None = None

    @property
    def metrics(self) -> Metrics:
        """Queries on the fleet."""
        options = self.options
        return Metrics(self.name, options.namespace, options.workload, options.envoy)

    @property
    def name(self) -> str:
        return self.lock.spec.name

    @property
    def sample(self) -> Sample | None:
        return self.lock.spec.serving.sample

    @property
    def gpus(self) -> int:
        return len(self.lock.spec.serving.gpus) if self.lock.spec.core.device == "gpu" else 0

    @property
    def cores(self) -> ExplainedValue:
        return ExplainedValue(self.measured.cpu_cores.value, "at capacity")

    @property
    def limits_ms(self) -> Sequence[float]:
        return list(self.lock.spec.serving.slo.limits_ms.values())

    @property
    def environment(self) -> Mapping[str, ExplainedValue]:
        return {}

    @property
    def requests_at_once(self) -> ExplainedValue | None:
        return None

    def overlay(self) -> str:
        return overlay_of(self.lock, self.options)

    def placement(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return placement(self.lock, self.options, self.sizes, self.measured)

    def objectives(self) -> Sequence[Objective]:
        return list(objectives(self.lock, self.options, self.metrics))

    def rule(self) -> dict[str, Any]:
        return prometheus_rule(self.lock, self.options, self.sizes, self.measured, self.metrics)

    def scaled(self) -> dict[str, Any]:
        return scaled_object(self.lock, self.options, self.sizes, self.metrics)

    def dashboard(self) -> dict[str, Any]:
        promise = Promised(self.name, str(self.lock.spec.serving.slo))
        capacity = self.measured.capacity_per_s.value
        rows = rows_of(self.lock, self.options, self.metrics, capacity)
        return dashboard_map(promise, self.options, rows)


@dataclass(frozen=True)
class Manifests:
    """What is to be written.

    Attributes:
        files: path in the folder to its document.
        version: as `Basis.version`.
        start: what is applied: a folder or file in the folder.
        tool: the command that takes it, ``{}`` being the path of `start`.
    """

    files: Mapping[str, Any]
    version: str
    start: str
    tool: str

    def command(self, folder: Path) -> str:
        """What a user runs once it is written to `folder`."""
        return self.tool.format(folder / self.start)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: files, and each number with its reason."""
        return {
            "start": self.start,
            "version": self.version,
            "files": list(self.files),
            "numbers": [
                {"file": file, "field": field, "value": value, "reason": reason}
                for file, document in self.files.items()
                for field, value, reason in reasons_of(document)
            ],
        }


def basis_of(repository: Path, pipeline: str, options: DeployOptions, reports: Path) -> Basis:
    """Everything that was built and measured of a pipeline, checked.

    Args:
        repository: holds the pipeline, and no other.
        pipeline: its name.
        options: the user's.
        reports: the pipeline's folder of reports, with the result of `bench`.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    check_options(options)
    if options.affinity_header is not None:
        raise UserError(
            "--affinity-header",
            "is only supported for pipelines that generate text",
            given=options.affinity_header,
            remedy="Leave it out",
        )
    lock = read_manifest(repository, pipeline)
    check_alone(repository, pipeline)
    _check_shared(lock)
    _check_promise(lock)
    _check_sampling(lock, options)
    measured = measured_of(lock, options, reports)
    sizes = sizes_of(lock, options, measured, repository)
    version = build_id(repository, pipeline)[:VERSION_DIGITS]
    candidate = in_place = None
    if options.mirrored is not None:
        candidate = _other_build(options.mirrored.repository, pipeline, version, "--mirror")
    if options.baseline is not None:
        in_place = _other_build(options.baseline, pipeline, version, "--baseline")
    return Basis(repository, lock, options, measured, sizes, version, candidate, in_place)


def _other_build(repository: Path, pipeline: str, version: str, option: str) -> str:
    """The start of the hash of the build that an option names."""
    found = build_id(repository, pipeline)[:VERSION_DIGITS]
    if found == version:
        raise UserError(
            option,
            "must name another build than the one that is deployed",
            given=f"{repository}, which holds {found}, too",
        )
    return found


def _check_shared(lock: BuildManifest) -> None:
    """A pipeline needs a core of its own: its capacity was measured so."""
    name = lock.spec.name
    if lock.spec.core.shared_from is not None:
        raise UserError(
            "core.shared_from",
            "must not be set for a pipeline that is deployed",
            given=f"{name} uses the core of {lock.spec.core.shared_from}",
            remedy=f"Run `triptych build {name} --set core.shared_from=null --repository FOLDER`",
        )


def check_alone(repository: Path, name: str) -> None:
    """One Deployment serves one pipeline.

    Raises:
        UserError: the repository holds others, too.
    """
    others = [pipeline.name for pipeline in find_pipelines(repository) if pipeline.name != name]
    if others:
        raise UserError(
            str(repository),
            "must hold only the pipeline that is deployed: each scales by its own load",
            given=f"{name} and {', '.join(others)}",
            remedy=f"Run `triptych build {name} --repository FOLDER` and name that folder here",
        )


def _check_promise(lock: BuildManifest) -> None:
    if not lock.spec.serving.slo.limits_us:
        raise UserError(
            "serving.slo",
            "must promise a latency: capacity, scaling and alerts follow from it",
            given=lock.spec.serving.slo,
            remedy=f"Set for example serving.slo.p99_ms: 50, and run `triptych build "
            f"{lock.spec.name}`",
        )


def _check_sampling(lock: BuildManifest, options: DeployOptions) -> None:
    if lock.spec.serving.sample is not None:
        return
    for option, given in (
        ("--monitor-image", options.monitor_image),
        ("--mirror", options.mirrored),
    ):
        if given is not None:
            raise UserError(
                option,
                "must come with a build that samples",
                given="no serving.sample",
                remedy="Write `sample: {rate: 0.001}` below serving, and run `triptych build "
                f"{lock.spec.name}`",
            )
