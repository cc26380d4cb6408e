"""The wheels of this project, and environments of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pip(*words: str | Path) -> None:
    """Run pip; fail with what it says."""
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_wheels(folder: Path) -> tuple[Path, Path]:
    """The wheels of triptych and of its client, as `make wheel` builds them."""
    sources = (ROOT / "build_scripts/client", ROOT)
    pip("wheel", *sources, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    ((package,), (client,)) = (
        folder.glob(f"{name}-*.whl") for name in ("triptych", "triptych_client")
    )
    return package, client


def new_environment(folder: Path, *packages: str | Path, python: str = sys.executable) -> Path:
    """Install packages into a fresh virtual environment; the folder of its programs."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    pip("--python", folder / "bin/python", "install", "--no-compile", *packages)
    return folder / "bin"
