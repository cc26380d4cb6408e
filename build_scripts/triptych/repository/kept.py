"""Builds that were replaced, kept beside the repository: ``.<repository>.history/PIPELINE/BUILD``.

A build is named by the SHA-256 of its lock (`build_id`). Its files are hard links to those of the
repository, which are never written in place: a kept build takes room only for what later builds
changed. They are not inside the repository, where Triton would take them for models.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from triptych.cache import sha256_of
from triptych.errors import UserError
from triptych.files import scratch_folder
from triptych.repository.lock import FIGURES_FILE, LOCK_FILE, build_id, find_lock, read_lock

KEPT = 5
"""Replaced builds of each pipeline, unless `prune` leaves fewer."""

_REPLACED_FILE = "replaced.json"


@dataclass(frozen=True)
class KeptBuild:
    """A build that can be put back.

    Attributes:
        build: SHA-256 of its lock.
        pipeline: its name.
        folder: of its models, as a repository has them.
        replaced_at: UTC, ISO 8601.
    """

    build: str
    pipeline: str
    folder: Path
    replaced_at: str

    def files(self) -> dict[str, Path]:
        """All files as they go into a repository, each checked against the lock.

        Raises:
            UserError: one is missing or not as it was built, or the lock is of another release.
        """
        lock_path = f"{self.pipeline}/{LOCK_FILE}"
        if build_id(self.folder, self.pipeline) != self.build:
            raise self._damaged(lock_path)
        lock = read_lock(self.folder, self.pipeline)
        for path, digest in lock.files.items():
            file = self.folder / path
            if not file.is_file() or sha256_of(file) != digest:
                raise self._damaged(path)
        names = [*lock.files, lock_path]
        if (self.folder / self.pipeline / FIGURES_FILE).is_file():
            names.append(f"{self.pipeline}/{FIGURES_FILE}")
        return {name: self.folder / name for name in names}

    def _damaged(self, path: str) -> UserError:
        return UserError(
            f"{self.folder}/{path}",
            "must be as it was kept",
            given="missing" if not (self.folder / path).is_file() else "other bytes",
            remedy=f"Name another build (`triptych history {self.pipeline}`), or build it again",
        )


def history_folder(repository: Path) -> Path:
    """Where replaced builds are kept; need not exist."""
    return repository.parent / f".{repository.name}.history"


def keep_build(repository: Path, pipeline: str) -> None:
    """Keep the build in place, which is about to be replaced; the oldest go.

    Not kept is what cannot serve: a damaged build, or one whose engine was never built.

    Raises:
        OSError: there is no room, or no leave to write.
    """
    lock = find_lock(repository, pipeline)
    if lock is None or (lock.plan.engine is not None and lock.engine is None):
        return
    build = build_id(repository, pipeline)
    names = [*lock.files, f"{pipeline}/{LOCK_FILE}"]
    if not all((repository / name).is_file() for name in names):
        return
    names += [f"{pipeline}/{FIGURES_FILE}"] * (repository / pipeline / FIGURES_FILE).is_file()
    home = history_folder(repository)
    target = home / pipeline / build
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".new-", home) as scratch:
        fresh = scratch / build
        for name in names:
            link(repository / name, fresh / name)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat()
        (fresh / _REPLACED_FILE).write_text(json.dumps({"replaced_at": now}), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    prune(repository, pipeline, KEPT - 1)  # besides this one, which is still in place


def kept_builds(repository: Path, pipeline: str) -> list[KeptBuild]:
    """The builds that can be put back, last replaced first; not the one in place."""
    found = []
    for file in (history_folder(repository) / pipeline).glob(f"*/{_REPLACED_FILE}"):
        try:
            replaced_at = str(json.loads(file.read_bytes())["replaced_at"])
        except (OSError, ValueError, KeyError, TypeError):
            replaced_at = ""
        found.append(KeptBuild(file.parent.name, pipeline, file.parent, replaced_at))
    in_place = build_id(repository, pipeline)
    others = [kept for kept in found if kept.build != in_place]
    return sorted(others, key=lambda kept: kept.replaced_at, reverse=True)


def prune(repository: Path, pipeline: str, keep: int) -> list[KeptBuild]:
    """Remove all but the `keep` builds of a pipeline that were replaced last; those removed."""
    gone = kept_builds(repository, pipeline)[keep:]
    for kept in gone:
        shutil.rmtree(kept.folder, ignore_errors=True)
    return gone


def kept_bytes(repository: Path, pipeline: str) -> int:
    """What the kept builds take on the disk, beyond what the repository takes anyway."""
    in_use = {file.stat().st_ino for file in repository.rglob("*") if file.is_file()}
    own = {}
    for kept in kept_builds(repository, pipeline):
        for file in kept.folder.rglob("*"):
            if file.is_file() and (status := file.stat()).st_ino not in in_use:
                own[status.st_ino] = status.st_size
    return sum(own.values())


def link(source: Path, target: Path) -> None:
    """Give a file another name; where the file system or its owner does not let, copy it.

    Raises:
        OSError: neither can be.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
