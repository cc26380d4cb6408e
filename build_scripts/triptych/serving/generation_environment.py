"""Location of vLLM, which has a separate environment because of its size."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from triptych.runtime.engine_vllm import PACKAGES_VARIABLE

ENVIRONMENT_VARIABLE = "TRIPTYCH_GENERATION_ENV"
FOLDER = ".venv-generation"


def find_environment() -> Path | None:
    """Return ``$TRIPTYCH_GENERATION_ENV``, or else `FOLDER` beside this Python's environment.

    Returns:
        The environment's folder; None if it lacks packages for this Python's version.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    folder = Path(named) if named else Path(sys.prefix).with_name(FOLDER)
    return folder if packages_folder(folder).is_dir() else None


def packages_folder(environment: Path) -> Path:
    """Return the folder of the environment's packages."""
    return environment / "lib/python{}.{}/site-packages".format(*sys.version_info)


def step_variables() -> Mapping[str, str]:
    """Return the variable that shows a server's steps the folder of vLLM; empty without vLLM."""
    environment = find_environment()
    if environment is None:
        return {}
    return {PACKAGES_VARIABLE: str(packages_folder(environment).absolute())}
