"""Scaffolded pipelines for tests, and the command as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from triptych.spec.scaffold import scaffold

TRIPTYCH = str(Path(sys.executable).with_name("triptych"))


def write(pipelines: Path, task: str, name: str = "mine", **options: Any) -> Path:
    wanted = {"model": None, "with_hooks": False, **options}
    scaffold(name, task=task, pipelines=pipelines, **wanted)
    return pipelines / name


def triptych(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRIPTYCH, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
