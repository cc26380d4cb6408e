"""`triptych test` of an encoder: check spec, traffic and hooks without a server or a model.

Hooks that follow the model run on synthetic outputs in the declared form of the task.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np

from triptych.base.errors import UserError, no_progress
from triptych.core.inputs import labels_of, read_model_of, task_of
from triptych.models.older import in_current_form
from triptych.models.source import locate
from triptych.repository.python_env import modules_of
from triptych.runtime.hooking import (
    FUNCTIONS,
    HOOKS_FILE,
    MODULE_NAME,
    NUMPY_TYPES,
    REDACT,
    SETUP,
    Hook,
    Row,
    RowForm,
    call_before,
    call_hook,
    has_parameter,
    load_hooks,
)
from triptych.runtime.request_errors import RequestError
from triptych.spec.model_fields import files_of
from triptych.spec.spec import EncoderSpec
from triptych.spec.traffic import TRAFFIC_FILE, read_traffic
from triptych.tasks.task import Task

VARIABLE = 2
"""Number of elements along an axis of variable size."""

TEXT, NUMBER = "made up", 0.5


def make_up_answers(task: Task, form: RowForm, count: int) -> list[Row]:
    """Return equal rows of synthetic outputs of a task, as `hooks.after` gets them.

    Args:
        task: Task that declares the outputs.
        form: Form of the same outputs.
        count: Number of rows, at least 1.
    """
    tensors = {}
    for output in task.outputs:
        if output.name in task.added:
            continue
        dims = [VARIABLE if axis == -1 else axis for axis in output.config_dims]
        if output.dtype == "BYTES":
            example = (
                json.dumps(task.example.get(output.name)) if output.content == "json" else TEXT
            )
            tensors[output.name] = np.full((count, *dims), example.encode(), dtype=np.object_)
        else:
            tensors[output.name] = np.full((count, *dims), NUMBER).astype(NUMPY_TYPES[output.dtype])
    return form.rows(tensors)


PACKAGES = ("numpy", "PIL", "tokenizers")
"""Modules of the serving image, which `serving.python_env` packs as well."""
TESTS_FILE = "test_hooks.py"
NO_TESTS_FOUND = 5  # pytest's exit code
Kinds = Mapping[str, type]
"""Input of the task to the type of its values: str, or bytes for an image."""
Rows = Mapping[int, Row]
"""Rows of the traffic by line number."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str  # Stable name in kebab case
    # Severity; ``error`` makes the command exit with 1.
    severity: Literal["ok", "warning", "error"] = "ok"
    note: str = ""  # Finding in words; the problem if there is one

    def as_dict(self) -> dict[str, object]:
        """Return plain data for ``--json``; ``ok`` is false for errors only."""
        fine = self.severity == "ok"
        return {
            **asdict(self),
            "ok": self.severity != "error",
            "problem": "" if fine else self.note,
        }


def check_pipeline(spec: EncoderSpec) -> list[Check]:
    """Check everything in a pipeline's folder that needs neither the model nor a server.

    Raises:
        UserError: The traffic cannot be read, or pytest is not installed.
    """
    folder = spec.folder
    files_of(spec)
    task = task_of(spec)
    kinds = {tensor.name: bytes if tensor.content == "image" else str for tensor in task.inputs}
    rows = _read_rows(folder, kinds)
    checks = [Check("spec"), Check("traffic", note=f"{len(rows)} rows")]
    needed = ("decode",) * (spec.custom is not None) + ("after",) * bool(spec.outputs)
    if (folder / HOOKS_FILE).is_file():
        # Hooks may print, but stdout is reserved for results.
        with redirect_stdout(sys.stderr), without_bytecode():
            python_env = spec.serving.python_env
            model = _read_model(spec, task)
            checks += _check_hooks(folder, python_env, task, kinds, rows, needed, model)
        checks.append(run_tests(folder))
    elif needed:
        note = f"there is no {HOOKS_FILE}, which must have the function `{needed[0]}`"
        checks.append(Check("hooks-load", "error", note))
    else:
        checks.append(Check("hooks", note=f"none: there is no {HOOKS_FILE}"))
    return checks


def _read_model(spec: EncoderSpec, task: Task) -> tuple[Sequence[str], Path | None]:
    """Return labels and tokenizer of the model, without its weights, if `setup` may read them.

    Raises:
        UserError: The model is not found or not supported.
    """
    hooks = (spec.folder / HOOKS_FILE).read_text(encoding="utf-8")
    if not re.search(r"\bdef setup\b", hooks) or not re.search(r"\.(labels|tokenizer)\b", hooks):
        return (), None
    folder = in_current_form(locate(spec.model, spec.folder), task.loader, no_progress)
    info, tokenizer = read_model_of(spec, task, folder, no_progress)
    return labels_of(task, info), tokenizer


def _read_rows(folder: Path, kinds: Kinds) -> Rows:
    """Return the rows of the traffic as `before` gets them, with the content of images."""
    rows: dict[int, Row] = {}
    for line, inputs, _ in read_traffic(folder, list(kinds)):
        rows[line] = {
            name: inputs[name] if kind is str else _read_file(folder, inputs[name], line)
            for name, kind in kinds.items()
        }
    return rows


def _read_file(folder: Path, path: str, line: int) -> bytes:
    try:
        return (folder / path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise UserError(
            f"{folder / TRAFFIC_FILE}:{line}",
            "must name a readable file",
            given=error,
            remedy="Correct the path, which is relative to the pipeline's folder",
        ) from error


def _check_hooks(
    folder: Path,
    python_env: bool | Sequence[str],
    task: Task,
    kinds: Kinds,
    rows: Rows,
    needed: Sequence[str],
    known_of_model: tuple[Sequence[str], Path | None],
) -> list[Check]:
    try:
        module = load_hooks(folder, *known_of_model)
        imports = check_imports(folder, python_env)
    except (Exception, SystemExit) as error:
        return [Check("hooks-load", "error", f"{HOOKS_FILE}: {type(error).__name__}: {error}")]
    if module is None:
        raise FileNotFoundError(folder / HOOKS_FILE)
    known = [name for name in FUNCTIONS if name in needed or name != "decode"]
    functions = _check_functions(module, known, needed)
    checks = [Check("hooks-load"), imports, functions]
    if functions.severity == "error":
        return checks
    before, after = getattr(module, "before", None), getattr(module, "after", None)
    if before is not None:
        checks += _check_before(before, rows, kinds)
    if after is not None and all(check.severity != "error" for check in checks):
        given = list(rows.values()) if before is None else _call(before, [*rows.values()], kinds)
        checks.append(_check_after(after, task, given))
    return checks


def check_imports(folder: Path, python_env: bool | Sequence[str]) -> Check:
    """Check that ``hooks.py`` imports only packages that the server has.

    Args:
        folder: Folder of the pipeline.
        python_env: Value of `serving.python_env`.

    Raises:
        UserError: `python_env` names a package that is not installed.
    """
    tree = ast.parse((folder / HOOKS_FILE).read_bytes())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    packed = set() if isinstance(python_env, bool) else modules_of(python_env)
    foreign = sorted(names - packed - set(PACKAGES) - set(sys.stdlib_module_names))
    if not foreign:
        return Check("hooks-imports")
    note = (
        f"{HOOKS_FILE} imports {', '.join(foreign)}: a server's container has only the standard "
        f"library, {', '.join(PACKAGES)}; serving.python_env: [PACKAGE] adds others"
    )
    return Check("hooks-imports", "warning", note)


def _check_functions(module: ModuleType, known: Sequence[str], needed: Sequence[str]) -> Check:
    problems = [f"`{name}` is missing" for name in needed if not hasattr(module, name)]
    found = []
    for name, value in vars(module).items():
        if name == REDACT:
            found.append(name)
            if not _is_called_with(value, {}, {}):
                problems.append(f"`{name}` must be an ordinary function of inputs and answer")
        elif name in known and value is not None:
            found.append(name)
            if not _is_called_with(value, [], **({"inputs": []} if name == "after" else {})):
                also = " (and may take `inputs`)" if name == "after" else ""
                problems.append(
                    f"`{name}` must be an ordinary function of one argument, the rows{also}"
                )
        elif name != SETUP:
            problems += uncalled(name, value, known)
    if not found and not problems:
        problems.append(f"there is none of the functions {', '.join(known)} in it")
    return judge_functions(found, problems)


def uncalled(name: str, value: object, known: Iterable[str]) -> Iterator[str]:
    """Yield the problem of a function of ``hooks.py`` that is none of the `known` ones."""
    is_own = inspect.isfunction(value) and value.__module__ == MODULE_NAME
    if is_own and not name.startswith("_"):
        yield (
            f"`{name}` is never called: the functions are {', '.join(known)}; begin the name of"
            " a function for your own use with `_`"
        )


def judge_functions(found: Iterable[str], problems: Sequence[str]) -> Check:
    """Return the result of the check of the functions in ``hooks.py``."""
    if problems:
        return Check("hooks-functions", "error", f"{HOOKS_FILE}: {'; '.join(problems)}")
    return Check("hooks-functions", note=", ".join(found))


def _is_called_with(value: object, *arguments: object, **optional: object) -> bool:
    if not callable(value) or inspect.isclass(value):
        return False
    if inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value):
        return False
    try:
        signature = inspect.signature(value)
        named = {name: it for name, it in optional.items() if name in signature.parameters}
        signature.bind(*arguments, **named)
    except (TypeError, ValueError):
        return False
    return True


def _check_before(before: Hook, rows: Rows, kinds: Kinds) -> list[Check]:
    """Check `before` on the traffic: its rows, a repeated call, and each row alone."""
    together, alone = [*rows.values()], [[row] for row in rows.values()]
    try:
        result = _call(before, together, kinds)
    except (RequestError, RuntimeError) as error:
        return [Check("before-rows", "error", _first_fault(before, rows, kinds) or str(error))]
    checks = [Check("before-rows", note=f"{len(rows)} rows")]
    try:
        again = _call(before, together, kinds)
        singly = [_call(before, row, kinds)[0] for row in alone]
    except (RequestError, RuntimeError) as error:
        note = f"hooks.before took all rows at once, but not again or one by one: {error}"
        return [*checks, Check("before-repeatable", "error", note)]
    changed = _first_difference(rows, result, again)
    if changed is not None:
        note = f"{changed} when hooks.before is called again with the same rows"
        return [*checks, Check("before-repeatable", "error", note)]
    checks.append(Check("before-repeatable"))
    mixed = _first_difference(rows, result, singly)
    if mixed is not None:
        note = f"{mixed} when hooks.before is called with it alone: a row must stand for itself"
        return [*checks, Check("before-row-by-row", "error", note)]
    return [*checks, Check("before-row-by-row")]


def _check_after(after: Hook, task: Task, inputs: list[Row]) -> Check:
    """Check the rows that `after` returns for synthetic outputs and these inputs."""
    form = RowForm(task.output_settings)
    given = make_up_answers(task, form, len(inputs))
    chunks = [slice(0, len(given)), *(slice(place, place + 1) for place in range(len(given)))]
    for chunk in chunks:
        seen = [dict(row) for row in inputs[chunk]] if has_parameter(after, "inputs") else None
        try:
            answers = call_hook("after", after, deepcopy(given[chunk]), form.names, seen)
        except (RequestError, RuntimeError) as error:
            if error.__cause__ is None:  # the hook returned wrong rows
                return Check("after-rows", "error", str(error))
            note = f"{error} (of a made-up answer: `build` asks with the model's own)"
            return Check("after-rows", "warning", note)
        try:
            form.tensors(answers)
        except RuntimeError as error:
            return Check("after-rows", "error", str(error))
    return Check("after-rows", note=f"{len(given)} made-up answers")


def _call(before: Hook, rows: Sequence[Row], kinds: Kinds) -> list[Row]:
    """Call `before` on copies of the rows and return its rows.

    Raises:
        RequestError: The hook rejects the rows.
        RuntimeError: The hook fails, or returns rows that the server would not accept.
    """
    encoded = [name for name, kind in kinds.items() if kind is bytes]
    return call_before(before, [dict(row) for row in rows], list(kinds), encoded=encoded)


def _first_fault(before: Hook, rows: Rows, kinds: Kinds) -> str | None:
    """Return the first row that fails alone, with its error; None if every row succeeds."""
    for line, row in rows.items():
        try:
            _call(before, [row], kinds)
        except (RequestError, RuntimeError) as error:
            return f"{TRAFFIC_FILE}:{line}: {error}"
    return None


def _first_difference(lines: Iterable[int], first: list[Row], second: list[Row]) -> str | None:
    for line, one, other in zip(lines, first, second, strict=True):
        for name in one:
            if one[name] != other[name]:
                return (
                    f"{TRAFFIC_FILE}:{line}: `{name}` is {one[name]!r:.60}, but {other[name]!r:.60}"
                )
    return None


def run_tests(folder: Path) -> Check:
    """Run ``test_hooks.py`` with pytest in a subprocess."""
    if not (folder / TESTS_FILE).is_file():
        return Check("tests", "warning", f"there is no {TESTS_FILE}: the hooks are not tested")
    if find_spec("pytest") is None:
        raise UserError(
            TESTS_FILE,
            "requires pytest",
            given="pytest is not installed",
            remedy="Install it: `pip install pytest`",
        )
    # A pytest.ini in a parent folder belongs to other tests and must have no effect.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "--confcutdir=."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, TESTS_FILE],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    said = done.stdout.strip()
    if done.returncode == NO_TESTS_FOUND:
        return Check("tests", "error", f"{TESTS_FILE} has no tests: name them `test_…`")
    if done.returncode:
        return Check("tests", "error", f"{TESTS_FILE}:\n{said}")
    return Check("tests", note=said.splitlines()[-1] if said else "")


@contextmanager
def without_bytecode() -> Iterator[None]:
    """Keep Python from writing ``__pycache__`` to the user's folder while the block runs."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
