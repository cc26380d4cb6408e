"""Write manifests together, and never over a file that a user wrote or changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import yaml_of
from triptych.base.files import (
    let_others_read,
    os_errors_as_user_errors,
    scratch_folder,
    sync_folder,
)

_MARK = "# Written by `triptych deploy`; put changes into an overlay of your own. sha256 "


def write_manifests(out: Path, files: Mapping[str, object]) -> None:
    """Replace the manifests in a folder.

    Args:
        out: Folder of manifests.
        files: Document of each file by its path.

    Raises:
        UserError: `out` is not writable, or holds a file that a user wrote or changed.
    """
    parent = out.resolve().parent
    with os_errors_as_user_errors(out):
        _check_own(out)
        parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{out.name}-", parent) as scratch:
            for path, document in files.items():
                file = scratch / "new" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                body = yaml_of(document)
                file.write_text(f"{_MARK}{_digest(body)}\n{body}", encoding="utf-8")
            let_others_read(scratch / "new")
            sync_folder(scratch / "new")
            if out.exists():
                out.rename(scratch / "old")
            (scratch / "new").rename(out)


def _check_own(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError("--out", "must be a folder", given=out, remedy="Name another path")
    for file in sorted(out.rglob("*")):
        if file.is_dir():
            continue
        head, _, body = file.read_bytes().partition(b"\n")
        if head.decode("utf-8", "replace") != f"{_MARK}{_digest(body.decode('utf-8', 'replace'))}":
            raise UserError(
                "--out",
                "must only hold files as `triptych deploy` wrote them",
                given=f"{file}, which is another file or was changed",
                remedy="Move it away (changes belong into an overlay of your own), or name another "
                "folder",
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
