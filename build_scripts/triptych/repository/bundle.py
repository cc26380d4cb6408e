"""Copy the modules of the runtime that a pipeline uses into its steps.

A module is copied as it stands in the source, with all modules that it imports. A module that
several steps use is a file of the first one and a link in the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

RUNTIME = Path(__file__).parents[1] / "runtime"
MAIN_FILE = "model.py"
_IMPORT = re.compile(r"^from \.(\w+) import ", re.MULTILINE)


class Link(NamedTuple):
    """A symbolic link in a version folder to a file of another step."""

    path: str  # Path of that file relative to the repository

    @property
    def target(self) -> str:
        """The path relative to the version folder, two levels below the repository."""
        return f"../../{self.path}"


def bundle(
    steps: Mapping[str, Sequence[str]], sources: Mapping[str, Path] | None = None
) -> dict[str, bytes | Link]:
    """Return the Python files of steps by path relative to the repository.

    Args:
        steps: Version folder of each step to the modules that it needs. The first one becomes
            ``model.py``.
        sources: Files of modules that are not in the runtime under their own name.
    """
    named = sources or {}
    files: dict[str, bytes | Link] = {}
    owners: dict[str, str] = {}
    for folder, (main, *others) in steps.items():
        texts = _read_modules([main, *others], named)
        files[f"{folder}/{MAIN_FILE}"] = texts.pop(main)
        for module, text in sorted(texts.items()):
            owner, file = owners.setdefault(module, folder), f"{module}.py"
            files[f"{folder}/{file}"] = text if owner == folder else Link(f"{owner}/{file}")
    return files


def _read_modules(names: Iterable[str], sources: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the text of modules and of all that they import, by name."""
    texts: dict[str, bytes] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = sources.get(name, RUNTIME / f"{name}.py").read_bytes()
            waiting += _IMPORT.findall(texts[name].decode())
    return texts
