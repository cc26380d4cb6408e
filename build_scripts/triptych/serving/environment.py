"""Python environment with vLLM and the packages of text generation."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from triptych.base.errors import UserError
from triptych.serving.generation_environment import find_environment, packages_folder


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
            remedy="Run `make setup-generation`, or set TRIPTYCH_GENERATION_ENV to an environment",
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
