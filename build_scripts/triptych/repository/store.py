"""The only writer of a model repository, and the history of replaced builds.

New files are staged in ``.<repository>.staging`` next to the repository, because Triton reads every
folder inside it. Each model is then swapped in one step, so a reader finds either the old or the
new model. If a build is killed while it stages, the repository is unchanged. If it is killed
between two models, the next command completes the swap, which the ``commit`` mark in the staging
folder shows.

Replaced builds are stored beside the repository, in ``.<repository>.history/PIPELINE/BUILD``,
because Triton would load them inside. A build is named by the SHA-256 of its manifest (`build_id`).
Its files are copies of those of the repository, which users may overwrite. They share their blocks
where the file system can do that (XFS, Btrfs). A file that a stored build already has is a hard
link to it, because files of stored builds are never written again.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.files import (
    check_writable,
    clear_scratch,
    let_others_read,
    os_errors_as_user_errors,
    scratch_folder,
    sync,
    sync_folder,
)
from triptych.container.manifests import ManifestError, read_manifest_file
from triptych.repository.bundle import Link
from triptych.repository.manifest import FIGURES_FILE, MANIFEST_FILE, build_id
from triptych.repository.render import Content

HISTORY_LENGTH = 5
"""Maximum number of replaced builds stored per pipeline, unless `prune` reduces it."""

MIN_ID_DIGITS = 4
"""Minimum length of a build ID prefix."""

MAX_WAIT_S = 120.0
"""Maximum time to wait for another writer, in seconds; a write copies files of some gigabytes."""
_LOCK_POLL_S = 0.1

_REPLACED_FILE = "replaced.json"


@dataclass(frozen=True)
class BuildRecord:
    """Fields of a manifest of any kind and release that the history needs.

    See `CompiledManifest` and `GateResult`.
    """

    built_at: str  # Time of the build, UTC, ISO 8601
    files: Mapping[str, str]  # SHA-256 in hex of each file, by path relative to the repository
    share: str  # Pipeline of which it uses a core; empty if it has its own
    core_rows: Mapping[str, int]  # Maximum batch size of each of its own cores by the core's hash
    # Maximum batch size that it needs of each core of `share` by the core's hash.
    shared_rows: Mapping[str, int]
    lacks_engine: bool  # Whether it cannot serve before `triptych engine` has run
    gate: Mapping[str, Any]  # Gate result as plain data; empty if the manifest has none
    pair_with: str = ""  # Pipeline of the other side of its model; empty without a pair
    space: str = ""  # Vector space that both have


def read_build(folder: Path, pipeline: str) -> BuildRecord | None:
    """Return the record of the build in a folder of models; None if it is missing or unreadable."""
    try:
        manifest = read_manifest_file(folder / pipeline / MANIFEST_FILE)
        cores = list(_read_cores(manifest))
        share = next((owner for owner, *_ in cores if owner), "")
        files = {str(path): str(digest) for path, digest in manifest["files"].items()}
        if not all(map(_is_inside, files)):
            return None
        return BuildRecord(
            built_at=str(manifest["built_at"]),
            files=files,
            share=share,
            core_rows={key: rows for owner, key, rows in cores if not owner},
            shared_rows={key: rows for owner, key, rows in cores if owner and owner == share},
            lacks_engine=manifest["plan"].get("engine") is not None
            and manifest.get("engine") is None,
            gate=manifest.get("gate") or {},
            pair_with=manifest["spec"].get("pair_with", ""),
            space=manifest.get("space", ""),
        )
    except (ManifestError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_cores(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield the owner of each core, empty for the pipeline itself, its hash and its batch size."""
    spec, records = manifest["spec"], manifest.get("cores") or {}
    models = spec.get("models") or {"": spec}
    for name, model in models.items():
        core = model["core"]
        shared = core.get("shared_from") or core.get("share") or ""
        key = records.get(name, manifest).get("core_key", "")
        yield shared.partition(".")[0], key, core.get("max_batch_size", 0)


def _is_inside(path: str) -> bool:
    """Return whether a path of a manifest names a file of a model, not one elsewhere."""
    parts = path.split("/")
    return len(parts) > 1 and not {"", ".", ".."}.intersection(parts) and "\0" not in path


@dataclass(frozen=True)
class HistoryBuild:
    """A stored build that can be restored."""

    build: str  # SHA-256 of its manifest
    pipeline: str
    folder: Path  # Folder of its models, with the structure of a repository
    replaced_at: str  # Time of its replacement, UTC, ISO 8601

    def files(self) -> dict[str, Path]:
        """Return all files by path in a repository, after checking them against the manifest.

        Raises:
            UserError: A file is missing or differs from the build.
        """
        manifest_path = f"{self.pipeline}/{MANIFEST_FILE}"
        if build_id(self.folder, self.pipeline) != self.build:
            raise self._damaged(manifest_path)
        files = self.record().files
        for path, digest in files.items():
            file = self.folder / path
            if not file.is_file() or sha256_of(file) != digest:
                raise self._damaged(path)
        names = [*files, manifest_path]
        if (self.folder / self.pipeline / FIGURES_FILE).is_file():
            names.append(f"{self.pipeline}/{FIGURES_FILE}")
        return {name: self.folder / name for name in names}

    def lay_out(self, folder: Path) -> None:
        """Link all files into a folder, which becomes a repository of this build alone.

        Raises:
            UserError: The build is damaged, or uses the core of another pipeline.
        """
        if owner := self.record().share:
            raise UserError(
                self.build[:12],
                "shares the core of another pipeline, so it cannot be served alone",
                given=f"core of {owner}",
                remedy=f"Name a build of {owner}",
            )
        for name, file in self.files().items():
            link(file, folder / name)

    def record(self) -> BuildRecord:
        """Return the fields of its manifest.

        Raises:
            UserError: The manifest is damaged.
        """
        record = read_build(self.folder, self.pipeline)
        if record is None:
            raise self._damaged(f"{self.pipeline}/{MANIFEST_FILE}")
        return record

    def _damaged(self, path: str) -> UserError:
        return UserError(
            f"{self.folder}/{path}",
            "differs from the stored build",
            given="missing" if not (self.folder / path).is_file() else "other bytes",
            remedy=f"Name another build (`triptych history {self.pipeline}`), or build it again",
        )


def history_folder(repository: Path) -> Path:
    """Return the folder of the replaced builds, which may not exist."""
    return repository.parent / f".{repository.name}.history"


def archive_build(repository: Path, pipeline: str) -> None:
    """Store the active build, which is about to be replaced; remove the oldest builds.

    Builds that cannot serve are not stored: damaged builds and builds whose engine was never built.

    Raises:
        OSError: There is no space, or no permission to write.
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
    history = list_history(repository, pipeline)
    stored = {
        (path, digest): other.folder / path
        for other in reversed(history)
        if (known := read_build(other.folder, pipeline)) is not None
        for path, digest in known.files.items()
    }
    target = home / pipeline / build
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".new-", home) as scratch:
        fresh = scratch / build
        for name in names:
            same = stored.get((name, record.files.get(name, "")))
            if same is not None and _is_same_file(same, repository / name):
                link(same, fresh / name)
            else:
                clone(repository / name, fresh / name)
        replaced_at = _time_after(history[0].replaced_at if history else "")
        text = json.dumps({"replaced_at": replaced_at})
        (fresh / _REPLACED_FILE).write_text(text, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    prune(repository, pipeline, HISTORY_LENGTH - 1)


def _time_after(last: str) -> str:
    """Return the time now, or just after `last` if the clock was set back since."""
    now = datetime.datetime.now(datetime.timezone.utc)
    with contextlib.suppress(ValueError, TypeError):  # empty, or without a time zone
        step = datetime.timedelta(microseconds=1)
        now = max(now, datetime.datetime.fromisoformat(last) + step)
    return now.isoformat()


def list_history(repository: Path, pipeline: str) -> list[HistoryBuild]:
    """Return the builds that can be restored, last replaced first, without the active build."""
    found = []
    for file in (history_folder(repository) / pipeline).glob(f"*/{_REPLACED_FILE}"):
        try:
            replaced_at = str(json.loads(file.read_bytes())["replaced_at"])
        except (OSError, ValueError, KeyError, TypeError):
            replaced_at = ""
        found.append(HistoryBuild(file.parent.name, pipeline, file.parent, replaced_at))
    active = build_id(repository, pipeline)
    others = [stored for stored in found if stored.build != active]
    return sorted(others, key=lambda stored: stored.replaced_at, reverse=True)


def find_build(history: list[HistoryBuild], build: str) -> HistoryBuild | None:
    """Return the build whose ID begins with these digits; None if there is not exactly one."""
    matches = [stored for stored in history if stored.build.startswith(build)]
    return matches[0] if len(matches) == 1 and len(build) >= MIN_ID_DIGITS else None


def prune(repository: Path, pipeline: str, keep: int) -> list[HistoryBuild]:
    """Remove all but the `keep` last replaced builds of a pipeline; return the removed builds."""
    removed = list_history(repository, pipeline)[keep:]
    for stored in removed:
        shutil.rmtree(stored.folder, ignore_errors=True)
    return removed


def measure_history_bytes(repository: Path, pipeline: str) -> int:
    """Return the disk space in bytes of the stored builds, without files of the repository."""
    in_use = {file.stat().st_ino for file in repository.rglob("*") if file.is_file()}
    own = {}
    for stored in list_history(repository, pipeline):
        for file in stored.folder.rglob("*"):
            if file.is_file() and (status := file.stat()).st_ino not in in_use:
                own[status.st_ino] = status.st_size
    return sum(own.values())


def link(source: Path, target: Path) -> None:
    """Create a hard link to a file, or a copy if the file system or the permissions prevent links.

    Raises:
        OSError: Neither a link nor a copy is possible.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def clone(source: Path, target: Path) -> None:
    """Copy a file or a symbolic link; a file shares its blocks where the file system supports it.

    Without space for a copy the target is a hard link.

    Raises:
        OSError: Neither is possible.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    try:
        with source.open("rb") as old, target.open("xb") as new:
            try:
                fcntl.ioctl(new, _FICLONE, old.fileno())
            except OSError:
                shutil.copyfileobj(old, new, 1 << 20)
        shutil.copystat(source, target)
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        os.link(source, target)


def _is_same_file(stored: Path, file: Path) -> bool:
    """Return whether a stored file exists and has the kind and the size of a file."""
    try:
        kinds = stored.is_symlink(), file.is_symlink()
        return kinds == (False, False) and stored.stat().st_size == file.stat().st_size
    except OSError:
        return False


_FICLONE = 0x40049409
"""Number of the system call that lets two files share their blocks (``linux/fs.h``)."""
COMMIT_MARK = "commit"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
Work = Literal["auto", "tune", "shadow"]
"""Purposes of temporary repositories beside the main one."""
MIN_LINK_BYTES = 64 << 10
"""Minimum size of a file, in bytes, to link to an identical file of another model."""


def write_models(
    repository: Path,
    files: Mapping[str, Content],
    *,
    retired: Sequence[str] = (),
    keeps_links: bool = False,
) -> list[str]:
    """Write `files` (``<model>/...`` -> content); models whose files are equal stay untouched.

    A large file that another model already has is linked, not copied. Replaced builds are stored in
    the history.

    Args:
        repository: Folder of the models.
        files: Content of each file, by path relative to the repository.
        retired: Models to remove.
        keeps_links: Whether a file on the disk that is a symbolic link stays one.

    Returns:
        Names of the models that changed or were removed, sorted.

    Raises:
        UserError: The repository cannot be written, has no space, or another build is writing.
    """
    models: dict[str, dict[str, Content]] = {}
    for path, content in files.items():
        model, _, inner = path.partition("/")
        models.setdefault(model, {})[inner] = content
    with os_errors_as_user_errors(repository), locked(repository):
        changed = {m: c for m, c in models.items() if not _holds(repository / m, c)}
        removed = [model for model in retired if (repository / model).is_dir()]
        if changed or removed:
            staging = _staging(repository)
            try:
                for model, contents in changed.items():
                    for inner, content in contents.items():
                        target = staging / "new" / model / inner
                        if keeps_links and isinstance(content, Path):
                            clone(content, target)
                        else:
                            _stage(target, content, repository)
                for model in removed:
                    (staging / "gone" / model).mkdir(parents=True)
                if changed:
                    let_others_read(staging / "new")
                sync_folder(staging)
                # Last, because it may remove builds whose files were just linked.
                for model in (*changed, *removed):
                    archive_build(repository, model)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)  # otherwise a full disk would stay full
                raise
            _commit(repository, staging)
    return sorted([*changed, *removed])


def check_target(repository: Path) -> None:
    """Check that models can be moved into a repository, before the work of a build.

    Raises:
        UserError: The repository, or the folder beside it where files are staged, is not writable.
    """
    check_writable(repository.parent, "--repository")
    if repository.is_dir():
        with (
            os_errors_as_user_errors(repository, "--repository"),
            scratch_folder(f".{repository.name}.probe-", repository.parent) as scratch,
        ):
            (scratch / "probe").touch()
            (scratch / "probe").rename(repository / scratch.name)
            (repository / scratch.name).unlink()


def recover(repository: Path) -> None:
    """Complete or clear the state that a killed build left, so that a server finds whole models.

    Raises:
        UserError: The repository cannot be written, or a build is running.
    """
    _clear_work(repository)
    if _staging(repository).is_dir():
        with os_errors_as_user_errors(repository), locked(repository):
            pass


@contextlib.contextmanager
def sibling_work_dir(repository: Path, work: Work) -> Iterator[Path]:
    """Create a temporary folder beside the repository.

    It is removed at the end of the block, or by the next command if the process is killed.

    Raises:
        OSError: The folder cannot be created.
    """
    home = repository.resolve().parent
    home.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{work}-", home) as folder:
        yield folder


def is_being_written(repository: Path) -> bool:
    """Return whether models are about to change, or a killed build left such a state."""
    return _staging(repository).is_dir()


def hash_files(files: Mapping[str, Content], known: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 in hex of each file's content; hashes in `known` are reused."""
    return {
        path: known[path]
        if path in known
        else sha256_of(content)
        if isinstance(content, Path)
        else hashlib.sha256(content).hexdigest()
        for path, content in ((path, _linked(files, path)) for path in files)
    }


def _linked(files: Mapping[str, Content], path: str) -> bytes | Path:
    """Return the content of a file; that of the file that it links to if it is a link."""
    content = files[path]
    if isinstance(content, Link):
        return _linked(files, content.path)
    return content


@contextlib.contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Hold the repository for one writer; first complete or clear what a killed writer left.

    Raises:
        UserError: Another command writes for longer than `MAX_WAIT_S`.
    """
    if not repository.is_dir():
        repository.mkdir(parents=True, exist_ok=True)
        let_others_read(repository)
    with (repository.parent / f".{repository.name}.lock").open("w") as lock:
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        str(repository),
                        "is being written by another build",
                        given=f"lock file {lock.name}, held for more than {MAX_WAIT_S:g} s",
                        remedy="Wait until the other build ends",
                    ) from error
                time.sleep(_LOCK_POLL_S)
        staging = _staging(repository)
        if (staging / COMMIT_MARK).exists():
            _swap(repository, staging)
        _clear(staging)
        _clear_work(repository)
        yield


def _holds(model: Path, contents: Mapping[str, Content]) -> bool:
    """Check that the folder `model` contains exactly `contents` (relative path -> content).

    Byte code is ignored, because serving a Python step creates it. Measurements of `bench` are
    ignored, too: they are removed with the folder when anything else changes.
    """
    present = {
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    } - {FIGURES_FILE}
    if present != set(contents):
        return False
    return all(_is_equal(model / inner, content) for inner, content in contents.items())


def _is_equal(file: Path, content: Content) -> bool:
    if isinstance(content, Link):
        return file.is_symlink() and str(file.readlink()) == content.target
    if isinstance(content, Path):
        return filecmp.cmp(file, content, shallow=False)
    return file.read_bytes() == content


def _staging(repository: Path) -> Path:
    return repository.parent / f".{repository.name}.staging"


def _stage(target: Path, content: Content, repository: Path) -> None:
    """Write one staged file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Link):
        target.symlink_to(content.target)
        return
    if isinstance(content, Path) and (identical := _find_identical(content, repository)):
        link(identical, target)
        return
    with target.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)


def _find_identical(content: Path, repository: Path) -> Path | None:
    """Return a file of the repository with the name and bytes of `content`, if it is large."""
    size = content.stat().st_size
    if size < MIN_LINK_BYTES:
        return None
    for path in sorted(repository.glob(f"*/*/{content.name}")):
        if path.stat().st_size == size and filecmp.cmp(path, content, shallow=False):
            return path
    return None


def _commit(repository: Path, staging: Path) -> None:
    """Activate the staged models. If already the first swap fails, nothing changes.

    Raises:
        OSError: The repository cannot be written.
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
    """Move each staged model to its place. Repeated calls continue where a killed process stopped.

    If an old model exists, the two folders are exchanged. The repository then has the inode
    recorded in the mark, and the staging folder has the old model.
    """
    try:
        staged = json.loads((staging / COMMIT_MARK).read_bytes())
    except ValueError:
        return  # the process was killed while writing the mark, so nothing has moved
    old = staging / "old"
    old.mkdir(exist_ok=True)
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
    """Exchange `fresh` and `target` atomically, or by way of `old` if that is not supported."""
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
    """Remove the staging folder. The mark is removed first, because it makes the content count."""
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
