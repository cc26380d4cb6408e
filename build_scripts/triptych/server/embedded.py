"""Finding a tritonserver: the one on PATH, else the one assembled from `nvidia-pytriton`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triptych.container.entrypoint import find_release as find_image_release
from triptych.errors import UserError
from triptych.releases import Release
from triptych.server.requirements import (
    INSTALL_LOCAL,
    REQUIREMENTS,
    STUB,
    Platform,
    Wheel,
    find_wheel,
    read_platform,
)

__all__ = ["INSTALL_LOCAL", "Installation", "find_installation", "find_wheel"]

# Of the server in the `nvidia-pytriton` wheel.
EMBEDDED_RELEASE = Release(24, 10)
_NOT_CODE = shutil.ignore_patterns("__pycache__")
_STAND_INS = Path(__file__).parent / "backends"


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started.

    Attributes:
        executable: the program.
        backend_directory: what to pass as ``--backend-directory``; None leaves the server its own.
        python_backends: the backends that run Python stubs, each configured by its own name.
        environment: variables to set over those of this process.
    """

    executable: Path
    backend_directory: Path | None = None
    python_backends: tuple[str, ...] = ("python",)
    environment: Mapping[str, str] = field(default_factory=dict)


def find_installation(private: Path, *, own_backends: Path | None = None) -> Installation:
    """The server to start.

    A ``tritonserver`` on PATH (inside an NGC container) is used with its own backends. Otherwise,
    or where `own_backends` is given, the embedded server is assembled.

    Args:
        private: an empty folder of the caller's; the assembled backend directory is made in it.
        own_backends: backends laid over the assembled ones, a folder each; asks for the embedded
            server.

    Raises:
        UserError: no server is there, or a piece of the embedded one is missing.
    """
    on_path = shutil.which("tritonserver")
    if on_path and own_backends is None:
        return Installation(executable=Path(on_path))
    platform = read_platform()
    check_requirements(platform)
    wheel = find_wheel()
    if wheel is None or platform.libpython is None:
        raise RuntimeError("the requirements hold, so the wheel and libpython are there")
    return _assemble(wheel, platform, private / "backends", _backend_folders(own_backends))


def find_release() -> Release:
    """The release of the server that `find_installation` starts where the caller has no backends.

    Raises:
        UserError: a tritonserver is on PATH and nothing says which release it is.
    """
    if shutil.which("tritonserver"):
        return find_image_release(os.environ)
    return EMBEDDED_RELEASE


def check_requirements(platform: Platform) -> None:
    """Raises a `UserError` with the remedy for the first requirement that does not hold."""
    for requirement in REQUIREMENTS:
        if not requirement.holds(platform):
            raise UserError(
                "embedded tritonserver",
                requirement.rule,
                given=requirement.given(platform),
                remedy=requirement.remedy,
            )


def _assemble(
    wheel: Wheel, platform: Platform, directory: Path, backends: list[Path]
) -> Installation:
    python = directory / "python"
    python.mkdir(parents=True)
    # Copies: the server refuses a library that a link leads out of the backend directory.
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copyfile(wheel.python_backend / name, python / name)
    shutil.copyfile(wheel.stub(platform.python_version), python / STUB)
    (python / STUB).chmod(0o755)
    for folder in backends:
        shutil.copytree(folder, directory / folder.name, dirs_exist_ok=True, ignore=_NOT_CODE)
    libraries = [wheel.libraries, platform.libpython, os.environ.get("LD_LIBRARY_PATH")]
    # The stub finds its packages through the first `python3` on PATH, not through PYTHONPATH.
    programs = [Path(sys.executable).parent, os.environ.get("PATH", os.defpath)]
    return Installation(
        executable=wheel.executable,
        backend_directory=directory,
        python_backends=("python", *dict.fromkeys(folder.name for folder in backends)),
        environment={
            "LD_LIBRARY_PATH": os.pathsep.join(str(folder) for folder in libraries if folder),
            "PATH": os.pathsep.join(str(folder) for folder in programs),
        },
    )


def _backend_folders(own_backends: Path | None) -> list[Path]:
    """Stand-ins first, then the caller's, so that the caller's win."""
    if own_backends is not None and not own_backends.is_dir():
        raise UserError("backend_directory", "must be a folder", given=own_backends)
    parents = [_STAND_INS] if own_backends is None else [_STAND_INS, own_backends]
    return [
        folder
        for parent in parents
        if parent.is_dir()
        for folder in sorted(parent.iterdir())
        if folder.is_dir() and folder.name[0] not in "._" and any(folder.iterdir())
    ]
