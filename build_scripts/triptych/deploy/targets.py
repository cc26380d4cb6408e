"""The targets of `triptych deploy`: each from a built pipeline and its measurements to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.deploy.basis import Deployed, Manifests, basis_of
from triptych.deploy.checks.pods import Known, known_encoder, known_generating
from triptych.deploy.compose import compose_manifests
from triptych.deploy.generation import generation_basis
from triptych.deploy.kserve import kserve_manifests
from triptych.deploy.kubernetes import kubernetes_manifests
from triptych.deploy.options import DeployOptions, Target
from triptych.repository.manifest import kind_of_build
from triptych.spec.kind import Kind

WRITERS: Mapping[Target, Callable[[Deployed], Manifests]] = {
    "kubernetes": kubernetes_manifests,
    "kserve": kserve_manifests,
    "compose": compose_manifests,
}


@dataclass(frozen=True)
class DeployedKind:
    """How one kind is deployed.

    Attributes:
        context: Reads what was built and measured of a pipeline; arguments as `manifests_of`.
        known: Reads the facts that manifests are checked with; arguments as `known_of`.
    """

    context: Callable[[Path, str, DeployOptions, Path], Deployed]
    known: Callable[[Path, str, Path], Known]


KINDS: Mapping[Kind, DeployedKind] = {
    Kind.ENCODER: DeployedKind(basis_of, known_encoder),
    Kind.TEXT_GENERATION: DeployedKind(generation_basis, known_generating),
    Kind.TEXT2TEXT: DeployedKind(generation_basis, known_generating),
}
"""The only place in this package that chooses by `Kind`."""


def manifests_of(
    repository: Path, pipeline: str, options: DeployOptions, reports: Path
) -> Manifests:
    """Return the manifests of a built pipeline for one target.

    Args:
        repository: Repository with this pipeline and no other.
        pipeline: Name of the pipeline.
        options: Options of the user.
        reports: Folder of the pipeline's reports, with the result of `bench`; not read for a
            pipeline that generates text.

    Raises:
        UserError: The pipeline cannot be deployed so; the message says what to do.
    """
    kind = KINDS[kind_of_build(repository, pipeline)]
    return WRITERS[options.target](kind.context(repository, pipeline, options, reports))


def known_of(repository: Path, pipeline: str, reports: Path) -> Known:
    """Return the facts about a built pipeline that manifests are checked with.

    Raises:
        UserError: The pipeline is not built, or the result of its `bench` cannot be read.
    """
    return KINDS[kind_of_build(repository, pipeline)].known(repository, pipeline, reports)
