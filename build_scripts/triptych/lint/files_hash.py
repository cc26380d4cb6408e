"""The SHA-256 of a file that may not be readable."""

from __future__ import annotations

from pathlib import Path

from triptych import cache


def sha256_of(path: Path) -> str:
    """In hex; empty when the file cannot be read."""
    try:
        return cache.sha256_of(path)
    except OSError:
        return ""
