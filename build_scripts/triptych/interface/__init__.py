"""Command line, Python functions, demo page and reports."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def main() -> None:
    """Run the ``triptych`` command."""
    _drop_foreign_folders()
    from triptych.interface import cli

    cli.main()


def _drop_foreign_folders() -> None:
    """Import only from the interpreter and this package, also in processes that are started.

    Folders of this package in PYTHONPATH stay: the images set them.
    """
    own = [Path(__file__).parents[2], Path(os.__file__).parent, *map(Path, site.getsitepackages())]
    given = os.environ.pop("PYTHONPATH", "")
    folders = [Path(folder).resolve() for folder in given.split(os.pathsep) if given]
    kept = [each for each in folders if any(each.is_relative_to(one.resolve()) for one in own)]
    if foreign := [folder for folder in folders if folder not in kept]:
        sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() not in foreign]
        print(f"warning: nothing is imported from PYTHONPATH ({given})", file=sys.stderr)
    for name in ("PYTHONHOME", "PYTHONSTARTUP"):
        os.environ.pop(name, None)
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, kept))
    os.environ["PYTHONSAFEPATH"] = "1"
