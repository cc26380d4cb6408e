"""Archive of the Python packages that the steps need, for images without them.

NVIDIA's `tritonserver` image has no tokenizers and no Pillow. A step whose config names an archive
in EXECUTION_ENV_PATH runs in the environment that the archive contains. Until 25.07 the Python
backend sources ``bin/activate`` of the archive, later it only puts ``bin`` on PATH
(`StubLauncher::Launch` of python_backend). Both lead the embedded interpreter to ``bin/python3``
and the file ``pyvenv.cfg`` beside ``bin``, as in a virtual environment of the image's own Python.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.extras import download_wheels
from triptych.base.releases import Release, parse_release
from triptych.spec.plan import Plan

ENV_FILE = "python_env.tar.gz"
"""Name of the archive in the folder of a step's model."""
ENV_PARAMETER = "EXECUTION_ENV_PATH"
ENV_PATH = f"$$TRITON_MODEL_DIRECTORY/{ENV_FILE}"
"""Value of `ENV_PARAMETER`; the Python backend replaces the variable."""
PYTHON_VERSIONS = {"3.10": Release(24, 10), "3.12": Release(99, 12)}
"""Python of the images, and the last release that has it; none is known to end 3.12."""
IMAGE_PYTHON = "/usr/bin"
"""Folder of the image's Python."""
_FETCH_TIMEOUT_S = 300

_NO_BYTE_CODE = b"import sys; sys.dont_write_bytecode = True\n"
"""Line that Python runs at start: steps write no byte code into the model repository."""

_ACTIVATE = """\
export VIRTUAL_ENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="${VIRTUAL_ENV}/bin:${PATH}"
unset PYTHONHOME
"""


def make_python_env(plan: Plan, progress: Progress) -> Path:
    """Return the archive for the steps of a pipeline, from the cache.

    It has the packages that the steps import and those that the spec names, in the versions that
    the build checks them with, for the Python of every image from `serving.triton` on. They are
    fetched from the package index once.

    Raises:
        UserError: A package is not installed, the package index is not reached, or has no wheel.
    """
    packages = ["tokenizers" if plan.info.image is None else "pillow"]
    if plan.info.own is not None:
        packages = ["pillow", "tokenizers"]  # the user's functions may import them
    named = plan.spec.serving.python_env
    packages += with_required(named) if isinstance(named, list) else []
    versions = versions_of(*sorted({"numpy", *packages}))
    oldest = parse_release(plan.spec.serving.triton)
    pythons = [python for python, last in PYTHON_VERSIONS.items() if oldest <= last]
    inputs = {
        "packages": versions,
        "python": pythons,
        "code": code_hash("repository/python_env.py"),
    }

    def work(folder: Path) -> None:
        wheels = {python: fetch_wheels(versions, python, folder / python) for python in pythons}
        (folder / ENV_FILE).write_bytes(pack_env(wheels))
        for files in wheels.values():
            for wheel in files:
                wheel.unlink()

    stage = cached_stage("python_env", inputs, work, progress)
    return stage.folder / ENV_FILE


def with_required(packages: Sequence[str]) -> list[str]:
    """Return the names of installed packages and of the packages that they require.

    Raises:
        UserError: One of `packages` is not installed.
    """
    found: dict[str, None] = {}
    pending = list(packages)
    while pending:
        name = _canonical(pending.pop())
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            if name not in map(_canonical, packages):
                continue  # of another platform or version of Python
            raise UserError(
                "serving.python_env",
                "must name packages that are installed here, because the build runs your functions",
                given=name,
                remedy=f"Run `pip install {name}`, or correct the name",
            ) from None
        found[name] = None
        for line in required:
            wanted, _, marker = line.partition(";")
            if "extra" not in marker:
                pending += re.findall(r"^[\w.-]+", wanted)
    return list(found)


def _canonical(name: str) -> str:
    """Return the name of a package as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(packages: Sequence[str]) -> set[str]:
    """Return the names of the modules that installed packages, and those they require, have."""
    known = set(with_required(packages))
    return {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not known.isdisjoint(map(_canonical, owners))
    }


def fetch_wheels(versions: Mapping[str, str], python: str, folder: Path) -> list[Path]:
    """Download the wheels of packages for a version of Python on Linux x86-64.

    Args:
        versions: Version of each package.
        python: Version of Python such as ``3.12``.
        folder: Folder for the wheels.

    Raises:
        UserError: The package index is not reached, or has no such wheel.
    """
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (35, 28, 17)]
    complaint = download_wheels(
        wanted,
        folder,
        f"--python-version={python}",
        *platforms,
        "--platform=manylinux2014_x86_64",
        timeout_s=_FETCH_TIMEOUT_S,
    )
    if complaint:
        raise UserError(
            "serving.python_env",
            f"needs wheels of {', '.join(wanted)} for Python {python} from the package index",
            given=complaint,
            remedy="Check the connection, set serving.triton to a release whose image has a newer "
            "Python, or remove the field and serve with an image that has the packages",
        )
    return sorted(folder.glob("*.whl"))


def pack_env(wheels: Mapping[str, Sequence[Path]], *, home: str = IMAGE_PYTHON) -> bytes:
    """Return the archive; equal wheels give equal bytes.

    Args:
        wheels: Wheels by version of Python.
        home: Folder of the Python that the environment extends.
    """
    files = {
        "bin/activate": _ACTIVATE.encode(),
        # The interpreter in the step only looks for an executable file of this name.
        "bin/python3": f'#!/bin/sh\nexec {home}/python3 "$@"\n'.encode(),
        "pyvenv.cfg": f"home = {home}\ninclude-system-site-packages = true\n".encode(),
    }
    for python, paths in wheels.items():
        files[f"lib/python{python}/site-packages/triptych.pth"] = _NO_BYTE_CODE
        for name, content in _contents(paths):
            files[f"lib/python{python}/site-packages/{name}"] = content
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            member.mode = 0o755 if name.startswith("bin/") or ".so" in name else 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()


def _contents(wheels: Iterable[Path]) -> Iterable[tuple[str, bytes]]:
    """Yield the files of wheels as they lie in ``site-packages``, without tests and headers."""
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                parts = Path(name).parts
                if not name.endswith("/") and "tests" not in parts and "include" not in parts:
                    yield name, wheel.read(name)
