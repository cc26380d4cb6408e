"""The Python sources of a step, parsed: what they import and which files they read."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception")


@dataclass(frozen=True)
class Source:
    """One parsed file.

    Attributes:
        path: of the file.
        file: the same, relative to the repository.
        tree: its syntax tree; an empty module when it does not parse.
        problem: why it does not parse, with the line; empty when it does.
    """

    path: Path
    file: str
    tree: ast.Module
    problem: str

    @property
    def folder(self) -> str:
        """Its folder, relative to the repository."""
        return self.file.rpartition("/")[0]


def read_sources(folders: Iterable[Path], root: Path) -> tuple[Source, ...]:
    """The Python files in `folders` and below them; paths in messages are relative to `root`."""
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return tuple(_read_source(path, path.relative_to(root).as_posix()) for path in paths)


def _read_source(path: Path, file: str) -> Source:
    problem, tree = "", ast.Module(body=[], type_ignores=[])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python merely doubts is not lint's concern
            tree = ast.parse(path.read_bytes())
    except SyntaxError as broken:
        problem = f"line {broken.lineno}: {broken.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as broken:
        problem = f"{type(broken).__name__}: {broken}"
    return Source(path, file, tree, problem)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The modules a file needs, as (dotted name, level): level 0 is absolute, 1 a sibling.

    Imports that may fail (under ``try``/``except ImportError``) or that only a type checker runs
    are left out.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.level
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.level) for alias in node.names)
        pending += _needed_children(node)


def _needed_children(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Try) and any(map(_catches_import_error, node.handlers)):
        return [*node.orelse, *node.finalbody]
    if isinstance(node, ast.If) and _mentions(node.test, "TYPE_CHECKING"):
        return list(node.orelse)
    return list(ast.iter_child_nodes(node))


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(_mentions(handler.type, name) for name in _IMPORT_ERRORS)


def files_beside(tree: ast.Module) -> set[str]:
    """Names of the files that a source looks for in its own folder.

    It knows ``Path(__file__).with_name("x")`` and ``Path(__file__).parent / "x"``.
    """
    places = (_place_beside(node) for node in ast.walk(tree))
    return {
        str(name.value)
        for place, name in filter(None, places)
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
        if _mentions(place, "__file__")
    }


def _place_beside(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The two operands of ``place.with_name(name)`` or ``place.parent / name``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        return (node.func.value, node.args[0]) if node.func.attr == "with_name" else None
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Attribute):
        is_parent = isinstance(node.op, ast.Div) and node.left.attr == "parent"
        return (node.left.value, node.right) if is_parent else None
    return None


def _mentions(node: ast.AST, name: str) -> bool:
    return any(
        name in (getattr(child, "id", None), getattr(child, "attr", None))
        for child in ast.walk(node)
    )


def defines(tree: ast.Module, name: str) -> bool:
    """Whether a function or method `name` is defined anywhere in a source."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def defined_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """What a module defines, imports or assigns at its top level, by name; ``*`` for a star."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            found.update((t.id, node) for t in node.targets if isinstance(t, ast.Name))
    return found
