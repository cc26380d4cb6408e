"""A real Prometheus and Alertmanager: Debian's packages, unpacked and not installed.

The packages are downloaded once and checked by their hashes. Programs on the PATH are preferred;
on another distribution install both.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.model import ROOT

PACKAGES = {
    "prometheus=2.42.0+ds-5+deb12u1": (
        "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
    ),
    "prometheus-alertmanager=0.25.0-1+b4": (
        "4fb9aed15cfe8e0c32408e643ab32a1e41ee87d2cc26f18aeba928b1b0b98ae7"
    ),
}
"""SHA-256 of each package's file."""
TOOLS = {
    "prometheus": "prometheus",
    "promtool": "promtool",
    "alertmanager": "prometheus-alertmanager",
    "amtool": "amtool",
}
"""Debian's name of each program."""
_TEMPLATES = "usr/share/prometheus/alertmanager"
FOLDER = ROOT / ".cache" / "prometheus" / "-".join(version.split("=")[1] for version in PACKAGES)


def tool(name: str) -> Path:
    """Return the program, which is downloaded if it is not installed."""
    for each in (name, TOOLS[name]):
        if found := shutil.which(each):
            return Path(found)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that waits finds the files of the other
        if not FOLDER.is_dir():
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
                _unpack(_fetch(Path(scratch)), Path(scratch) / "ready")
                (Path(scratch) / "ready").rename(FOLDER)
    return FOLDER / "usr/bin" / TOOLS[name]


def home(name: str) -> Path:
    """Return the working directory that a tool requires."""
    return tool(name).parents[2] / _TEMPLATES if name == "alertmanager" else Path.cwd()


@contextmanager
def running(folder: Path, name: str, *flags: str) -> Iterator[None]:
    """Run the program while the block runs; its log is in `folder`."""
    with (folder / f"{name}.log").open("w") as log:
        words = [str(tool(name)), *flags]
        process = subprocess.Popen(words, cwd=home(name), stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(300)


def _fetch(folder: Path) -> list[Path]:
    """Download the packages; return their files.

    In a container without package lists, the lists are downloaded into `folder` first.
    """
    done = _apt(folder, "download", *PACKAGES)
    if done.returncode != 0:
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        own = (f"--option=Dir::State={folder}/state", f"--option=Dir::Cache={folder}/cache")
        done = _apt(folder, *own, "update")
        assert done.returncode == 0, f"apt-get update must work: {done.stderr}"
        done = _apt(folder, *own, "download", *PACKAGES)
    assert done.returncode == 0, f"apt-get download {' '.join(PACKAGES)} must work: {done.stderr}"
    files = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in folder.glob("*.deb")}
    assert set(files) == set(PACKAGES.values()), files
    return list(files.values())


def _apt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "--quiet", *words], cwd=folder, capture_output=True, text=True, timeout=300
    )


def _unpack(packages: list[Path], target: Path) -> None:
    for package in packages:
        subprocess.run(["dpkg", "-x", package, target], check=True, timeout=120)
    # Debian's build reads its templates from a folder that exists only once it is installed.
    program = target / "usr/bin" / TOOLS["alertmanager"]
    here = b"/proc/self/cwd".ljust(len(_TEMPLATES) + 1, b"/")
    program.write_bytes(program.read_bytes().replace(b"/" + _TEMPLATES.encode(), here))
