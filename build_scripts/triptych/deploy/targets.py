"""The targets of `triptych deploy`: each from a built pipeline and its measurements to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triptych.deploy.basis import Manifests
from triptych.deploy.compose import compose_manifests
from triptych.deploy.kserve import kserve_manifests
from triptych.deploy.kubernetes import kubernetes_manifests
from triptych.deploy.options import Options, Target

WRITERS: Mapping[Target, Callable[[Path, str, Options, Path], Manifests]] = {
    "kubernetes": kubernetes_manifests,
    "kserve": kserve_manifests,
    "compose": compose_manifests,
}


def manifests_of(repository: Path, pipeline: str, options: Options, reports: Path) -> Manifests:
    """What a target wants of a built pipeline, from what `basis_of` takes.

    Raises:
        UserError: something is missing or cannot work; says what and what to do.
    """
    return WRITERS[options.target](repository, pipeline, options, reports)
