"""Extra packages that this project declares, and the command that installs them."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

NAME = "triptych"
COMMAND_LINE = "cli"


def extra_requirements() -> dict[str, dict[str, str]]:
    """Return the requirements of each extra by the name of the package, such as ``numpy<2``.

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
        if package and extra and package[0] != NAME:
            extras.setdefault(extra[1], {})[package[0]] = requirement.strip()
    # An extra brings the command line with it, whose packages are not listed again.
    common = extras.get(COMMAND_LINE, {}).keys()
    for extra_name, packages in extras.items():
        if extra_name != COMMAND_LINE:
            for name in packages.keys() & common:
                del packages[name]
    return extras


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra from the package index."""
    packages = extra_requirements().get(extra)
    if not packages:
        return f"pip install -e .[{extra}]"
    return f"pip install {' '.join(map(shlex.quote, packages.values()))}"
