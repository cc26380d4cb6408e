"""The option ``--mirror`` of `serve` and `deploy`: a candidate and its share of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.container.manifests import find_pipelines
from triptych.repository.manifest import EncoderManifest, find_manifest, read_manifest


class MirrorOption(NamedTuple):
    """Repository of a candidate, and its share of the requests, above 0 and at most 1."""

    repository: Path
    share: float


def parse_mirror(text: str) -> MirrorOption:
    """Return the repository and the share of an option ``REPOSITORY:SHARE``.

    Raises:
        UserError: The form is wrong, or a pipeline of the repository has no `serving.sample`.
    """
    folder, _, share_text = text.rpartition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not folder or not 0 < share <= 1:
        raise UserError(
            "--mirror",
            "must be a repository and a share of the requests, above 0 and at most 1",
            given=text,
            remedy="Write for example --mirror candidate:0.05",
        )
    repository = Path(folder)
    names = [pipeline.name for pipeline in find_pipelines(repository)]
    for name in names:
        if read_manifest(repository, name, EncoderManifest).spec.serving.sample is None:
            raise UserError(
                "--mirror",
                "requires pipelines with serving.sample, because answers to mirrored requests are "
                "only kept as samples",
                given=f"{name} without serving.sample",
                remedy=f"Run `triptych build {name} --set serving.sample.rate=1 --repository "
                f"{folder}`",
            )
    if not names:
        raise UserError(
            "--mirror",
            "must be a repository with a pipeline",
            given=folder,
            remedy="Build the candidate with `triptych build NAME --repository CANDIDATE_FOLDER`",
        )
    return MirrorOption(repository, share)


def check_same_pipelines(repository: Path, candidate: Path) -> None:
    """Check that every pipeline of a candidate is also served; raise `UserError` otherwise."""
    for pipeline in find_pipelines(candidate):
        if find_manifest(repository, pipeline.name, EncoderManifest) is None:
            raise UserError(
                "--mirror",
                "must only have pipelines that are also served",
                given=f"{pipeline.name}, which is not in {repository}",
                remedy=f"Remove {pipeline.name} from the candidate, or build it in both",
            )
