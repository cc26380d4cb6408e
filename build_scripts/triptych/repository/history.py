"""A kept build put back into the repository, with the pipelines that share its core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.manifest import MANIFEST_FILE, build_id
from triptych.repository.render import Content
from triptych.repository.store import (
    MIN_DIGITS,
    BuildRecord,
    KeptBuild,
    choose_build,
    kept_builds,
    read_build,
    write_models,
)


@dataclass(frozen=True)
class RollbackResult:
    """What a rollback did.

    Attributes:
        builds: pipeline to the build that is in place again: more than one where they share a core.
        replaced: pipeline to the build that was in place; empty where there was none.
        changed: models written or removed.
    """

    builds: Mapping[str, str]
    replaced: Mapping[str, str]
    changed: tuple[str, ...]


def rollback(repository: Path, pipeline: str, build: str | None) -> RollbackResult:
    """Put a kept build in place again, at once and whole; the one in place is kept in turn.

    Pipelines that share its core and do not fit it as they are go back with it.

    Args:
        repository: folder of the models.
        pipeline: its name.
        build: the first digits of its id; None takes what was replaced last.

    Raises:
        UserError: there is no such build, it is damaged, or shared cores would not fit.
    """
    chosen = _choose(kept_builds(repository, pipeline), repository, pipeline, build)
    files: dict[str, Content] = dict(chosen.files())
    record = chosen.record()
    _check_owner(repository, pipeline, record)
    group = {pipeline: chosen}
    for name, sharer in _sharers(repository, pipeline):
        if not _fits(sharer, record):
            group[name] = _fitting(repository, name, pipeline, record)
            files |= group[name].files()
    before = {path for name in group for path in _files_in_place(repository, name)}
    models = {path.partition("/")[0] for path in files}
    retired = {path.partition("/")[0] for path in before} - models
    replaced = {name: build_id(repository, name) for name in group}
    changed = write_models(repository, files, retired=sorted(retired), linked=True)
    builds = {name: kept.build for name, kept in group.items()}
    return RollbackResult(builds, replaced, tuple(changed))


def _choose(kept: list[KeptBuild], repository: Path, pipeline: str, build: str | None) -> KeptBuild:
    if build is None:
        if kept:
            return kept[0]
        raise UserError(
            pipeline,
            f"must have a build to go back to, kept beside {repository}",
            given="none: nothing has been replaced here",
            remedy=f"Builds are kept from now on; `triptych build {pipeline}` makes one",
        )
    if found := choose_build(kept, build):
        return found
    in_place = build_id(repository, pipeline)
    if in_place.startswith(build or "-"):
        raise UserError(
            "BUILD", "must be another than the one in place", given=build, remedy="Nothing to do"
        )
    known = ", ".join(one.build[:12] for one in kept) or "none"
    raise UserError(
        "BUILD",
        f"must be {MIN_DIGITS} or more of the first digits of one build that is kept",
        given=build,
        remedy=f"Kept are: {known} (`triptych history {pipeline}`)",
    )


def _check_owner(repository: Path, pipeline: str, build: BuildRecord) -> None:
    """The core that a build shares is still there.

    Raises:
        UserError: it is not.
    """
    owner = build.share
    if not owner:
        return
    theirs = read_build(repository, owner)
    if theirs is None or not _fits(build, theirs):
        raise UserError(
            pipeline,
            f"must find the core of {owner} that it was built with",
            given=f"{owner} has another core now" if theirs else f"{owner} is not built",
            remedy=f"Put {owner} back: `triptych history {owner}`; it takes {pipeline} along",
        )


def _sharers(repository: Path, owner: str) -> list[tuple[str, BuildRecord]]:
    builds = {
        path.parent.name: read_build(repository, path.parent.name)
        for path in sorted(repository.glob(f"*/{MANIFEST_FILE}"))
    }
    return [(name, build) for name, build in builds.items() if build and build.share == owner]


def _fits(sharer: BuildRecord, owner: BuildRecord) -> bool:
    return (
        not owner.share
        and sharer.core_key == owner.core_key
        and sharer.max_batch_size <= owner.max_batch_size
    )


def _fitting(repository: Path, name: str, owner: str, core: BuildRecord) -> KeptBuild:
    """The build of the sharer `name` that was replaced last and fits the core.

    Raises:
        UserError: there is none.
    """
    for kept in kept_builds(repository, name):
        build = read_build(kept.folder, name)
        if build is not None and build.share == owner and _fits(build, core):
            return kept
    raise UserError(
        owner,
        "must keep the core that another pipeline shares",
        given=f"{name} uses it, and no kept build of {name} fits that core",
        remedy=f"Take core.shared_from out of {name} and build it first",
    )


def _files_in_place(repository: Path, pipeline: str) -> list[str]:
    build = read_build(repository, pipeline)
    return [] if build is None else list(build.files)
