"""A server's own folder, whose path a shell reads as it is, wherever TMPDIR may be."""

from __future__ import annotations

import tempfile
from pathlib import Path

from triptych.base.errors import UserError
from triptych.container.shell import PLAIN, is_plain


def new_plain_folder() -> Path:
    """A folder of this server's own, whose path is plain wherever TMPDIR is; see `shell`."""
    parent = next(parent for parent in (tempfile.gettempdir(), "/tmp") if is_plain(parent))
    try:
        return Path(tempfile.mkdtemp(prefix="triptych-server-", dir=parent))
    except OSError as error:
        raise UserError(
            "TMPDIR",
            f"must be a folder that can be written to, whose path is of {PLAIN}",
            given=error,
            remedy="Set TMPDIR to one",
        ) from error
