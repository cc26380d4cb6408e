"""Finding a tritonserver: the one on PATH, else the one assembled from `nvidia-pytriton`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.base.releases import Release
from triptych.container.entrypoint import find_release as find_image_release
from triptych.container.supervisor import STUB
from triptych.serving.generation_environment import step_variables

INSTALL_LOCAL = "pip install -e .[local]"
# Of the server in the `nvidia-pytriton` wheel.
EMBEDDED_RELEASE = Release(24, 10)
_GLIBC_MIN = (2, 35)
_NOT_CODE = shutil.ignore_patterns("__pycache__")
_EMULATED_BACKENDS = Path(__file__).parent / "backends"


class Wheel(NamedTuple):
    """Where the `nvidia-pytriton` wheel put its pieces, and the libraries they were linked with."""

    server: Path
    libraries: Path

    @property
    def executable(self) -> Path:
        return self.server / "bin" / "tritonserver"

    def stub(self, python_version: str) -> Path:
        """The stub for ``3.11`` and the like; the path need not exist."""
        return self.server / "python_backend_stubs" / python_version / STUB

    def stub_versions(self) -> tuple[str, ...]:
        """The Python versions that have a stub, lowest first."""
        found = [path.parent.name for path in self.server.glob(f"python_backend_stubs/*/{STUB}")]
        return tuple(sorted(found, key=lambda version: int(version.rpartition(".")[2])))


@dataclass(frozen=True)
class Platform:
    """The facts about this machine and its Python that decide whether the server can run.

    Attributes:
        glibc: the C library's version; None where it is another C library.
        python_version: of this Python, as the stubs are named: ``3.11``.
        python_prefix: the installation that this Python belongs to.
        stub_versions: the Python versions that the wheel has a stub for; empty without a wheel.
        libpython: the folder of this Python's shared library; None without one.
    """

    system: str
    processor: str
    glibc: tuple[int, int] | None
    python_version: str
    python_prefix: str
    stub_versions: tuple[str, ...]
    libpython: Path | None
    numpy_version: str | None


class Requirement(NamedTuple):
    """One thing that the embedded server needs; `rule` ends a sentence that begins with it."""

    id: str
    rule: str
    holds: Callable[[Platform], bool]
    given: Callable[[Platform], str]
    remedy: str


REQUIREMENTS = (
    Requirement(
        "embedded-platform",
        "must run on x86-64 Linux",
        lambda here: (here.system, here.processor) == ("linux", "x86_64"),
        lambda here: f"{here.processor} {here.system}",
        "Use an NGC tritonserver container",
    ),
    Requirement(
        "embedded-glibc",
        f"needs glibc {_GLIBC_MIN[0]}.{_GLIBC_MIN[1]} or later",
        lambda here: here.glibc is not None and here.glibc >= _GLIBC_MIN,
        lambda here: f"glibc {here.glibc[0]}.{here.glibc[1]}" if here.glibc else "no glibc",
        "Use a newer distribution (Ubuntu 22.04, Debian 12) or an NGC tritonserver container",
    ),
    Requirement(
        "embedded-wheel",
        "needs the `nvidia-pytriton` wheel",
        lambda here: bool(here.stub_versions),
        lambda here: "installed" if here.stub_versions else "not installed",
        f"Run `{INSTALL_LOCAL}`, or run inside an NGC tritonserver container",
    ),
    Requirement(
        "embedded-stub",
        "needs a stub for this Python",
        lambda here: here.python_version in here.stub_versions,
        lambda here: (
            f"Python {here.python_version}; stubs: {', '.join(here.stub_versions) or 'none'}"
        ),
        "Make the virtual environment with a Python that has one",
    ),
    Requirement(
        "embedded-libpython",
        "needs the shared library of this Python, which its Python steps link",
        lambda here: here.libpython is not None,
        lambda here: str(here.libpython or f"{here.python_prefix}, built without one"),
        "Install the distribution's libpython of this version (libpython3.11 and the like), or "
        "use a Python configured with --enable-shared",
    ),
    Requirement(
        "embedded-numpy",
        "needs numpy < 2: with numpy 2 its Python steps misread strings and die",
        lambda here: here.numpy_version is not None and here.numpy_version.startswith(("0.", "1.")),
        lambda here: f"numpy {here.numpy_version}" if here.numpy_version else "no numpy",
        "Run `pip install 'numpy<2'`",
    ),
)


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started.

    Attributes:
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
    or where `own_backends` (a folder each, laid over the assembled ones) is given, the embedded
    server is assembled in `private`, an empty folder of the caller's.

    Raises:
        UserError: no server is there, or a piece of the embedded one is missing.
    """
    on_path = shutil.which("tritonserver")
    if on_path and own_backends is None:
        # Without an activated environment, its Python steps would find another Python's packages.
        return Installation(executable=Path(on_path), environment={"PATH": server_path()})
    here = read_platform()
    check_requirements(here)
    wheel = find_wheel()
    if wheel is None or here.libpython is None:
        raise RuntimeError("the requirements hold, so the wheel and libpython are there")
    return _assemble(wheel, here, private / "backends", _backend_folders(own_backends))


def find_release() -> Release:
    """The release of the server that `find_installation` starts where the caller has no backends.

    Raises:
        UserError: a tritonserver is on PATH and nothing says which release it is.
    """
    if shutil.which("tritonserver"):
        return find_image_release(os.environ)
    return EMBEDDED_RELEASE


def check_requirements(here: Platform) -> None:
    """Raises a `UserError` with the remedy for the first requirement that does not hold."""
    for _, rule, holds, given, remedy in REQUIREMENTS:
        if not holds(here):
            raise UserError("embedded tritonserver", rule, given=given(here), remedy=remedy)


def _assemble(wheel: Wheel, here: Platform, directory: Path, backends: list[Path]) -> Installation:
    python = directory / "python"
    python.mkdir(parents=True)
    # Copies: the server refuses a library that a link leads out of the backend directory.
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copyfile(wheel.server / "backends" / "python" / name, python / name)
    shutil.copyfile(wheel.stub(here.python_version), python / STUB)
    (python / STUB).chmod(0o755)
    for folder in backends:
        shutil.copytree(folder, directory / folder.name, dirs_exist_ok=True, ignore=_NOT_CODE)
    libraries = [wheel.libraries, here.libpython, os.environ.get("LD_LIBRARY_PATH")]
    return Installation(
        executable=wheel.executable,
        backend_directory=directory,
        python_backends=("python", *dict.fromkeys(folder.name for folder in backends)),
        environment={
            "LD_LIBRARY_PATH": os.pathsep.join(str(folder) for folder in libraries if folder),
            "PATH": server_path(),
            **step_variables(),
        },
    )


def describe_local_server(backend: str) -> str:
    """Return what `find_installation` starts, and whether it has Triton's own `backend`."""
    if shutil.which("tritonserver"):
        return "tritonserver on PATH"
    replaced = backend and (_EMULATED_BACKENDS / backend).is_dir()
    replacement = f", with a local replacement of Triton's {backend} backend" if replaced else ""
    return f"embedded tritonserver{replacement}"


def server_path() -> str:
    """PATH of the server: its stub finds its packages through the first `python3` on it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _backend_folders(own_backends: Path | None) -> list[Path]:
    """Return folders of backends; those of the caller follow and so replace emulated ones."""
    if own_backends is not None and not own_backends.is_dir():
        raise UserError("backend_directory", "must be a folder", given=own_backends)
    parents = [_EMULATED_BACKENDS] if own_backends is None else [_EMULATED_BACKENDS, own_backends]
    return [
        folder
        for parent in parents
        if parent.is_dir()
        for folder in sorted(parent.iterdir())
        if folder.is_dir() and folder.name[0] not in "._" and any(folder.iterdir())
    ]


def read_platform() -> Platform:
    """Looks at this machine and this Python; imports nothing heavy."""
    wheel = find_wheel()
    return Platform(
        system=sys.platform,
        processor=platform.machine(),
        glibc=_glibc(),
        python_version="{}.{}".format(*sys.version_info),
        python_prefix=sys.base_prefix,
        stub_versions=wheel.stub_versions() if wheel is not None else (),
        libpython=_libpython(),
        numpy_version=package_version("numpy"),
    )


def find_wheel() -> Wheel | None:
    """The installed wheel's pieces; None where it is not installed. Imports nothing of it."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        package = Path(location)
        if (package / "tritonserver" / "bin" / "tritonserver").is_file():
            return Wheel(package / "tritonserver", package.parent / "nvidia_pytriton.libs")
    return None


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _glibc() -> tuple[int, int] | None:
    library, version = platform.libc_ver()
    if library != "glibc":
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _libpython() -> Path | None:
    name = "libpython{}.{}.so.1.0".format(*sys.version_info)
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        f"{sys.base_prefix}/lib",
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
    ]
    there = (Path(folder) for folder in folders if folder)
    return next((folder for folder in there if (folder / name).exists()), None)
