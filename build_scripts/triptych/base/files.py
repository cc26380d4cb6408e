"""Files written whole or not at all and brought to the disk; folders that last as long as work.

YAML as its writers mean it: ``1e-5`` is a number, and a key given twice is a mistake.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from triptych.base.errors import UserError

_ROOM = ("must have room for what is written", "Free some space there, or name another folder")
_WRITABLE = ("must be a folder that can be written to", "Mend it, or name another one")
_REFUSALS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: ("must be allowed to hold files of this size", "Raise `ulimit -f`"),
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOTDIR: _WRITABLE,
    errno.EEXIST: _WRITABLE,
    errno.EXDEV: (
        "must lie in one file system with its parent folder, where it is staged",
        "Mount the parent folder, or name another one",
    ),
}


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write `files` (name to content, text as UTF-8) into `folder`, made where it is missing.

    A file that cannot be written leaves the old one, and nothing else, behind.

    Raises:
        OSError: one of them cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent` (that of temporary files unless given), removed at the end.

    Those of the same prefix that killed processes left there are removed first.
    """
    parent = parent or Path(tempfile.gettempdir())
    clear_scratch(prefix, parent)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as name:
        yield Path(name)


def clear_scratch(prefix: str, parent: Path) -> None:
    """Remove the scratch folders of this prefix in `parent` whose processes are gone."""
    for left in parent.glob(f"{prefix}*-*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def told_to_user(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses while `folder` is written into a `UserError`.

    Raises:
        UserError: no room, no permission, a limit of this process.
        OSError: anything else.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        rule, remedy = _REFUSALS[error.errno]
        raise UserError(str(folder), rule, given=error, remedy=remedy) from error


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """`sync` a folder and all that it holds."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1, which PyYAML follows, wants a dot and a sign: it reads 1e-5 as a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            mark = node.value[index][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML document.

    Raises:
        ValueError: not YAML; the message says where.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
