"""Atomic writes synced to disk, temporary folders, and a strict YAML reader.

In YAML, ``1e-5`` is a number, and a key given twice is an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from triptych.base.errors import UserError

_ROOM = ("has too little free space", "Free some space there, or {another}")
_WRITABLE = ("is not a writable folder", "Change its permissions, or {another}")
_REFUSALS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: ("does not allow files of this size", "Raise `ulimit -f`"),
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOTDIR: _WRITABLE,
    errno.EEXIST: _WRITABLE,
    errno.EXDEV: (
        "is not on the same file system as its parent folder, where files are staged",
        "Mount the parent folder, or {another}",
    ),
}


def write_files(
    folder: Path, files: Mapping[str, str | bytes], *, is_private: bool = False
) -> None:
    """Write `files` (name to content, text as UTF-8) into `folder`, created if missing.

    Each file is replaced atomically; a failed write leaves the old file.

    Args:
        folder: Folder of the files.
        files: Content of each file by name.
        is_private: Whether only this user may read the files.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        # A process of the same number may have left one: in a container most have the number 1.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            partial.touch(0o600 if is_private else 0o666, exist_ok=False)
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Keep a new temporary folder in `parent` (by default the system's) while the block runs.

    Folders with the same prefix that killed processes left are removed first.
    """
    parent = parent or Path(tempfile.gettempdir())
    clear_scratch(prefix, parent)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as name,
        locked_folder(Path(name)),
    ):
        yield Path(name)


def clear_scratch(prefix: str, parent: Path) -> None:
    """Remove temporary folders of this prefix in `parent` whose processes have ended.

    The lock of a folder shows a process of another container, whose number says nothing here.
    """
    for left in parent.glob(f"{prefix}*-*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError), locked_folder(left, wait=False):
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder while the block runs; without `wait`, raise `BlockingIOError` if locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def os_errors_as_user_errors(folder: Path, setting: str = "") -> Iterator[None]:
    """Convert disk-full, permission and quota errors in the block to `UserError`.

    Args:
        folder: Folder that the block writes.
        setting: Option or variable that names the folder, if there is one.

    Raises:
        UserError: The disk is full, or a permission or a limit of this process forbids writing.
        OSError: Another error, also one about a file elsewhere.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS or not _is_beside(error, folder):
            raise
        rule, remedy = _REFUSALS[error.errno]
        another = f"name another folder with {setting}" if setting else "use another folder"
        remedy = remedy.format(another=another)
        raise UserError(str(folder), rule, given=error, remedy=remedy) from error


def _is_beside(error: OSError, folder: Path) -> bool:
    """Whether an error is about a folder, a file in it or a hidden one beside it, or no file."""
    if error.filename is None:
        return True
    file, here = Path(str(error.filename)).absolute(), folder.absolute()
    shared = Path(os.path.commonpath((file, here)))
    if shared in (file, here):
        return True
    return shared == here.parent and file.relative_to(shared).parts[0].startswith(".")


def as_user_error(error: Exception) -> UserError | None:
    """Return a mistake as it is, or that of a file that this user may not use, or of a full disk.

    None for other errors.
    """
    if not isinstance(error, OSError):
        return error if isinstance(error, UserError) else None
    named = error.filename2 or error.filename
    file = str(named or "the disk")
    if isinstance(error, PermissionError):
        return UserError(
            file,
            f"cannot be used by user {os.geteuid()}",
            given=error.strerror,
            remedy="Let this user read or write it (`chmod`), or run this as its owner",
        )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return None
    rule, remedy = _REFUSALS[error.errno]
    another = "use another"
    if named is None:
        temporary = os.environ.get("TMPDIR", "/tmp")
        another += f": of the files that the command writes, or of TMPDIR ({temporary})"
    return UserError(file, rule, given=error.strerror, remedy=remedy.format(another=another))


def expand_home(path: str) -> Path:
    """Return a path in which ``~`` is the home folder, if this user has one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_writable(folder: Path, setting: str = "") -> None:
    """Check that a folder can be written to, or created if it is missing.

    Args:
        folder: Folder that a later stage writes.
        setting: Option or variable that names the folder, if there is one.

    Raises:
        UserError: It cannot.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with os_errors_as_user_errors(there, setting), tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
    except OSError as error:  # such as that of a virtual file system
        given = f"{there}: {error.strerror}"
        another = f"Name another folder{f' with {setting}' if setting else ''}"
        rule = "cannot be created or written"
        raise UserError(str(folder), rule, given=given, remedy=another) from error


def let_others_read(folder: Path) -> None:
    """Let every user read the files in a folder, whatever the umask, as a container's user must."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        more = mode | (0o555 if stat.S_ISDIR(mode) else 0o444)
        if more != mode and not stat.S_ISLNK(mode):
            path.chmod(more & 0o7777)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush a folder and its content to disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1, which PyYAML implements, reads 1e-5 as text because it lacks a dot and a sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    known = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            continue  # refused below
        if key in known:
            mark = key_node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", mark)
        known.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str) -> Any:
    """Return the plain data of a YAML document.

    Raises:
        ValueError: The text is not YAML; the message has the position.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        marks = [
            f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem
            for problem, mark in (
                (error.context, error.context_mark),
                (error.problem, error.problem_mark),
            )
            if problem
        ]
        raise ValueError(": ".join(marks)) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
