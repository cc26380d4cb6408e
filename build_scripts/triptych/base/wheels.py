"""Download wheels from the package index."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def download_wheels(
    wanted: Sequence[str], folder: Path, *options: str, timeout_s: float = 600.0
) -> str:
    """Download the wheels of requirements such as ``numpy==1.26.4``, without what these require.

    Args:
        wanted: Requirements.
        folder: Folder for the wheels.
        options: Further options of ``pip download``, such as ``--platform=manylinux2014_x86_64``.
        timeout_s: Maximum time in seconds.

    Returns:
        Error of pip; empty if every wheel was downloaded.
    """
    command = [
        *(sys.executable, "-m", "pip", "download", *wanted, "--dest", str(folder)),
        *("--no-deps", "--only-binary=:all:", "--quiet", *options),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if "ERROR" in line] or lines
    return errors[-1] if errors else f"pip ended with {done.returncode}"
