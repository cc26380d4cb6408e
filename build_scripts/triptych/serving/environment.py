"""The environment that generation's own tools run in."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from triptych.base.errors import UserError
from triptych.serving.generation_environment import find_environment, packages_folder


def environment_python() -> Path:
    """The Python that has vLLM.

    Raises:
        UserError: there is no such environment.
    """
    environment = find_environment()
    if environment is None:
        raise UserError(
            "core.backend",
            "needs vLLM, in an environment of its own",
            given="no .venv-generation",
            remedy="Run `make setup-generation`, or name one with TRIPTYCH_GENERATION_ENV",
        )
    return environment / "bin" / "python"


def read_versions(*distributions: str) -> dict[str, str]:
    """Version of each distribution that the environment has."""
    places = [str(path) for path in vllm_packages()]
    found: dict[str, str] = {}
    for name in distributions:
        for one in importlib.metadata.distributions(name=name, path=places):
            found.setdefault(name, one.version)
    return found


def vllm_packages() -> list[Path]:
    """Folders with packages: this Python's, and vLLM's where it is there."""
    environment = find_environment()
    own = [Path(entry) for entry in sys.path if entry]
    return own if environment is None else [packages_folder(environment), *own]
