"""Work done once: a stage's files lie in a folder named after the hash of all that decides them.

With them lie the hashes of what they hold: a damaged entry is made again, never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import Progress
from triptych.base.files import sync, sync_folder, told_to_user

CACHE_VARIABLE = "TRIPTYCH_CACHE"
PACKAGE = Path(__file__).parents[1]
HASHES_FILE = "sha256.json"
PARTIAL = ".partial-"


def cache_root() -> Path:
    """``$TRIPTYCH_CACHE``, else ``.cache/triptych`` in the current folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(".cache", "triptych")).absolute()


def sha256_of(path: Path) -> str:
    """Hash of one file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def key_of(stage: str, inputs: Mapping[str, object]) -> str:
    """Hash of a stage's name and its inputs (anything JSON can hold), in hex."""
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
    """Installed version of each distribution."""
    return {name: importlib.metadata.version(name) for name in distributions}


class Stage(NamedTuple):
    """What a stage has made.

    Attributes:
        folder: of its files.
        cached: whether it was there already.
        files: path in the folder -> SHA-256 in hex, as read just now.
    """

    folder: Path
    cached: bool
    files: Mapping[str, str]


def cached_stage(
    stage: str, inputs: Mapping[str, object], work: Callable[[Path], None], progress: Progress
) -> Stage:
    """The folder with what `work` wrote for these `inputs`.

    It appears whole or not at all: `work` writes into a temporary one, renamed at the end. An
    entry whose files are not what was written is thrown away and made again, which is told.

    Raises:
        UserError: the cache cannot be written to, or has no room.
    """
    folder = cache_root() / stage / key_of(stage, inputs)[:32]
    existed = folder.exists()  # asked first: another build may put it there in between
    there = _intact(folder)
    if there is not None:
        return Stage(folder, True, there)
    if existed:
        if (folder / HASHES_FILE).exists():  # else it was made before there were hashes
            progress("cache", f"{folder}: damaged, so it is thrown away and made again")
        shutil.rmtree(folder)
    with told_to_user(cache_root()), _partial(folder.parent) as partial:
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
    """The hashes of the files in `folder`, if they are those that were written with them."""
    try:
        written = json.loads((folder / HASHES_FILE).read_bytes())
        found = _hashes_of(folder)
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
    """A temporary folder in `parent`, gone at the end; those of killed processes go at once.

    Its lock tells that its process lives. The lock of the cache keeps others from taking a new one
    for a dead one before it has its own.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with _locked(cache_root()):
            for left in cache_root().glob(f"*/{PARTIAL}*"):
                with contextlib.suppress(OSError), _locked(left, wait=False):
                    shutil.rmtree(left)
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
            held.callback(shutil.rmtree, partial, ignore_errors=True)
            held.enter_context(_locked(partial))
        yield partial


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a folder; without `wait` a `BlockingIOError` tells that another process does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
