"""The targets of `triptych deploy`: each from a built pipeline and its measurements to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triptych.base.errors import UserError
from triptych.building.generation.lock import built_spec
from triptych.deploy.basis import Deployed, Manifests, basis_of
from triptych.deploy.compose import compose_manifests
from triptych.deploy.generation import generation_basis
from triptych.deploy.kserve import kserve_manifests
from triptych.deploy.kubernetes import kubernetes_manifests
from triptych.deploy.options import DeployOptions, Target

WRITERS: Mapping[Target, Callable[[Deployed], Manifests]] = {
    "kubernetes": kubernetes_manifests,
    "kserve": kserve_manifests,
    "compose": compose_manifests,
}


def manifests_of(
    repository: Path, pipeline: str, options: DeployOptions, reports: Path
) -> Manifests:
    """What a target wants of a built pipeline.

    Args:
        repository: holds the pipeline, and no other.
        pipeline: its name.
        options: the user's.
        reports: the pipeline's folder of reports, with the result of `bench`; one that generates
            text takes nothing from there.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    spec = built_spec(repository, pipeline)
    if spec is not None:
        return WRITERS[options.target](generation_basis(repository, spec, options))
    if options.affinity_header is not None:
        raise UserError(
            "--affinity-header",
            "must be given for a pipeline that generates text",
            remedy="Leave it out",
        )
    return WRITERS[options.target](basis_of(repository, pipeline, options, reports))
