"""Copy the parts of the runtime that a pipeline uses into its steps.

A definition is copied as it stands in the source, with the comments above it, if code that is
copied names it. A method is copied if such code names an attribute like it. A module that several
steps use is a file of the first one and a link in the others.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

RUNTIME = Path(__file__).parents[1] / "runtime"
MAIN_FILE = "model.py"
API = ("initialize", "execute", "finalize")
"""Methods of a step that Triton calls."""
_PLAIN_BASES = ("ABC", "NamedTuple", "Protocol", "Exception")
"""Base classes outside the runtime that call only methods with underscores."""
_MAX_LINE = 100


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
        steps: Version folder of each step to the definitions that it needs, such as
            ``decode_scores.ScoreDecoder``. The module of the first one becomes ``model.py``.
        sources: Files of modules that are not in the runtime under their own name.

    Raises:
        ValueError: A module of the runtime imports another one in a form that is not followed.
    """
    used = _Used(sources or {})
    for roots in steps.values():
        for root in roots:
            used.add(*root.split("."))
    files: dict[str, bytes | Link] = {}
    owners: dict[str, str] = {}
    for folder, roots in steps.items():
        first, *others = [root.split(".")[0] for root in roots]
        files[f"{folder}/{MAIN_FILE}"] = used.text(first).encode()
        for module in sorted(used.modules([first, *others]) - {first}):
            owner, file = owners.setdefault(module, folder), f"{module}.py"
            is_own = owner == folder
            files[f"{folder}/{file}"] = (
                used.text(module).encode() if is_own else Link(f"{owner}/{file}")
            )
    return files


class _Part(NamedTuple):
    """A statement of a module or of the body of a class, as lines `start` to `end` of its file.

    The comments and empty lines above a statement are part of it.
    """

    node: ast.stmt
    start: int
    end: int
    names: frozenset[str]


class _SourceModule(NamedTuple):
    lines: list[str]
    parts: list[_Part]


@cache
def _read_module(path: Path) -> _SourceModule:
    text = path.read_text(encoding="utf-8")
    return _SourceModule(text.splitlines(), list(_split(ast.parse(text).body, 0)))


def _split(body: Sequence[ast.stmt], start: int) -> Iterator[_Part]:
    for node in body:
        end = node.end_lineno or start
        yield _Part(node, start, end, frozenset(_names(node)))
        start = end


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines in its module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        is_rule = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        yield from () if is_rule else map(_bound, node.names)
    elif isinstance(node, ast.Name):
        yield from [node.id] if isinstance(node.ctx, ast.Store) else []
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Used:
    """Code that some definitions of the runtime reach."""

    def __init__(self, sources: Mapping[str, Path]) -> None:
        self._sources = sources
        self._names: dict[str, set[str]] = defaultdict(set)
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._attributes: set[str] = {*API}
        self._methods: dict[str, list[tuple[str, ast.AST]]] = defaultdict(list)
        """Methods that no code has named yet, by name, with their module."""

    def add(self, module: str, name: str) -> None:
        """Add a name in a module, with all that its definition uses."""
        names = self._names[module]
        if name in names:
            return
        is_first = not names
        names.add(name)
        for part in self._module(module).parts:
            if name in part.names or (is_first and not part.names and not _is_text(part.node)):
                self._read(module, part.node, name)

    def modules(self, roots: Sequence[str]) -> set[str]:
        """Return modules with all that their copied code imports."""
        found, waiting = set(roots), list(roots)
        while waiting:
            new = self._imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def text(self, module: str) -> str:
        """Return the copied code of a module."""
        lines, parts = self._module(module)
        names, copied, is_kept = self._names[module], list[str](), True
        above, is_apart = None, False
        for part in parts:
            node, own = part.node, lines[part.start : part.end]
            is_apart = is_apart or not own[0]
            if not _is_text(node):  # the text below a value is its description
                is_kept = not part.names or not part.names.isdisjoint(names)
            if not is_kept:
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                own = _import_lines(node, own, names)
            elif isinstance(node, ast.ClassDef):
                body = node.body[0].lineno - 1
                own = lines[part.start : body]
                for inner in _split(node.body, body):
                    if self._is_copied(inner.node, node):
                        own += lines[inner.start : inner.end]
            copied += [""] * _gap(above, node, is_apart)
            copied += "\n".join(own).strip("\n").splitlines()
            above, is_apart = node, False
        return "\n".join(copied) + "\n"

    def _module(self, name: str) -> _SourceModule:
        return _read_module(self._sources.get(name, RUNTIME / f"{name}.py"))

    def _is_copied(self, node: ast.stmt, owner: ast.ClassDef) -> bool:
        """Return whether a statement in the body of a class is copied with the class."""
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return True
        bases = {ast.unparse(base) for base in owner.bases}
        is_known = bases <= {*_PLAIN_BASES, *_runtime_classes()}
        return not is_known or node.name.startswith("__") or node.name in self._attributes

    def _read(self, module: str, node: ast.AST, name: str = "") -> None:
        """Add all that a copied node names; a method waits until code names it."""
        if isinstance(node, ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt) and not self._is_copied(child, node):
                    (method,) = _names(child)
                    self._methods[method].append((module, child))
                else:
                    self._read(module, child)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.ImportFrom) and node.level:
                self._follow(module, node, name)
        else:
            if isinstance(node, ast.Name):
                self.add(module, node.id)
            elif isinstance(node, ast.Attribute):
                self._mention(node.attr)
            elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
                self._mention(str(node.value))  # it may be for `getattr`
            for child in ast.iter_child_nodes(node):
                self._read(module, child)

    def _mention(self, attribute: str) -> None:
        self._attributes.add(attribute)
        for module, method in self._methods.pop(attribute, ()):
            self._read(module, method)

    def _follow(self, module: str, node: ast.ImportFrom, name: str) -> None:
        """Add what a module imports, all of it if no name is given."""
        if node.level > 1 or not node.module or "." in node.module:
            raise ValueError(f"{module}.py, line {node.lineno}: import of an unknown form")
        self._imports[module].add(node.module)
        for alias in node.names:
            if not name or _bound(alias) == name:
                self.add(node.module, alias.name)


def _gap(above: ast.stmt | None, node: ast.stmt, is_apart: bool) -> int:
    """Return the number of empty lines between two statements of a module.

    Args:
        is_apart: Whether the source has an empty line between them.
    """
    large = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    imports = (ast.Import, ast.ImportFrom)
    if above is None:
        return 0
    if isinstance(above, large) or isinstance(node, large):
        return 2
    return int(is_apart or isinstance(above, imports) != isinstance(node, imports))


@cache
def _runtime_classes() -> frozenset[str]:
    return frozenset(
        part.node.name
        for path in RUNTIME.glob("*.py")
        for part in _read_module(path).parts
        if isinstance(part.node, ast.ClassDef)
    )


def _import_lines(
    node: ast.Import | ast.ImportFrom, lines: list[str], names: set[str]
) -> list[str]:
    """Return the lines of an import with the imported names that are used."""
    kept = [alias for alias in node.names if _bound(alias) in names]
    if len(kept) == len(node.names) or not kept:
        return lines
    above = lines[: node.lineno - (node.end_lineno or 0) - 1]
    single = ast.unparse(type(node)(**{**vars(node), "names": kept}))
    if len(single) <= _MAX_LINE:
        return [*above, single]
    head = single.partition("import ")[0]
    return [*above, f"{head}import (", *(f"    {ast.unparse(each)}," for each in kept), ")"]
