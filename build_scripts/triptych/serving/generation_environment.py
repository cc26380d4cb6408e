"""Where vLLM is: in an environment of its own, so that encoders stay light."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from triptych.runtime.engine_vllm import PACKAGES_VARIABLE

ENVIRONMENT_VARIABLE = "TRIPTYCH_GENERATION_ENV"
FOLDER = ".venv-generation"


def find_environment() -> Path | None:
    """``$TRIPTYCH_GENERATION_ENV``, else `FOLDER` beside this Python's; None where there is none.

    It must be one of this Python's version.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    folder = Path(named) if named else Path(sys.prefix).with_name(FOLDER)
    return folder if packages_folder(folder).is_dir() else None


def packages_folder(environment: Path) -> Path:
    """Where the environment has its packages."""
    return environment / "lib/python{}.{}/site-packages".format(*sys.version_info)


def step_variables() -> Mapping[str, str]:
    """What tells the steps of a server where vLLM is; nothing where there is no environment."""
    environment = find_environment()
    if environment is None:
        return {}
    return {PACKAGES_VARIABLE: str(packages_folder(environment).absolute())}
