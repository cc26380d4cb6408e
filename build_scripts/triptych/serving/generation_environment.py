"""Location of vLLM, which has a separate environment because of its size."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from triptych.base.errors import UserError
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


def environment_python() -> Path:
    """Return the path of the Python that has vLLM.

    Raises:
        UserError: The environment does not exist.
    """
    environment = find_environment()
    if environment is None:
        raise UserError(
            "core.backend",
            "needs vLLM in a separate environment",
            given="no .venv-generation",
            remedy="Install vLLM into an environment of its own and set TRIPTYCH_GENERATION_ENV "
            "to its folder; in a clone of Triptych, `make setup-generation` does both",
        )
    return environment / "bin" / "python"


def read_versions(*distributions: str) -> dict[str, str]:
    """Return the versions of the distributions that are installed, by name."""
    folders = [str(path) for path in vllm_packages()]
    versions: dict[str, str] = {}
    for name in distributions:
        for distribution in importlib.metadata.distributions(name=name, path=folders):
            versions.setdefault(name, distribution.version)
    return versions


def vllm_packages() -> list[Path]:
    """Return the package folders of this Python and, if installed, of vLLM's environment."""
    environment = find_environment()
    own = [Path(entry) for entry in sys.path if entry]
    return own if environment is None else [packages_folder(environment), *own]
