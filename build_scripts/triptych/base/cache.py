"""Cache of stages: the files of a stage lie in a folder named after the hash of its inputs.

Each folder also has the hashes of its files, so that a damaged entry is rebuilt and never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import Progress, UserError
from triptych.base.files import (
    expand_home,
    locked_folder,
    os_errors_as_user_errors,
    sync,
    sync_folder,
)

CACHE_VARIABLE = "TRIPTYCH_CACHE"
PACKAGE = Path(__file__).parents[1]
HASHES_FILE = "sha256.json"
PARTIAL = ".partial-"
MINUTES_ONCE = "minutes on a slow machine, once ..."
"""Text that ends the first line of a stage that may take more than a minute."""


def cache_root() -> Path:
    """Return the folder of the cache: ``$TRIPTYCH_CACHE``, else that of the user.

    That of the user is ``triptych`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``.

    Raises:
        UserError: This user has no home folder, and no variable names one.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).absolute()
    named = Path(os.environ.get("XDG_CACHE_HOME") or expand_home("~/.cache"))
    if named.parts[0] == "~":
        raise UserError(
            CACHE_VARIABLE,
            "is required for a user without a home folder",
            given=f"user {os.getuid()}, and no HOME",
            remedy="Set it to a folder that this user can write to",
        )
    return Path(named, "triptych").absolute()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def key_of(stage: str, inputs: Mapping[str, object]) -> str:
    """Return the hash of a stage's name and its inputs (JSON values), in hex."""
    text = json.dumps([stage, inputs], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def code_hash(*patterns: str) -> str:
    """Return the hash of the package's source files that match, in hex.

    Args:
        patterns: Globs below the package. A pattern that begins with ``!`` leaves out the files
            that those before it have matched.

    Raises:
        ValueError: A pattern matches nothing: a file was moved, and the key would be wrong.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = {path for path in PACKAGE.glob(pattern.lstrip("!")) if path.suffix == ".py"}
        if not found:
            raise ValueError(f"no source file of this package matches {pattern!r}")
        files = files - found if pattern.startswith("!") else files | found
    return key_of(
        "code", {path.relative_to(PACKAGE).as_posix(): sha256_of(path) for path in sorted(files)}
    )


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the installed version of each distribution."""
    return {name: importlib.metadata.version(name) for name in distributions}


class Stage(NamedTuple):
    """Result of a stage."""

    folder: Path  # Folder with the files
    cached: bool  # Whether the result was in the cache
    files: Mapping[str, str]  # SHA-256 in hex by path in the folder, computed just now


def cached_stage(
    stage: str, inputs: Mapping[str, object], work: Callable[[Path], None], progress: Progress
) -> Stage:
    """Return the folder with the files that `work` writes for `inputs`, from the cache if possible.

    The folder appears atomically: `work` writes to a temporary folder, which is renamed at the
    end. An entry whose files changed is removed and rebuilt, which `progress` reports.

    Raises:
        UserError: The cache cannot be read or written, or its disk is full.
    """
    folder = cache_root() / stage / key_of(stage, inputs)[:32]
    with os_errors_as_user_errors(cache_root(), CACHE_VARIABLE):
        return _find_or_make(folder, work, progress)


def _find_or_make(folder: Path, work: Callable[[Path], None], progress: Progress) -> Stage:
    existed = folder.exists()  # before reading: another build may create it in between
    there = _intact(folder)
    if there is not None:
        return Stage(folder, True, there)
    if existed:
        if (folder / HASHES_FILE).exists():  # else it was made before there were hashes
            progress("cache", f"{folder} is damaged and is rebuilt")
        shutil.rmtree(folder)
    with _partial(folder.parent) as partial:
        work(partial)
        files = _hashes_of(partial)
        (partial / HASHES_FILE).write_text(json.dumps(files), encoding="utf-8")
        sync_folder(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another build was faster: its result is the same
                raise
        else:
            sync(folder.parent)
            return Stage(folder, False, files)
    return Stage(folder, False, _hashes_of(folder))


def _intact(folder: Path) -> dict[str, str] | None:
    """Return the hashes of the files in `folder` if they are those written with them, else None."""
    try:
        written = json.loads((folder / HASHES_FILE).read_bytes())
        found = _hashes_of(folder)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
    return found if found == written else None


def _hashes_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / HASHES_FILE
    }


@contextlib.contextmanager
def _partial(parent: Path) -> Iterator[Path]:
    """Keep a locked temporary folder in `parent` while the block runs.

    Folders of dead processes are removed first. The lock of a folder shows that its process lives.
    The lock of the cache prevents others from treating a new folder as abandoned before it is
    locked.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with locked_folder(cache_root()):
            for left in cache_root().glob(f"*/{PARTIAL}*"):
                with contextlib.suppress(OSError), locked_folder(left, wait=False):
                    shutil.rmtree(left)
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
            held.callback(shutil.rmtree, partial, ignore_errors=True)
            held.enter_context(locked_folder(partial))
        yield partial
