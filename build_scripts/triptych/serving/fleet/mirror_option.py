"""Which build gets copies of requests beside a fleet, and how many, as a user names it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.container.manifests import find_pipelines
from triptych.repository.manifest import find_manifest, read_manifest

FOLDER = ".candidate"
"""In the folder of the samples: what a candidate answered must not push out what the fleet did."""


class MirrorOption(NamedTuple):
    """A candidate, and the share of the requests that it gets, above 0 and up to 1."""

    repository: Path
    share: float


def parse_mirror(text: str) -> MirrorOption:
    """``REPOSITORY:SHARE``.

    Raises:
        UserError: another form, or what the repository holds samples nothing.
    """
    folder, _, share_text = text.rpartition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not folder or not 0 < share <= 1:
        raise UserError(
            "--mirror",
            "must name a repository and a share of the requests, above 0 and up to 1",
            given=text,
            remedy="As in --mirror candidate:0.05",
        )
    repository = Path(folder)
    names = [pipeline.name for pipeline in find_pipelines(repository)]
    for name in names:
        if read_manifest(repository, name).spec.serving.sample is None:
            raise UserError(
                "--mirror",
                "must name builds that sample: answers to mirrored requests are thrown away, so "
                "nothing else would be left of them",
                given=f"{name} without serving.sample",
                remedy=f"Run `triptych build {name} --set serving.sample.rate=1 --repository "
                f"{folder}`",
            )
    if not names:
        raise UserError("--mirror", "must name a repository with a pipeline", given=folder)
    return MirrorOption(repository, share)


def check_same_pipelines(repository: Path, candidate: Path) -> None:
    """Raises a `UserError` where a candidate holds a pipeline that is not served beside it."""
    for pipeline in find_pipelines(candidate):
        if find_manifest(repository, pipeline.name) is None:
            raise UserError(
                "--mirror",
                "must name builds of pipelines that are served",
                given=f"{pipeline.name}, which {repository} does not hold",
            )
