"""Required packages: the command that installs them, tested versions, and downloads of wheels."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from triptych.base.errors import UserError

NAME = "triptych"
BASE = ""
"""Key of the packages that every installation requires, beside the names of the extras."""
_TESTED_FILE = Path(__file__).parents[1] / "constraints.txt"


def requirements_by_extra() -> dict[str, dict[str, str]]:
    """Return the requirements of each extra by the name of the package, such as ``numpy==1.26.4``.

    The result is empty if the project is not installed, as in an image.
    """
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if package:
            key = extra[1] if extra else BASE
            extras.setdefault(key, {})[package[0]] = requirement.strip()
    return extras


def install_command(extra: str, only: Iterable[str] = ()) -> str:
    """Return the command that installs the packages of an extra from the package index.

    Args:
        extra: Name of the extra, or `BASE`.
        only: Names of packages of the extra; empty for all of them.
    """
    packages = requirements_by_extra().get(extra, {})
    wanted = [packages.get(name, name) for name in only] or list(packages.values())
    if not wanted:
        return f"pip install -e .[{extra}]"
    return f"pip install {' '.join(map(shlex.quote, wanted))}"


@contextmanager
def imports_of_extra(extra: str, field: str, rule: str = "") -> Iterator[None]:
    """Let an `ImportError` of the block name the command that installs the packages of an extra.

    Args:
        extra: Name of the extra.
        field: Field of the error.
        rule: Rule of the error; empty for one that names the extra.

    Raises:
        UserError: The block cannot import a package.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            field,
            rule or f"needs the packages of the extra `{extra}`",
            given=error,
            remedy=f"Run `{install_command(extra)}`",
        ) from error


def tested_versions() -> dict[str, str]:
    """Return the tested version of each package."""
    return dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", _TESTED_FILE.read_text(encoding="utf-8")))


def find_untested() -> dict[str, tuple[str, str]]:
    """Return the installed and the tested version of each package of which these differ."""
    found = {}
    for name, tested in tested_versions().items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if installed != tested:
            found[name] = (installed, tested)
    return found


def download_wheels(
    wanted: Sequence[str], folder: Path, *options: str, timeout_s: float = 600.0
) -> str:
    """Download the wheels of requirements such as ``numpy==1.26.4``, without what these require.

    Args:
        wanted: Requirements.
        folder: Folder for the wheels.
        options: Further options of ``pip download``, such as ``--platform=manylinux2014_x86_64``.
        timeout_s: Maximum time in seconds.

    Returns:
        Error of pip; empty if every wheel was downloaded.
    """
    command = [
        *(sys.executable, "-m", "pip", "download", *wanted, "--dest", str(folder)),
        *("--no-deps", "--only-binary=:all:", "--quiet", *options),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if "ERROR" in line] or lines
    return errors[-1] if errors else f"pip ended with {done.returncode}"
