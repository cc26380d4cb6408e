"""Work done once: a stage's files lie in a folder named after the hash of all that decides them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

CACHE_VARIABLE = "TRIPTYCH_CACHE"
PACKAGE = Path(__file__).parent


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
    """Hash of the source of this package's files that match: another code is another result.

    Raises:
        ValueError: a pattern matches nothing, so that a file was moved and the key would lie.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = [path for path in PACKAGE.glob(pattern) if path.suffix == ".py"]
        if not found:
            raise ValueError(f"no source file of this package matches {pattern!r}")
        files.update(found)
    return key_of(
        "code", {path.relative_to(PACKAGE).as_posix(): sha256_of(path) for path in sorted(files)}
    )


def versions_of(*distributions: str) -> dict[str, str]:
    """Installed version of each distribution."""
    return {name: importlib.metadata.version(name) for name in distributions}


def cached_stage(
    stage: str, inputs: Mapping[str, object], work: Callable[[Path], None]
) -> tuple[Path, bool]:
    """The folder with what `work` wrote for these `inputs`, and whether it was there already.

    The folder appears whole or not at all: `work` writes into a temporary one, renamed at the end.
    """
    folder = cache_root() / stage / key_of(stage, inputs)[:32]
    if folder.is_dir():
        return folder, True
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        work(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another build was faster: its result is the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, False
