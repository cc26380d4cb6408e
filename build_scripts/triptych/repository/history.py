"""Restore a stored build into the repository, with the pipelines that share its core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.manifest import MANIFEST_FILE, build_id
from triptych.repository.render import Content
from triptych.repository.store import (
    MIN_ID_DIGITS,
    BuildRecord,
    HistoryBuild,
    find_build,
    list_history,
    read_build,
    write_models,
)


@dataclass(frozen=True)
class RollbackResult:
    """Result of a rollback."""

    # Restored build of each pipeline; more than one if they share a core or a vector space.
    builds: Mapping[str, str]
    # Build that was active before, by pipeline; empty if there was none.
    replaced: Mapping[str, str]
    changed: tuple[str, ...]  # Models that were written or removed


def rollback(repository: Path, pipeline: str, build: str | None) -> RollbackResult:
    """Restore a stored build in one step; the active build is stored in turn.

    Pipelines that share its core or its vector space and do not match are restored with it.

    Args:
        repository: Folder of the models.
        pipeline: Name of the pipeline.
        build: Prefix of the build's ID; None for the build that was replaced last.

    Raises:
        UserError: There is no such build, it is damaged, or shared cores would not match.
    """
    chosen = _choose(list_history(repository, pipeline), repository, pipeline, build)
    files: dict[str, Content] = {}
    record = chosen.record()
    _check_owner(repository, pipeline, record)
    group = {pipeline: chosen}
    for name, sharer in _builds(repository):
        if sharer.share == pipeline and not _fits(sharer, record):
            refused = UserError(
                pipeline,
                "has a core that another pipeline shares",
                given=f"no stored build of {name} matches the restored core",
                remedy=f"Remove core.shared_from from {name} and build it first",
            )
            group[name] = _find_fitting(
                repository, name, lambda b: b.share == pipeline and _fits(b, record), refused
            )
    for name, pair in _builds(repository):
        is_pair = name == record.pair_with or pair.pair_with == pipeline
        if is_pair and pair.space != record.space:
            refused = UserError(
                pipeline,
                f"must have the vector space of its pair {name}",
                given=f"{record.space}, and no stored build of {name} has it",
                remedy=f"Set model.source of both, and run `triptych build {pipeline} {name}`",
            )
            group[name] = _find_fitting(
                repository, name, lambda b: b.space == record.space, refused
            )
    for stored in group.values():
        files |= stored.files()
    active = [read_build(repository, name) for name in group]
    before = {path for each in active if each is not None for path in each.files}
    models = {path.partition("/")[0] for path in files}
    retired = {path.partition("/")[0] for path in before} - models
    replaced = {name: build_id(repository, name) for name in group}
    changed = write_models(repository, files, retired=sorted(retired), keeps_links=True)
    builds = {name: stored.build for name, stored in group.items()}
    return RollbackResult(builds, replaced, tuple(changed))


def _choose(
    history: list[HistoryBuild], repository: Path, pipeline: str, build: str | None
) -> HistoryBuild:
    if build is None:
        if history:
            return history[0]
        raise UserError(
            pipeline,
            f"has no earlier build beside {repository}",
            given="no build has been replaced",
            remedy=f"Run `triptych build {pipeline}`; replaced builds are stored from then on",
        )
    if found := find_build(history, build):
        return found
    active = build_id(repository, pipeline)
    if active.startswith(build or "-"):
        raise UserError(
            "BUILD", "is already active", given=build, remedy="Name another build, or do nothing"
        )
    known = ", ".join(stored.build[:12] for stored in history) or "none"
    raise UserError(
        "BUILD",
        f"must be a prefix of one stored build's ID, with at least {MIN_ID_DIGITS} digits",
        given=build,
        remedy=f"Stored builds: {known} (`triptych history {pipeline}`)",
    )


def _check_owner(repository: Path, pipeline: str, build: BuildRecord) -> None:
    """Check that the core a build shares is still in the repository.

    Raises:
        UserError: The core is missing or has changed.
    """
    owner = build.share
    if not owner:
        return
    current = read_build(repository, owner)
    if current is None or not _fits(build, current):
        raise UserError(
            pipeline,
            f"was built with a core of {owner} that is not in the repository",
            given=f"{owner} has another core now" if current else f"{owner} is not built",
            remedy=f"Restore {owner} with {pipeline}: see `triptych history {owner}`",
        )


def _builds(repository: Path) -> Iterator[tuple[str, BuildRecord]]:
    """Yield the active builds by name."""
    for path in sorted(repository.glob(f"*/{MANIFEST_FILE}")):
        if (build := read_build(repository, path.parent.name)) is not None:
            yield path.parent.name, build


def _fits(sharer: BuildRecord, owner: BuildRecord) -> bool:
    return all(rows <= owner.core_rows.get(key, -1) for key, rows in sharer.shared_rows.items())


def _find_fitting(
    repository: Path,
    name: str,
    fits: Callable[[BuildRecord], bool],
    refused: UserError,
) -> HistoryBuild:
    """Return the last replaced build of `name` that fits; raise `refused` if there is none."""
    for stored in list_history(repository, name):
        build = read_build(stored.folder, name)
        if build is not None and fits(build):
            return stored
    raise refused
