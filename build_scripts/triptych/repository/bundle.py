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


class StepCode(NamedTuple):
    """Code of a step.

    Attributes:
        modules: Modules that it loads by name. The first one becomes ``model.py`` without `bases`.
        bases: Base classes of the class in ``model.py``, such as ``preprocess.Preprocess``.
    """

    modules: Sequence[str]
    bases: Sequence[str] = ()


class Link(NamedTuple):
    """A symbolic link in a version folder to a file of another step."""

    path: str  # Path of that file relative to the repository

    @property
    def target(self) -> str:
        """The path relative to the version folder, two levels below the repository."""
        return f"../../{self.path}"


def bundle(
    steps: Mapping[str, StepCode], sources: Mapping[str, Path] | None = None
) -> dict[str, bytes | Link]:
    """Return the Python files of steps by path relative to the repository.

    Args:
        steps: Version folder of each step to its code.
        sources: Files of modules that are not in the runtime under their own name.
    """
    files: dict[str, bytes | Link] = {}
    owners: dict[str, str] = {}
    for folder, code in steps.items():
        named = [base.partition(".")[0] for base in code.bases]
        texts = _read_modules([*code.modules, *named], sources or {})
        main = _print_class(code.bases) if code.bases else texts.pop(code.modules[0])
        files[f"{folder}/{MAIN_FILE}"] = main
        for module, text in sorted(texts.items()):
            owner, file = owners.setdefault(module, folder), f"{module}.py"
            files[f"{folder}/{file}"] = text if owner == folder else Link(f"{owner}/{file}")
    return files


def _print_class(bases: Sequence[str]) -> bytes:
    """Return a module with the class that Triton calls."""
    pairs = [base.split(".") for base in bases]
    imports = "\n".join(sorted(f"from .{module} import {name}" for module, name in pairs))
    names = ", ".join(name for _, name in pairs)
    about = f"{pairs[-1][1]} with the parts that the pipeline uses"
    return f'''"""The step as Triton loads it."""

{imports}


class TritonPythonModel({names}):
    """{about}."""
'''.encode()


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
