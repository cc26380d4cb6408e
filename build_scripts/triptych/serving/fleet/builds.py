"""What replicas serve: a repository as it was at one time, whatever is built into it later.

A build swaps whole models and changes no file in place, so that links to its files keep what
they hold.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from triptych.base.files import told_to_user
from triptych.repository.kept import link
from triptych.repository.store import locked


@dataclass(frozen=True, order=True)
class Build:
    """One of them: a later one has a higher number."""

    number: int
    folder: Path


def keep_build(repository: Path, home: Path, number: int) -> Build:
    """Keep what the repository holds now, in a folder that is made in `home`.

    Raises:
        UserError: a build writes into the repository just now, or there is no room.
    """
    folder = home / f"build-{number}"
    with told_to_user(folder), locked(repository):
        shutil.copytree(
            repository,
            folder,
            copy_function=_link,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return Build(number, folder)


def _link(source: str, target: str) -> str:
    link(Path(source).resolve(), Path(target))
    return target
