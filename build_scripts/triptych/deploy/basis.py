"""What every target starts from: the lock, the figures of one replica and the numbers they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.container.locks import find_pipelines
from triptych.deploy.measured import Measured, measured_of
from triptych.deploy.metrics import Metrics
from triptych.deploy.options import Options, check
from triptych.deploy.sizing import Sizes, sizes_of
from triptych.errors import UserError
from triptych.fleet.reasons import reasons_of
from triptych.repository.lock import Lock, build_id, read_lock

_VERSION_DIGITS = 12


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
    lock: Lock
    options: Options
    measured: Measured
    sizes: Sizes
    version: str
    candidate: str | None = None
    in_place: str | None = None

    @property
    def metrics(self) -> Metrics:
        """Queries on the fleet."""
        options = self.options
        workload = f"{options.name}-predictor" if options.target == "kserve" else options.name
        return Metrics(self.lock.spec.name, options.namespace, workload, options.envoy)


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


def basis_of(repository: Path, pipeline: str, options: Options, reports: Path) -> Basis:
    """Everything that was built and measured of a pipeline, checked.

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
    _check_sampling(lock, options)
    measured = measured_of(lock, options, reports)
    sizes = sizes_of(lock, options, measured, repository)
    version = build_id(repository, pipeline)[:_VERSION_DIGITS]
    candidate = in_place = None
    if options.mirrored is not None:
        candidate = _other_build(options.mirrored.repository, pipeline, version, "--mirror")
    if options.replaces is not None:
        in_place = _other_build(options.replaces, pipeline, version, "--replaces")
    return Basis(repository, lock, options, measured, sizes, version, candidate, in_place)


def _other_build(repository: Path, pipeline: str, version: str, option: str) -> str:
    """The start of the hash of the build that an option names."""
    found = build_id(repository, pipeline)[:_VERSION_DIGITS]
    if found == version:
        raise UserError(
            option,
            "must name another build than the one that is deployed",
            given=f"{repository}, which holds {found}, too",
        )
    return found


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


def _check_sampling(lock: Lock, options: Options) -> None:
    if lock.spec.serving.sample is not None:
        return
    for option, given in (("--watch-image", options.watch_image), ("--mirror", options.mirrored)):
        if given is not None:
            raise UserError(
                option,
                "must come with a build that samples",
                given="no serving.sample",
                remedy="Write `sample: {rate: 0.001}` below serving, and run `triptych build "
                f"{lock.spec.name}`",
            )
