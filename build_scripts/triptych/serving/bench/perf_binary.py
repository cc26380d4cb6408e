"""Finding NVIDIA's perf_analyzer: the one on PATH, else the one in an older tritonclient wheel."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.serving.embedded import INSTALL_LOCAL, find_wheel

# The last release whose binary runs on glibc 2.35, like the embedded server; later ones need 2.38.
VERSION = "2.51.0"
_WHEEL_SHA256 = "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
DEFAULT_CACHE = Path(".cache") / "perf_analyzer"
_VERSION_TIMEOUT_S = 20.0
_FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PerfAnalyzer:
    binary: Path
    libraries: Path | None = None  # that it needs; None where the system has them

    def environment(self) -> dict[str, str]:
        variables = dict(os.environ)
        if self.libraries is not None:
            folders = [str(self.libraries.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if folder)
        return variables


def find_perf_analyzer(cache: Path = DEFAULT_CACHE) -> PerfAnalyzer:
    """The perf_analyzer on PATH if it runs, else the one in `cache`, fetched into it if need be.

    Raises:
        UserError: it can not be fetched, or does not run on this machine.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path and not _complaint(PerfAnalyzer(Path(on_path))):
        return PerfAnalyzer(Path(on_path))
    folder = cache / VERSION
    found = PerfAnalyzer(folder / "perf_analyzer", folder / "lib")
    if not _is_whole(folder):
        _check_platform()
        _install(folder)
    complaint = _complaint(found)
    if complaint:
        raise UserError(
            "perf_analyzer",
            "must run on this machine",
            given=complaint,
            remedy="Install the library that it names, or put another perf_analyzer on PATH",
        )
    return found


def _complaint(analyzer: PerfAnalyzer) -> str:
    """Why it does not run here; empty where it does."""
    try:
        done = subprocess.run(
            [analyzer.binary, "--version"],
            env=analyzer.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UserError(
            "perf_analyzer",
            "is published for x86-64 Linux only",
            given=f"{platform.machine()} {sys.platform}",
            remedy="Run the load from such a machine, or put a perf_analyzer of your own on PATH",
        )


def _is_whole(folder: Path) -> bool:
    links = [folder / "lib" / name for name in _LIBRARIES]
    return all(path.is_file() for path in (folder / "perf_analyzer", *links))


def _install(folder: Path) -> None:
    """Fetches the wheel and fills `folder`, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as name:
        scratch = Path(name)
        ready = scratch / "ready"
        ready.mkdir()
        _link_libraries(ready / "lib")
        binary = ready / "perf_analyzer"
        with zipfile.ZipFile(_fetch_wheel(scratch)) as wheel:
            member = next(n for n in wheel.namelist() if n.endswith("/data/bin/perf_analyzer"))
            binary.write_bytes(wheel.read(member))
        binary.chmod(0o755)
        if folder.exists():  # not whole: its links died with an environment that was removed
            folder.rename(scratch / "stale")
        try:
            ready.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process was faster
                raise


def _link_libraries(folder: Path) -> None:
    wheel = find_wheel()
    folder.mkdir()
    for name, pattern in _LIBRARIES.items():
        found = sorted(wheel.libraries.glob(pattern)) if wheel is not None else []
        if not found:
            raise UserError(
                "perf_analyzer",
                f"needs {name}, which comes with the `nvidia-pytriton` wheel",
                given="a wheel without it" if wheel else "no such wheel",
                remedy=f"Run `{INSTALL_LOCAL}`, or put a perf_analyzer that runs on PATH",
            )
        (folder / name).symlink_to(found[0].resolve())


def _fetch_wheel(folder: Path) -> Path:
    wanted = f"tritonclient=={VERSION}"
    remedy = "Check the connection to the package index, or put perf_analyzer on PATH"
    command = [sys.executable, "-m", "pip", "download", wanted, "--dest", str(folder), "--no-deps"]
    command += ["--only-binary=:all:", "--platform=manylinux1_x86_64", "--quiet"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
        )
        complaint = done.stderr.strip()
    except subprocess.TimeoutExpired:
        complaint = f"no answer within {_FETCH_TIMEOUT_S:g} s"
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        errors = [line for line in complaint.splitlines() if "ERROR" in line] or [complaint]
        raise UserError(
            "perf_analyzer",
            f"must be on PATH, or `pip download {wanted}` must work",
            given=errors[-1],
            remedy=remedy,
        )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise UserError(
            wanted, f"must have the SHA-256 {_WHEEL_SHA256}", given=digest, remedy=remedy
        )
    return wheel
