"""Which lines of the package the tests execute: `make test COVERAGE=1` and `make coverage`.

As a plugin of pytest (``-p tests.support.line_coverage``) it records in the processes of pytest and
prints the report at the end. `child_coverage/sitecustomize.py` records in all other Python
processes as well: commands, and steps of a tritonserver, whose files are modules of `runtime/`. A
process that is killed, or that starts without PYTHONPATH, is not recorded.
"""

import ast
import atexit
import contextlib
import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slipcover

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "build_scripts/triptych"
FOLDER = ROOT / ".cache/coverage"
LOWEST_FILES = 15
_recorders: list[slipcover.Slipcover] = []


def find_module(file: Path | str) -> str | None:
    """Return the module's path in the package; None for a file of something else.

    A step of a model repository is ``NAME/1/FILE``, with a file of `runtime`.
    """
    path = Path(file)
    if path.suffix != ".py":
        return None
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).as_posix()
    is_step = path.parent.name == "1" and (PACKAGE / "runtime" / path.name).is_file()
    return f"runtime/{path.name}" if is_step else None


class PackageFiles(slipcover.FileMatcher):  # type: ignore[misc]
    """Selects the files to record."""

    def matches(self, filename: Path | str | None) -> bool:
        return filename is not None and find_module(filename) is not None


class Recorder(slipcover.Slipcover):  # type: ignore[misc]
    """Recorder of a process with threads."""

    def deinstrument_seen(self) -> None:
        """Stop counting lines that were counted often.

        slipcover looks for their functions in dictionaries that other threads may change meanwhile.
        Functions that it did not reach are then counted on, and found the next time.
        """
        with contextlib.suppress(RuntimeError):
            super().deinstrument_seen()


def start() -> None:
    """Record this process from now on; a second call does nothing."""
    if not _recorders:
        _recorders.append(Recorder())
        slipcover.ImportManager(_recorders[0], PackageFiles()).__enter__()
        atexit.register(save)


def save() -> None:
    """Write the executed lines of this process to a file of its own."""
    lines: dict[str, set[int]] = defaultdict(set)
    for file, found in _recorders[0].get_coverage()["files"].items():
        path = Path(file).resolve()
        lines[find_module(path) or ""] |= set(found["executed_lines"])
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps({module: sorted(numbers) for module, numbers in lines.items()})
    (FOLDER / f"{os.getpid()}-{secrets.token_hex(4)}.json").write_text(text)


def pytest_addoption() -> None:
    start()  # before conftest.py imports the package


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(FOLDER, ignore_errors=True)


def pytest_sessionfinish() -> None:
    save()  # a worker of pytest-xdist ends without `atexit`


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line("\n".join(report(executed_lines(FOLDER))))


def executed_lines(folder: Path) -> dict[str, set[int]]:
    """Return the lines of each module that the processes recorded in `folder` executed."""
    lines: dict[str, set[int]] = defaultdict(set)
    for file in folder.glob("*.json"):
        for module, numbers in json.loads(file.read_text()).items():
            lines[module] |= set(numbers)
    return lines


def report(executed: dict[str, set[int]]) -> Iterator[str]:
    """Yield the lines of the report: coverage by package, the lowest files, what never ran."""
    recorder = slipcover.Slipcover(source=[str(PACKAGE)])
    code = {
        find_module(Path(file).resolve()) or "": set(found["missing_lines"])
        for file, found in recorder.get_coverage()["files"].items()
    }
    yield f"{'package':12} {'lines':>6} {'executed':>8}"
    for package in (*sorted({name.split("/")[0] for name in code if "/" in name}), ""):
        own = [name for name in code if name.startswith(f"{package}/") or not package]
        yield f"{package or 'all':12} {share(own, code, executed)}"
    yield ""
    yield f"the {LOWEST_FILES} files with the lowest share:"
    known = [name for name in code if code[name]]
    low = sorted(known, key=lambda name: len(executed[name] & code[name]) / len(code[name]))
    for name in low[:LOWEST_FILES]:
        yield f"{share([name], code, executed)}  {name}"
    yield ""
    yield "functions of which no line was executed:"
    for name in sorted(code):
        never = [
            function
            for function, body in functions_of((PACKAGE / name).read_text(encoding="utf-8"))
            if body & code[name] and not body & executed[name]
        ]
        if never:
            yield f"{name}: {', '.join(never)}"


def share(names: Iterable[str], code: dict[str, set[int]], executed: dict[str, set[int]]) -> str:
    lines = sum(len(code[name]) for name in names)
    ran = sum(len(executed[name] & code[name]) for name in names)
    return f"{lines:6} {100 * ran / (lines or 1):7.1f}%"


def functions_of(source: str) -> Iterator[tuple[str, set[int]]]:
    """Yield the name of each function and the line numbers of its body, without nested ones."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, set[int]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first, last = child.body[0].lineno, child.end_lineno or 0
                yield f"{prefix}{child.name}", set(range(first, last + 1))
            else:
                yield from visit(child, prefix)

    return visit(ast.parse(source), "")
