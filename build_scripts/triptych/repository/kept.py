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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.files import scratch_folder
from triptych.repository.lock import FIGURES_FILE, LOCK_FILE, build_id

KEPT = 5
"""Replaced builds of each pipeline, unless `prune` leaves fewer."""

FEWEST_DIGITS = 4
"""That name a build."""

_REPLACED_FILE = "replaced.json"


@dataclass(frozen=True)
class BuildRecord:
    """What a lock of any kind and release says that matters here; see `Lock` and `GateResult`.

    Attributes:
        built_at: UTC, ISO 8601.
        files: path relative to the repository -> SHA-256 in hex.
        share: the pipeline whose core it uses; empty where it has its own.
        core_key: empty where the lock has none.
        max_batch_size: 0 where the lock has none.
        lacks_engine: whether it cannot serve before `triptych engine`.
        gate: as plain data; empty where the lock has none.
    """

    built_at: str
    files: Mapping[str, str]
    share: str
    core_key: str
    max_batch_size: int
    lacks_engine: bool
    gate: Mapping[str, Any]


def read_build(folder: Path, pipeline: str) -> BuildRecord | None:
    """The record of the build in a folder of models; None where there is none to be read."""
    try:
        lock = json.loads((folder / pipeline / LOCK_FILE).read_bytes())
        core = lock["spec"]["core"]
        return BuildRecord(
            built_at=str(lock["built_at"]),
            files={str(path): str(digest) for path, digest in lock["files"].items()},
            share=core.get("share") or "",
            core_key=lock.get("core_key", ""),
            max_batch_size=core.get("max_batch_size", 0),
            lacks_engine=lock["plan"].get("engine") is not None and lock.get("engine") is None,
            gate=lock.get("gate") or {},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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
            UserError: one is missing or not as it was built.
        """
        lock_path = f"{self.pipeline}/{LOCK_FILE}"
        if build_id(self.folder, self.pipeline) != self.build:
            raise self._damaged(lock_path)
        files = self.record().files
        for path, digest in files.items():
            file = self.folder / path
            if not file.is_file() or sha256_of(file) != digest:
                raise self._damaged(path)
        names = [*files, lock_path]
        if (self.folder / self.pipeline / FIGURES_FILE).is_file():
            names.append(f"{self.pipeline}/{FIGURES_FILE}")
        return {name: self.folder / name for name in names}

    def lay_out(self, folder: Path) -> None:
        """Link all files into a folder, which is then a repository of this build alone.

        Raises:
            UserError: the build is damaged, or uses the core of another pipeline.
        """
        if owner := self.record().share:
            raise UserError(
                self.build[:12],
                "must have a core of its own to be served alone",
                given=f"that of {owner}",
                remedy=f"Name a build of {owner}",
            )
        for name, file in self.files().items():
            link(file, folder / name)

    def record(self) -> BuildRecord:
        """What its lock says.

        Raises:
            UserError: it is damaged.
        """
        record = read_build(self.folder, self.pipeline)
        if record is None:
            raise self._damaged(f"{self.pipeline}/{LOCK_FILE}")
        return record

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
    record = read_build(repository, pipeline)
    if record is None or record.lacks_engine:
        return
    build = build_id(repository, pipeline)
    names = [*record.files, f"{pipeline}/{LOCK_FILE}"]
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


def choose_build(kept: list[KeptBuild], build: str) -> KeptBuild | None:
    """The one whose id begins with these digits; None where there is none, or more than one."""
    fitting = [one for one in kept if one.build.startswith(build)]
    return fitting[0] if len(fitting) == 1 and len(build) >= FEWEST_DIGITS else None


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
