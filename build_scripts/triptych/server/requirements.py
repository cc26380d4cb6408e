"""What the embedded tritonserver needs of a machine: the facts, read once, and the rules."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

INSTALL_LOCAL = "pip install -e .[local]"
STUB = "triton_python_backend_stub"
_GLIBC_MIN = (2, 35)


@dataclass(frozen=True)
class Wheel:
    """Where the `nvidia-pytriton` wheel put its pieces.

    Attributes:
        server: the folder with ``bin``, ``backends`` and ``python_backend_stubs``.
        libraries: the folder of the shared libraries that the binaries were linked with.
    """

    server: Path
    libraries: Path

    @property
    def executable(self) -> Path:
        """The server program."""
        return self.server / "bin" / "tritonserver"

    @property
    def python_backend(self) -> Path:
        """The folder with the Python backend's library and its helper module."""
        return self.server / "backends" / "python"

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
        system: as `sys.platform` has it: ``linux``.
        processor: as `platform.machine` has it: ``x86_64``.
        glibc: the C library's version; None where it is another C library.
        python_version: of this Python, as the stubs are named: ``3.11``.
        python_prefix: the installation that this Python belongs to.
        stub_versions: the Python versions that the wheel has a stub for; empty without a wheel.
        libpython: the folder of this Python's shared library; None without one.
        numpy_version: None where numpy is missing.
    """

    system: str
    processor: str
    glibc: tuple[int, int] | None
    python_version: str
    python_prefix: str
    stub_versions: tuple[str, ...]
    libpython: Path | None
    numpy_version: str | None


@dataclass(frozen=True)
class Requirement:
    """One thing that the embedded server needs.

    Attributes:
        id: stable name, in kebab case.
        rule: what must hold, as the end of a sentence that begins with the subject.
        holds: whether it does.
        given: what there is.
        remedy: what to do where it does not hold.
    """

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


def read_platform() -> Platform:
    """The facts of this machine and this Python; imports nothing heavy."""
    wheel = find_wheel()
    return Platform(
        system=sys.platform,
        processor=platform.machine(),
        glibc=_glibc(),
        python_version=python_version(),
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


def python_version() -> str:
    """This Python's version as the stubs are named: ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


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
    name = f"libpython{python_version()}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        f"{sys.base_prefix}/lib",
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
    ]
    there = (Path(folder) for folder in folders if folder)
    return next((folder for folder in there if (folder / name).exists()), None)
