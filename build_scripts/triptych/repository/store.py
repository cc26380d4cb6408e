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
from collections.abc import Iterator, Mapping
from pathlib import Path

from triptych.build.cache import sha256_of
from triptych.errors import UserError
from triptych.repository.render import Content

COMMIT_MARK = "commit"


def write_models(repository: Path, files: Mapping[str, Content]) -> list[str]:
    """Write `files` (``<model>/...`` -> content); models whose files are equal are left untouched.

    Returns:
        Names of the models that changed, sorted.
    """
    models: dict[str, dict[str, Content]] = {}
    for path, content in files.items():
        model, _, inner = path.partition("/")
        models.setdefault(model, {})[inner] = content
    with locked(repository):
        changed = {m: c for m, c in models.items() if not _holds(repository / m, c)}
        if changed:
            staging = _staging(repository)
            new = staging / "new"
            for model, contents in changed.items():
                for inner, content in contents.items():
                    _stage(new / model / inner, content)
            (staging / COMMIT_MARK).touch()
            _swap(repository, staging)
            shutil.rmtree(staging)
    return sorted(changed)


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


def _stage(target: Path, content: Content) -> None:
    """Write one staged file and bring it to the disk before any rename makes it count."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def _swap(repository: Path, staging: Path) -> None:
    """Move each staged model into place. Repeatable: it goes on where a killed one stopped."""
    old = staging / "old"
    old.mkdir(exist_ok=True)
    for model in sorted((staging / "new").iterdir()):
        target = repository / model.name
        if target.exists():
            shutil.rmtree(old / model.name, ignore_errors=True)
            target.rename(old / model.name)
        model.rename(target)
