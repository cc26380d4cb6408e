"""Writing a folder of text files, each whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name to text) into `folder`, made where it is missing.

    A file that cannot be written leaves the old one, and nothing else, behind.

    Raises:
        OSError: one of them cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
