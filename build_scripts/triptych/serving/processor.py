"""The name of this machine's processor."""

from __future__ import annotations

from pathlib import Path


def processor() -> str:
    """As the kernel tells it; empty where it does not."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
