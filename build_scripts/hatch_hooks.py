"""Hooks of hatchling: which files and which versions the wheels triptych and triptych-client have.

Both wheels install into one package. The client's has `triptych.client` and the modules that it
imports; the other one has the rest, and requires the client's wheel of the same version.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path(__file__).parent
PACKAGE = SOURCES / "triptych"
CLIENT = "triptych-client"


class Files(BuildHookInterface[Any]):
    """Selects the files of a wheel; an installation in editable mode has all of them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files of this wheel to those that hatchling writes."""
        if version == "editable":
            return
        client = {*modules_of("triptych.client"), PACKAGE / "py.typed"}
        is_client = self.metadata.core.name == CLIENT
        for path in sorted(PACKAGE.rglob("*")):
            is_source = path.is_file() and "__pycache__" not in path.parts
            if is_source and (path in client) == is_client:
                build_data["force_include"][str(path)] = str(path.relative_to(SOURCES))


def modules_of(name: str, found: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Return the files of a module, its packages, and all modules of Triptych that it imports."""
    base = SOURCES.joinpath(*name.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if path in found or not path.is_file():
        return found
    found = (*found, path)
    if "." in name:
        found = modules_of(name.rpartition(".")[0], found)
    if path.parent == PACKAGE:  # imports at the first use of a name
        return found
    package = name if base.is_dir() else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module}" if node.level else str(node.module)
            if module.startswith("triptych."):
                found = modules_of(module, found)
                for imported in node.names:  # a module of a package, or a name in a module
                    found = modules_of(f"{module}.{imported.name}", found)
    return found


class Requirements(MetadataHookInterface):
    """Pins what the wheel triptych requires to the versions that were tested together."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the version of the client, or the dependencies and the extras of triptych."""
        if metadata["name"] == CLIENT:
            text = (SOURCES.parent / "pyproject.toml").read_text(encoding="utf-8")
            metadata["version"] = re.findall(r'(?m)^version = "(.+)"$', text)[0]
            return
        tested = dict(
            re.findall(
                r"(?m)^([\w.-]+)==([^+\s]+)",
                (PACKAGE / "constraints.txt").read_text(encoding="utf-8"),
            )
        )

        def pin(requirement: str) -> str:
            package = requirement.partition("[")[0]
            return f"{requirement}=={tested[package]}" if package in tested else requirement

        client = f"{CLIENT}=={metadata['version']}"
        metadata["dependencies"] = [client, *map(pin, self.config["dependencies"])]
        metadata["optional-dependencies"] = {
            extra: [*map(pin, packages)] for extra, packages in self.config["extras"].items()
        }
