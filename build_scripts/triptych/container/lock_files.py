"""The files of a repository against the locks of its pipelines: what was built is what is there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from triptych.container.locks import ServedPipeline, StartupManifest

_CHUNK_BYTES = 2**20
_BYTE_CODE = "__pycache__"
_OF_NOTHING = hashlib.sha256().hexdigest()


def find_wrong_files(
    repository: Path, locks: Mapping[ServedPipeline, StartupManifest], *, hashes: bool
) -> dict[ServedPipeline, dict[str, str]]:
    """Of each pipeline: path of a file -> what is wrong with it, in words after the path.

    With `hashes` the files are read whole, several at a time; without it must only be there.
    """
    listed = {(path, digest) for lock in locks.values() for path, digest in lock.files.items()}
    with ThreadPoolExecutor() as pool:
        verdicts = pool.map(lambda one: _find_fault(repository, *one, hashes=hashes), listed)
        faults = dict(zip(listed, verdicts, strict=True))
    return {
        pipeline: {
            **{path: faults[path, digest] for path, digest in lock.files.items()},
            **dict.fromkeys(_extra_files(repository, lock), "is not in the lock"),
        }
        for pipeline, lock in locks.items()
    }


def _find_fault(repository: Path, path: str, digest: str, *, hashes: bool) -> str:
    """Empty where the file is as it should be."""
    file = repository / path
    try:
        if not file.is_file():
            return "is missing"
        if digest != _OF_NOTHING and not file.stat().st_size:
            return "is empty"
        if hashes and _sha256(file) != digest:
            return "is not the file that the lock describes"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _extra_files(repository: Path, lock: StartupManifest) -> Iterator[str]:
    """Files in version folders, where Triton and the Python steps look for what they load."""
    for model in sorted({path.partition("/")[0] for path in lock.files}):
        for version in sorted((repository / model).glob("[0-9]*")):
            for file in sorted(version.rglob("*")):
                path = file.relative_to(repository).as_posix()
                hidden = file.name.startswith(".") or file.parent.name == _BYTE_CODE
                if path not in lock.files and not hidden and not file.is_dir():
                    yield path


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
