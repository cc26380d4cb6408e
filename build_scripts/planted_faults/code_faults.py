"""Small faults of the package's code, the same for the same source.

Each fault changes one expression or statement. Places where a change has no effect that a test
should see are left out: texts, logs, waiting times, sizes of pages, conditions of type checkers.
"""

import ast
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "triptych"
FAULTS, MIN_FAULTS, MAX_IN_MODULE = 120, 5, 3
ONLY_LONG_TESTS = ("runtime/engine_vllm.py", "runtime/engine_tensorrt_llm.py")
"""Modules that run only with an engine that takes minutes to start."""
OPPOSITE = {"==": "!=", "<": ">=", "<=": ">", ">": "<=", ">=": "<", "in": "not in", "is": "is not"}
OPPOSITE |= {new: old for old, new in OPPOSITE.items()}
AND_OR = {"and": "or", "or": "and"}
BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
ARITHMETIC = {"-": "+", "*": "/", "/": "*", "//": "*", "%": "//"}
EMPTY = {"str": '""', "list": "[]", "dict": "{}", "tuple": "()", "set": "set()", "bytes": 'b""'}
NO_FAULT_CALLS = re.compile(r"log|print|warn|progress|close|flush|sync|sleep|Typer|Option|cast")
SYMMETRIC_CALLS = re.compile(r"isinstance|min|max|gcd|isclose|union|isdisjoint|equal|allclose")
NO_FAULT_NAMES = re.compile(
    r"timeout|poll|interval|_s$|_S$|indent|width|strict|exist_ok|parents|missing_ok|daemon|text|"
    r"frozen|slots|capture_output|check|ensure_ascii|__all__|help|size|dpi"
)
PATHS = re.compile(r"(?i)file|folder|path|target|repository|reports|root")
NO_FAULT_CONDITIONS = re.compile(r"TYPE_CHECKING|version_info|sys\.platform|__name__")


@dataclass(frozen=True)
class Fault:
    """A change of a module; `rank` is a hash of the change, `key` of the change and the module."""

    path: str
    line: int
    where: str
    kind: str
    before: str
    after: str
    start: int
    end: int
    new: str
    rank: str
    key: str

    def __str__(self) -> str:
        change = f"{self.before} -> {self.after}"
        return f"{self.path}:{self.line} {self.where} ({self.kind}): {change}"

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    def planted(self) -> bytes:
        data = (PACKAGE / self.path).read_bytes()
        return data[: self.start] + self.new.encode() + data[self.end :]


class Finder(ast.NodeVisitor):
    """Collects the changes that can be made in a module: kind, function, place, new text."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        lengths = [len(line) for line in self.data.splitlines(keepends=True)]
        self.starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self.names: list[str] = []
        self.returns = ""
        self.found: list[tuple[str, str, int, int, str]] = []
        self.visit(ast.parse(source))

    def span(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def change(self, kind: str, node: ast.AST, new: str) -> None:
        if self.text(node) != new:
            self.found.append((kind, ".".join(self.names), *self.span(node), new))

    def change_between(self, kind: str, left: ast.AST, right: ast.AST, table: Any) -> None:
        """Replace the operator between two operands if the table has it."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.data[start:end].decode()
        old = re.sub(r"#.*|[()\s]+", " ", gap).strip()
        if old in table and gap.count(old) == 1:
            new = gap.replace(old, table[old])
            self.found.append((kind, ".".join(self.names), start, end, new))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_FunctionDef(self, node: Any) -> None:
        is_overload = any("overload" in self.text(each) for each in (*node.decorator_list, node))
        if node.name in ("__str__", "__repr__") or is_overload:
            return
        outer, self.returns = self.returns, self.text(node.returns) if node.returns else ""
        self.names.append(node.name)
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)
        self.names.pop()
        self.returns = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: Any) -> None:
        if NO_FAULT_CONDITIONS.search(self.text(node.test)):
            return
        if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
            self.change("condition negated", node.test, f"(not {self.text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self.change_between("comparison", node.left, node.comparators[0], OPPOSITE)
            self.change_between("boundary", node.left, node.comparators[0], BOUNDARY)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if len(node.values) == 2:
            self.change_between("and/or", node.values[0], node.values[1], AND_OR)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        if not any(is_text(side) or PATHS.search(self.text(side)) for side in sides):
            self.change_between("arithmetic", *sides, ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.change("not dropped", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        text, plain = self.text(node.value), re.split(r"\W", self.returns)[0]
        if self.returns == "bool" and isinstance(node.value, (ast.Call, ast.Name)):
            self.change("return", node.value, f"(not {text})")
        elif self.returns in ("int", "float") and "inf" not in text:
            self.change("return", node.value, f"({text}) + 1")
        elif plain in EMPTY:
            self.change("return", node.value, EMPTY[plain])
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc and not re.match(r"NotImplemented|Assertion|typer", self.text(node.exc)):
            self.change("not raised", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        text = self.text(node)
        is_call = isinstance(node.value, ast.Call) and self.names and "super" not in text
        if is_call and not NO_FAULT_CALLS.search(text.partition("(")[0]):
            self.change("call dropped", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.text(node.func)
        if NO_FAULT_CALLS.search(name):
            return
        names = [isinstance(argument, (ast.Name, ast.Attribute)) for argument in node.args[:2]]
        if names == [True, True] and not SYMMETRIC_CALLS.search(name):
            place = (self.span(node.args[0])[0], self.span(node.args[1])[1])
            new = f"{self.text(node.args[1])}, {self.text(node.args[0])}"
            self.found.append(("argument swapped", ".".join(self.names), *place, new))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not NO_FAULT_NAMES.search(node.arg or ""):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not NO_FAULT_NAMES.search(self.text(node.targets[0])):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and not NO_FAULT_NAMES.search(self.text(node.target)):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            larger = node.value * 2 if isinstance(node.value, float) else node.value + 1
            self.change("constant", node, repr(larger or 1.0))

    def skip(self, node: ast.AST) -> None:
        """Leave out what has no effect, or no place of its own in the text."""

    visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_arg = skip


def is_text(node: ast.AST) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return constant or isinstance(node, ast.JoinedStr)


def faults_in(path: Path) -> Iterator[Fault]:
    """Yield every fault that can be planted in a module."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(PACKAGE).as_posix()
    data, seen = source.encode(), Counter[str]()
    for kind, where, start, end, new in Finder(source).found:
        first, last = data.rfind(b"\n", 0, start) + 1, data.find(b"\n", start)
        before, tail = data[first:last].decode().strip(), data[min(end, last) : last].decode()
        after = (data[first:start].decode() + new + tail).strip()
        parts = f"{name} {where} {kind} {before} {after}"
        seen[parts] += 1
        rank = hashed(f"{parts} {seen[parts]}")
        key = hashed(rank + source)[:12]
        line = data.count(b"\n", 0, start) + 1
        yield Fault(name, line, where, kind, before, after, start, end, new, rank, key)


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def compiles(fault: Fault) -> bool:
    try:
        compile(fault.planted(), fault.path, "exec")
    except SyntaxError:
        return False
    return True


def chosen_in(package: str, paths: list[Path], wanted: int) -> list[Fault]:
    """Return the faults of a package: kinds in turn, few in a module, one in a function."""
    by_kind: dict[str, list[Fault]] = {}
    for one in sorted((fault for path in paths for fault in faults_in(path)), key=lambda f: f.rank):
        if one.path not in ONLY_LONG_TESTS:
            by_kind.setdefault(one.kind, []).append(one)
    taken: list[Fault] = []
    kinds = sorted(by_kind, key=lambda kind: hashed(package + kind))
    while len(taken) < wanted and any(by_kind.values()):
        for kind in kinds:
            fault = by_kind[kind].pop(0) if by_kind[kind] else None
            same = [other.where for other in taken if fault and other.path == fault.path]
            if fault and fault.where not in same and len(same) < MAX_IN_MODULE and compiles(fault):
                taken.append(fault)
    return taken[:wanted]


@functools.cache
def chosen_faults() -> list[Fault]:
    """Return the faults, the packages in turn; each package has its share by lines."""
    modules: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        modules.setdefault(path.relative_to(PACKAGE).parts[0], []).append(path)
    lines = {name: sum(p.read_text().count("\n") for p in paths) for name, paths in modules.items()}
    chosen: list[tuple[float, Fault]] = []
    for package, paths in modules.items():
        wanted = max(MIN_FAULTS, round(FAULTS * lines[package] / sum(lines.values())))
        taken = chosen_in(package, paths, wanted)
        chosen += [(place / len(taken), fault) for place, fault in enumerate(taken)]
    return [fault for _, fault in sorted(chosen, key=lambda pair: (pair[0], pair[1].rank))]
