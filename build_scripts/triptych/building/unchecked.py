"""An edit of ``hooks.py`` put into a build before the accuracy gate has run, for `triptych dev`."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from triptych.repository.manifest import (
    MANIFEST_FILE,
    build_id,
    print_manifest,
    read_manifest_data,
)
from triptych.repository.render import Content
from triptych.repository.store import write_models
from triptych.runtime.hooking import HOOKS_FILE

REASON = "hooks.py was edited, and the accuracy gate has not run yet"
"""Reason in the build manifest of a build with an edited hook."""


def write_unchecked(folder: Path, repository: Path) -> str:
    """Put the edited hooks of the pipeline in `folder` into its build, which is marked.

    The mark is a gate that was accepted for `REASON`. Nothing else of the build changes, so that
    the edit must keep the functions of the hooks and their parameters.

    Returns:
        Id of the replaced build, for `repository.history.rollback`; empty if nothing was written.
    """
    name = folder.name
    manifest = read_manifest_data(repository, name)
    places = [path for path in manifest.get("files", ()) if path.endswith(f"/{HOOKS_FILE}")]
    edited = folder / HOOKS_FILE
    if not places or not edited.is_file():
        return ""
    new, old = edited.read_bytes(), (repository / places[0]).read_bytes()
    if new == old or _signatures(new) != _signatures(old):
        return ""
    before = build_id(repository, name)
    models = {name, *(place.partition("/")[0] for place in places)}
    contents: dict[str, Content] = {
        path.relative_to(repository).as_posix(): path
        for model in models
        for path in (repository / model).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    for place in places:
        manifest["files"][place] = hashlib.sha256(new).hexdigest()
        if not (repository / place).is_symlink():
            contents[place] = new
    manifest["gate"] = {**(manifest.get("gate") or {}), "accepted": REASON}
    contents[f"{name}/{MANIFEST_FILE}"] = print_manifest(manifest)
    return before if write_models(repository, contents, keeps_links=True) else ""


def _signatures(code: bytes) -> dict[str, str] | None:
    """Return the parameters of each function of a module; None if it does not parse."""
    try:
        nodes = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    return {node.name: ast.dump(node.args) for node in nodes if isinstance(node, ast.FunctionDef)}
