"""The Python sources of a step, parsed: what they import and which files they read."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}
_HOLDS_IMPORTS = (ast.stmt, ast.excepthandler, ast.match_case)
_remembered = lru_cache(maxsize=128)
"""Steps share most of their files, and so do the builds of one process."""


class Source:
    """One parsed file.

    Attributes:
        file: its path relative to the repository; `folder` likewise.
        tree: an empty module when it does not parse; shared by files of the same content.
        problem: why it does not parse, with the line; empty when it does.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.file = path, path.relative_to(root).as_posix()
        self.folder = self.file.rpartition("/")[0]
        self.tree, self.problem = ast.Module(body=[], type_ignores=[]), ""
        try:
            self.tree = _parsed(path.read_bytes())
        except SyntaxError as broken:
            self.problem = f"line {broken.lineno}: {broken.msg}"
        except (OSError, ValueError, RecursionError, MemoryError) as broken:
            self.problem = f"{type(broken).__name__}: {broken}"


@_remembered
def _parsed(content: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Python merely doubts is not lint's concern
        return ast.parse(content)


def read_sources(folders: Iterable[Path], root: Path) -> list[Source]:
    """The Python files in `folders` and below them; paths in messages are relative to `root`."""
    return [Source(path, root) for folder in folders for path in sorted(folder.rglob("*.py"))]


@_remembered
def imports_of(tree: ast.Module, level: int) -> frozenset[str]:
    """The top-level modules a file needs: absolute at level 0, siblings at level 1.

    Imports that may fail (under ``try``/``except ImportError``) or that only a type checker runs
    are left out.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.level == level:
            found.update([node.module] if node.module else (alias.name for alias in node.names))
        elif isinstance(node, ast.Import) and level == 0:
            found.update(alias.name for alias in node.names)
        pending += [child for child in _needed_children(node) if isinstance(child, _HOLDS_IMPORTS)]
    return frozenset(name.partition(".")[0] for name in found)


def _needed_children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Try) and any(
        handler.type is None or _mentions(handler.type, _IMPORT_ERRORS) for handler in node.handlers
    ):
        return [*node.orelse, *node.finalbody]
    if isinstance(node, ast.If) and _mentions(node.test, {"TYPE_CHECKING"}):
        return node.orelse
    return ast.iter_child_nodes(node)


@_remembered
def files_beside(tree: ast.Module) -> frozenset[str]:
    """Names of the files that a source looks for in its own folder.

    It knows ``Path(__file__).with_name("x")`` and ``Path(__file__).parent / "x"``.
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(place, "with_name"), [ast.Constant(str(name)), *_]
            ) | ast.BinOp(ast.Attribute(place, "parent"), ast.Div(), ast.Constant(str(name))):
                if _mentions(place, {"__file__"}):
                    found.add(name)
    return frozenset(found)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        getattr(child, "id", None) in names or getattr(child, "attr", None) in names
        for child in ast.walk(node)
    )


@_remembered
def defines(tree: ast.Module, name: str) -> bool:
    """Whether a function or method `name` is defined anywhere in a source."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def defined_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """What a module defines, imports or assigns at its top level, by name; ``*`` for a star."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name):
                found[name] = node
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                found.update((alias.asname or alias.name, node) for alias in aliases)
            case ast.Assign(targets):
                found.update((t.id, node) for t in targets if isinstance(t, ast.Name))
    return found
