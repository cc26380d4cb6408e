"""Writing a folder of files, each whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
