"""The one writer of a model repository: staged beside it, swapped in by rename, never half-written.

Staging lies in ``.<repository>.staging`` next to the repository (Triton reads every folder inside
it). A build killed while it stages leaves the repository untouched; one killed between the renames
of its models is completed by the next command, from the ``commit`` mark in the staging folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from triptych.cache import sha256_of
from triptych.errors import UserError
from triptych.repository.render import Content

COMMIT_MARK = "commit"
SMALLEST_LINK_BYTES = 64 << 10
"""A file of this size or more is not written twice: models with equal ones share its bytes."""


def write_models(
    repository: Path, files: Mapping[str, Content], *, retired: Sequence[str] = ()
) -> list[str]:
    """Write `files` (``<model>/...`` -> content); models whose files are equal are left untouched.

    A large file that another model already has is linked to, not copied.

    Args:
        repository: folder of the models.
        files: path relative to the repository -> content.
        retired: models to remove.

    Returns:
        Names of the models that changed or went, sorted.
    """
    models: dict[str, dict[str, Content]] = {}
    for path, content in files.items():
        model, _, inner = path.partition("/")
        models.setdefault(model, {})[inner] = content
    with locked(repository):
        changed = {m: c for m, c in models.items() if not _holds(repository / m, c)}
        gone = [model for model in retired if (repository / model).is_dir()]
        if changed or gone:
            staging = _staging(repository)
            new = staging / "new"
            new.mkdir(parents=True)
            for model, contents in changed.items():
                for inner, content in contents.items():
                    _stage(new / model / inner, content, repository)
            for model in gone:
                (staging / "gone" / model).mkdir(parents=True)
            (staging / COMMIT_MARK).touch()
            _swap(repository, staging)
            shutil.rmtree(staging)
    return sorted([*changed, *gone])


def hash_files(files: Mapping[str, Content]) -> dict[str, str]:
    """SHA-256 in hex of each file's content."""
    return {
        path: sha256_of(content)
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
        shutil.rmtree(staging, ignore_errors=True)
        yield


def _holds(model: Path, contents: Mapping[str, Content]) -> bool:
    """Whether the folder `model` holds exactly `contents` (relative path -> content).

    Byte code does not count: a Python step that was served has left it there.
    """
    there = {
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
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
    """Write one staged file and bring it to the disk before any rename makes it count."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path) and (twin := _twin(content, repository)):
        os.link(twin, target)
        return
    with target.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def _twin(content: Path, repository: Path) -> Path | None:
    """A file of the repository with the same name and bytes as `content`, if it is large."""
    size = content.stat().st_size
    if size < SMALLEST_LINK_BYTES:
        return None
    for path in sorted(repository.glob(f"*/*/{content.name}")):
        if path.stat().st_size == size and filecmp.cmp(path, content, shallow=False):
            return path
    return None


def _swap(repository: Path, staging: Path) -> None:
    """Move each staged model into place. Repeatable: it goes on where a killed one stopped."""
    old = staging / "old"
    old.mkdir(exist_ok=True)
    new = sorted((staging / "new").iterdir())
    for name in [*(model.name for model in new), *_names(staging / "gone")]:
        target = repository / name
        if target.exists():
            shutil.rmtree(old / name, ignore_errors=True)
            target.rename(old / name)
        if (staging / "new" / name).exists():
            (staging / "new" / name).rename(target)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
