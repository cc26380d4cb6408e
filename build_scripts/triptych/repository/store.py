"""The one writer of a model repository: staged beside it, swapped in by rename, never half-written.

Staging lies in ``.<repository>.staging`` next to the repository (Triton reads every folder inside
it). A build killed while it stages leaves the repository untouched; one killed between the models
that it swaps is completed by the next command, from the ``commit`` mark in the staging folder. Each
model is swapped in one step: whoever reads meanwhile finds an old model or a new one.

Builds that were replaced, kept beside the repository: ``.<repository>.history/PIPELINE/BUILD``.

A build is named by the SHA-256 of its lock (`build_id`). Its files are hard links to those of the
repository, which are never written in place: a kept build takes room only for what later builds
changed. They are not inside the repository, where Triton would take them for models.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.files import clear_scratch, scratch_folder, sync, sync_folder, told_to_user
from triptych.container.manifests import ManifestError, read_manifest_file
from triptych.repository.manifest import FIGURES_FILE, MANIFEST_FILE, build_id
from triptych.repository.render import Content

KEPT = 5
"""Replaced builds of each pipeline, unless `prune` leaves fewer."""

MIN_DIGITS = 4
"""That name a build."""

_REPLACED_FILE = "replaced.json"


@dataclass(frozen=True)
class BuildRecord:
    """Fields of a build manifest of any kind and schema; see `BuildManifest` and `GateResult`.

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
        lock = read_manifest_file(folder / pipeline / MANIFEST_FILE)
        core = lock["spec"]["core"]
        return BuildRecord(
            built_at=str(lock["built_at"]),
            files={str(path): str(digest) for path, digest in lock["files"].items()},
            share=core.get("shared_from") or core.get("share") or "",
            core_key=lock.get("core_key", ""),
            max_batch_size=core.get("max_batch_size", 0),
            lacks_engine=lock["plan"].get("engine") is not None and lock.get("engine") is None,
            gate=lock.get("gate") or {},
        )
    except (ManifestError, ValueError, KeyError, TypeError, AttributeError):
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
        lock_path = f"{self.pipeline}/{MANIFEST_FILE}"
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
            raise self._damaged(f"{self.pipeline}/{MANIFEST_FILE}")
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
    names = [*record.files, f"{pipeline}/{MANIFEST_FILE}"]
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
    return fitting[0] if len(fitting) == 1 and len(build) >= MIN_DIGITS else None


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


COMMIT_MARK = "commit"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
Work = Literal["auto", "tune", "serve", "shadow"]
"""What has repositories of its own beside the one that is asked for."""
MIN_LINK_BYTES = 64 << 10
"""A file of this size or more is not written twice: models with equal ones share its bytes."""


def write_models(
    repository: Path,
    files: Mapping[str, Content],
    *,
    retired: Sequence[str] = (),
    linked: bool = False,
) -> list[str]:
    """Write `files` (``<model>/...`` -> content); models whose files are equal are left untouched.

    A large file that another model already has is linked to, not copied. Builds that are replaced
    are kept, see `kept`.

    Args:
        repository: folder of the models.
        files: path relative to the repository -> content.
        retired: models to remove.
        linked: files on the disk are linked to, for nobody will write them in place.

    Returns:
        Names of the models that changed or went, sorted.

    Raises:
        UserError: the repository cannot be written to, has no room, or another build holds it.
    """
    models: dict[str, dict[str, Content]] = {}
    for path, content in files.items():
        model, _, inner = path.partition("/")
        models.setdefault(model, {})[inner] = content
    with told_to_user(repository), locked(repository):
        changed = {m: c for m, c in models.items() if not _holds(repository / m, c)}
        gone = [model for model in retired if (repository / model).is_dir()]
        if changed or gone:
            staging = _staging(repository)
            try:
                for model, contents in changed.items():
                    for inner, content in contents.items():
                        target = staging / "new" / model / inner
                        if linked and isinstance(content, Path):
                            link(content, target)
                        else:
                            _stage(target, content, repository)
                for model in gone:
                    (staging / "gone" / model).mkdir(parents=True)
                sync_folder(staging)
                for model in (*changed, *gone):  # last: it may let go of what was just linked to
                    keep_build(repository, model)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)  # else a full disk would stay full
                raise
            _commit(repository, staging)
    return sorted([*changed, *gone])


def recover(repository: Path) -> None:
    """Complete or clear what a killed build left, so that a server finds whole models.

    Raises:
        UserError: the repository cannot be written to, or a build is running.
    """
    _clear_work(repository)
    if _staging(repository).is_dir():
        with told_to_user(repository), locked(repository):
            pass


@contextlib.contextmanager
def sibling_work_dir(repository: Path, work: Work) -> Iterator[Path]:
    """A folder beside the repository for others; gone at the end, if killed with the next command.

    Raises:
        OSError: there can be none.
    """
    home = repository.resolve().parent
    home.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{work}-", home) as folder:
        yield folder


def is_being_written(repository: Path) -> bool:
    """Whether models are about to change, or a killed build has left that to be completed."""
    return _staging(repository).is_dir()


def hash_files(files: Mapping[str, Content], known: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 in hex of each file's content; those in `known` are taken as they are."""
    return {
        path: known[path]
        if path in known
        else sha256_of(content)
        if isinstance(content, Path)
        else hashlib.sha256(content).hexdigest()
        for path, content in files.items()
    }


@contextlib.contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Hold the repository for one writer; first complete or clear what a killed one left."""
    repository.mkdir(parents=True, exist_ok=True)
    with (repository.parent / f".{repository.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                str(repository),
                "must not be written by two builds at a time",
                given="another build holds it",
                remedy="Wait for it to end",
            ) from error
        staging = _staging(repository)
        if (staging / COMMIT_MARK).exists():
            _swap(repository, staging)
        _clear(staging)
        _clear_work(repository)
        yield


def _holds(model: Path, contents: Mapping[str, Content]) -> bool:
    """Whether the folder `model` holds exactly `contents` (relative path -> content).

    Byte code does not count: a Python step that was served has left it there. Nor do figures of
    `bench`: they stay until anything else changes, and then go with the folder.
    """
    there = {
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    } - {FIGURES_FILE}
    if there != set(contents):
        return False
    return all(
        filecmp.cmp(model / inner, content, shallow=False)
        if isinstance(content, Path)
        else (model / inner).read_bytes() == content
        for inner, content in contents.items()
    )


def _staging(repository: Path) -> Path:
    return repository.parent / f".{repository.name}.staging"


def _stage(target: Path, content: Content, repository: Path) -> None:
    """Write one staged file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path) and (twin := _find_identical(content, repository)):
        os.link(twin, target)
        return
    with target.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)


def _find_identical(content: Path, repository: Path) -> Path | None:
    """A file of the repository with the same name and bytes as `content`, if it is large."""
    size = content.stat().st_size
    if size < MIN_LINK_BYTES:
        return None
    for path in sorted(repository.glob(f"*/*/{content.name}")):
        if path.stat().st_size == size and filecmp.cmp(path, content, shallow=False):
            return path
    return None


def _commit(repository: Path, staging: Path) -> None:
    """Let what is staged count, from the mark on; where not even the first step works, nothing.

    Raises:
        OSError: the repository cannot be written to.
    """
    staged = _inodes(staging / "new")
    mark = staging / COMMIT_MARK
    mark.write_text(json.dumps(staged), encoding="utf-8")
    sync(mark)
    sync(staging)
    try:
        _swap(repository, staging)
    except OSError:
        if _inodes(staging / "new") == staged and not _names(staging / "old"):
            _clear(staging)
        raise
    _clear(staging)


def _swap(repository: Path, staging: Path) -> None:
    """Move each staged model into place. Repeatable: it goes on where a killed one stopped.

    A model that has an old one trades places with it: its folder then holds the inode that the
    mark tells, and staging the old one.
    """
    old = staging / "old"
    old.mkdir(exist_ok=True)
    try:
        staged = json.loads((staging / COMMIT_MARK).read_bytes())
    except ValueError:
        staged = {}  # killed while it wrote the mark: nothing has moved yet
    for name in _names(staging / "new"):
        fresh, target = staging / "new" / name, repository / name
        if not os.path.lexists(target):
            fresh.rename(target)
        elif target.lstat().st_ino != staged.get(name):
            _exchange(fresh, target, old / name)
    for name in _names(staging / "gone"):
        if (repository / name).exists():
            (repository / name).rename(old / name)
    sync(repository)


def _exchange(fresh: Path, target: Path, old: Path) -> None:
    """Put `fresh` in the place of `target` at once, or by way of `old` where that cannot be."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(
        _AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE
    ):
        return
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(fresh), None, str(target))
    target.rename(old)
    fresh.rename(target)


def _clear(staging: Path) -> None:
    """Remove the staging folder; first the mark, without which nothing in it counts."""
    if staging.is_dir():
        (staging / COMMIT_MARK).unlink(missing_ok=True)
        sync(staging)
        shutil.rmtree(staging, ignore_errors=True)


def _clear_work(repository: Path) -> None:
    for work in get_args(Work):
        clear_scratch(f".{work}-", repository.resolve().parent)


def _inodes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).lstat().st_ino for name in _names(folder)}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
