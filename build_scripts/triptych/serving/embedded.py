"""Find a tritonserver: on PATH, or else assembled from the `nvidia-pytriton` wheel."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.base.extras import BASE, install_command
from triptych.base.releases import Release
from triptych.container.entrypoint import find_release as find_image_release
from triptych.container.supervisor import STUB
from triptych.serving.generation_environment import step_variables

# Release of the server in the `nvidia-pytriton` wheel.
EMBEDDED_RELEASE = Release(24, 10)
_GLIBC_MIN = (2, 35)
_MIN_FREE_MIB = 8
TEMPORARY_RULE = (
    f"must be a writable folder with {_MIN_FREE_MIB} MiB free, on a mount without `noexec`: the "
    "embedded server runs its backends and their steps there"
)
"""Rule of the folder for temporary files."""
TEMPORARY_REMEDY = "Set TMPDIR to another folder"
_NOT_CODE = shutil.ignore_patterns("__pycache__")
_EMULATED_BACKENDS = Path(__file__).parent / "backends"


class Wheel(NamedTuple):
    """Folders of the installed `nvidia-pytriton` wheel: the server and its libraries."""

    server: Path
    libraries: Path

    @property
    def executable(self) -> Path:
        return self.server / "bin" / "tritonserver"

    def stub(self, python_version: str) -> Path:
        """Return the path of the stub for a Python version such as ``3.11``; it need not exist."""
        return self.server / "python_backend_stubs" / python_version / STUB

    def stub_versions(self) -> tuple[str, ...]:
        """Return the Python versions that have a stub, lowest first."""
        found = [path.parent.name for path in self.server.glob(f"python_backend_stubs/*/{STUB}")]
        return tuple(sorted(found, key=lambda version: int(version.rpartition(".")[2])))


@dataclass(frozen=True)
class Platform:
    """Properties of this machine and its Python that the embedded server requires."""

    system: str
    processor: str
    glibc: tuple[int, int] | None  # Version of glibc; None for another C library
    python_version: str  # Version of this Python, such as ``3.11``
    python_prefix: str  # Prefix of this Python's installation
    # Python versions with a stub in the wheel; empty without the wheel.
    stub_versions: tuple[str, ...]
    libpython: Path | None  # Folder of this Python's shared library; None without one
    numpy_version: str | None


class Requirement(NamedTuple):
    """Requirement of the embedded server; `rule` is the predicate of a sentence about it."""

    id: str
    rule: str
    holds: Callable[[Platform], bool]
    given: Callable[[Platform], str]
    remedy: str


REQUIREMENTS = (
    Requirement(
        "embedded-platform",
        "must run on x86-64 Linux",
        lambda machine: (machine.system, machine.processor) == ("linux", "x86_64"),
        lambda machine: f"{machine.processor} {machine.system}",
        "Use an NGC tritonserver container",
    ),
    Requirement(
        "embedded-glibc",
        f"needs glibc {_GLIBC_MIN[0]}.{_GLIBC_MIN[1]} or later",
        lambda machine: machine.glibc is not None and machine.glibc >= _GLIBC_MIN,
        lambda machine: (
            f"glibc {machine.glibc[0]}.{machine.glibc[1]}" if machine.glibc else "no glibc"
        ),
        "Use a newer distribution (Ubuntu 22.04, Debian 12) or an NGC tritonserver container",
    ),
    Requirement(
        "embedded-wheel",
        "needs the `nvidia-pytriton` wheel",
        lambda machine: bool(machine.stub_versions),
        lambda machine: "installed" if machine.stub_versions else "not installed",
        f"Run `{install_command(BASE, ['nvidia-pytriton'])}`, "
        "or run inside an NGC tritonserver container",
    ),
    Requirement(
        "embedded-stub",
        "needs a stub for this Python",
        lambda machine: machine.python_version in machine.stub_versions,
        lambda machine: (
            f"Python {machine.python_version}; stubs: {', '.join(machine.stub_versions) or 'none'}"
        ),
        "Create the virtual environment with a Python version that has a stub",
    ),
    Requirement(
        "embedded-libpython",
        "needs the shared library of this Python, because its Python steps link it",
        lambda machine: machine.libpython is not None,
        lambda machine: str(machine.libpython or f"{machine.python_prefix}, built without one"),
        "Install the distribution's libpython of this version (libpython3.11 and the like), or "
        "use a Python configured with --enable-shared",
    ),
    Requirement(
        "embedded-numpy",
        "needs numpy < 2, because its Python steps misread strings and crash with numpy 2",
        lambda machine: (
            machine.numpy_version is not None and machine.numpy_version.startswith(("0.", "1."))
        ),
        lambda machine: f"numpy {machine.numpy_version}" if machine.numpy_version else "no numpy",
        "Run `pip install 'numpy<2'`",
    ),
)


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started."""

    executable: Path
    # Value of ``--backend-directory``; None for the server's default.
    backend_directory: Path | None = None
    python_backends: tuple[str, ...] = ("python",)  # Names of the backends that run Python stubs
    # Variables that override those of this process.
    environment: Mapping[str, str] = field(default_factory=dict)


def find_installation(private: Path, *, own_backends: Path | None = None) -> Installation:
    """Return the server to start.

    A ``tritonserver`` on PATH (inside an NGC container) is used with its own backends. Otherwise,
    or if `own_backends` is given, the embedded server is assembled in the empty folder `private`.

    Raises:
        UserError: No server is installed, or a part of the embedded server is missing.
    """
    on_path = shutil.which("tritonserver")
    if on_path and own_backends is None:
        # Without an activated environment, its Python steps would use another Python's packages.
        path = Path(on_path).absolute()
        return Installation(executable=path, environment={"PATH": server_path()})
    machine = read_platform()
    check_requirements(machine)
    if fault := find_temporary_fault() or find_temporary_fault(private.parent):
        raise UserError("TMPDIR", TEMPORARY_RULE, given=fault, remedy=TEMPORARY_REMEDY)
    wheel = find_wheel()
    if wheel is None or machine.libpython is None:
        raise RuntimeError("the requirements are met, so the wheel and libpython exist")
    return _assemble(wheel, machine, private / "backends", _backend_folders(own_backends))


def list_backends(folder: Path) -> list[str]:
    """Return the sorted names of Triton's compiled backends in a folder, each with a library.

    Raises:
        UserError: It has none, so that emulated backends would serve in their place.
    """
    found = sorted(p.parent.name for p in folder.glob("*/libtriton_*.so"))
    if not found:
        raise UserError(
            "--backend-directory",
            "must be a folder that holds a folder for each backend",
            given=folder,
            remedy="Give the folder that holds, for example, onnxruntime/libtriton_onnxruntime.so",
        )
    return found


def find_release(*, own_backends: Path | None = None) -> Release:
    """Return the release of the server that `find_installation` starts.

    Raises:
        UserError: The release of the tritonserver on PATH is unknown.
    """
    if own_backends is None and shutil.which("tritonserver"):
        return find_image_release(os.environ)
    return EMBEDDED_RELEASE


def find_temporary_fault(folder: Path | None = None) -> str:
    """Return the fault of a folder for temporary files; empty if the embedded server can run there.

    By default it is that of TMPDIR, in place of which Python may silently use another.
    """
    if folder is None:
        named = os.environ.get("TMPDIR")
        try:
            folder = Path(tempfile.gettempdir())
        except OSError as error:
            return str(error.strerror)
        if named and not (Path(named).exists() and folder.samefile(named)):
            return f"{named}, which is full or cannot be written"
    status = os.statvfs(folder)
    if status.f_flag & os.ST_NOEXEC:
        return f"{folder}, whose mount has `noexec`"
    free_mib = status.f_bavail * status.f_frsize >> 20
    return f"{folder}, with {free_mib} MiB free" if free_mib < _MIN_FREE_MIB else ""


def check_requirements(machine: Platform) -> None:
    """Check the requirements; raise `UserError` for the first one that is not met."""
    for _, rule, holds, given, remedy in REQUIREMENTS:
        if not holds(machine):
            raise UserError("embedded tritonserver", rule, given=given(machine), remedy=remedy)


def _assemble(
    wheel: Wheel, machine: Platform, directory: Path, backends: list[Path]
) -> Installation:
    python = directory / "python"
    python.mkdir(parents=True)
    # Copies, because the server refuses libraries outside the backend directory, also by links.
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copyfile(wheel.server / "backends" / "python" / name, python / name)
    shutil.copyfile(wheel.stub(machine.python_version), python / STUB)
    (python / STUB).chmod(0o755)
    for folder in backends:
        shutil.copytree(folder, directory / folder.name, dirs_exist_ok=True, ignore=_NOT_CODE)
    libraries = [wheel.libraries, machine.libpython, os.environ.get("LD_LIBRARY_PATH")]
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
    """Return PATH for the server; its stub finds packages through the first `python3` on it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _backend_folders(own_backends: Path | None) -> list[Path]:
    """Return folders of backends; those of the caller follow and so replace emulated ones."""
    if own_backends is not None and not own_backends.is_dir():
        raise UserError(
            "backend_directory",
            "must be a folder",
            given=own_backends,
            remedy="Give the folder that contains a folder for each backend",
        )
    parents = [_EMULATED_BACKENDS] if own_backends is None else [_EMULATED_BACKENDS, own_backends]
    return [
        folder
        for parent in parents
        if parent.is_dir()
        for folder in sorted(parent.iterdir())
        if folder.is_dir() and folder.name[0] not in "._" and any(folder.iterdir())
    ]


def read_platform() -> Platform:
    """Return the properties of this machine and this Python, without heavy imports."""
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
    """Return the folders of the installed wheel without importing it; None if not installed."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        package = Path(location)
        if (package / "tritonserver" / "bin" / "tritonserver").is_file():
            return Wheel(package / "tritonserver", package.parent / "nvidia_pytriton.libs")
    return None


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
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
    candidates = (Path(folder) for folder in folders if folder)
    return next((folder for folder in candidates if (folder / name).exists()), None)
