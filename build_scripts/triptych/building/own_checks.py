"""`triptych test` of a pipeline around the user's own model, without a server or the model.

The functions run on the traffic. `postprocess` gets synthetic outputs of the shapes that the graph
declares.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.building.pipeline_checks import (
    TESTS_FILE,
    VARIABLE,
    Check,
    check_imports,
    judge_functions,
    run_tests,
    uncalled,
    without_bytecode,
)
from triptych.core.export.own_graph import RunGraph, open_own_model, read_graph
from triptych.core.gate.answers import equal_outputs
from triptych.core.own_chain import run_models
from triptych.core.own_reader import OwnReader
from triptych.core.own_stages import find_stages, takes_rows
from triptych.core.requests import GateRequest
from triptych.models.info import info_of_interface
from triptych.runtime.bucketing import widen_rows
from triptych.runtime.hooking import HOOKS_FILE, NUMPY_TYPES, REDACT, load_hooks
from triptych.runtime.own_model import OwnDecoder, OwnRowMaker
from triptych.runtime.own_step import OwnStep
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import Arrays, CoreRows, RowInputs, find_class
from triptych.spec.model_fields import ModelSpec, files_of
from triptych.spec.own_task import COMPARE_PREFIX, own_task
from triptych.spec.traffic import TRAFFIC_FILE

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "setup": ("context",),
    "preprocess": ("rows", "parameters"),
    "postprocess": ("arrays", "rows", "parameters", "counts"),
}
"""Functions of ``hooks.py`` that a pipeline calls, with the arguments that they may take."""

TOGETHER = 8
"""Maximum number of rows in a request of the check."""


def check_own_pipeline(spec: ModelSpec) -> list[Check]:
    """Check everything in a pipeline's folder that needs neither the model's results nor a server.

    Raises:
        UserError: The graph's interface or the traffic cannot be read.
    """
    folder = spec.folder
    files_of(spec)
    reader = OwnReader(spec, own_task(spec))
    requests = reader.read(folder / TRAFFIC_FILE)
    checks = [Check("spec"), Check("traffic", note=f"{len(requests)} rows")]
    # Functions may print, but stdout is reserved for results.
    with redirect_stdout(sys.stderr), without_bytecode():
        if (folder / HOOKS_FILE).is_file():
            try:
                hooks = load_hooks(folder)
                imports = check_imports(folder, spec.serving.python_env)
                checks += [Check("hooks-load"), imports]
            except (Exception, SystemExit) as error:
                note = f"{HOOKS_FILE}: {type(error).__name__}: {error}"
                return [*checks, Check("hooks-load", "error", note)]
            checks.append(_check_functions(spec, hooks))
        else:
            hooks = None
            checks.append(Check("hooks", note="none: tensors of the same name are passed on"))
        if checks[-1].severity != "error":
            checks += _run_functions(spec, reader, requests, hooks)
    if (folder / TESTS_FILE).is_file():
        checks.append(run_tests(folder))
    elif hooks is not None:
        checks.append(Check("tests", note=f"none: tests of your own go into {TESTS_FILE}"))
    return checks


def _check_functions(spec: ModelSpec, hooks: ModuleType | None) -> Check:
    problems, found = [], []
    compared = {
        f"{COMPARE_PREFIX}{name}"
        for name, field in spec.outputs.items()
        if field.compared_by == "function"
    }
    called = {**dict.fromkeys(spec.steps, FUNCTIONS["postprocess"]), **FUNCTIONS}
    known = {
        **called,
        **dict.fromkeys(compared, ("actual", "expected")),
        REDACT: None,
    }
    for name, value in vars(hooks).items():
        if name in known:
            found.append(name)
            allowed = known[name]
            taken = list(inspect.signature(value).parameters) if callable(value) else None
            if taken is None or inspect.iscoroutinefunction(value):
                problems.append(f"`{name}` must be an ordinary function")
            elif allowed is not None and (
                strange := [each for each in taken if each not in allowed]
            ):
                problems.append(
                    f"`{name}` has the argument `{strange[0]}`; it gets {', '.join(allowed)}"
                )
        else:
            problems += uncalled(name, value, called)
    problems += [f"`{name}` is missing" for name in sorted(compared - set(found))]
    return judge_functions(found, problems)


class _Chunk(NamedTuple):
    """Rows of the traffic in one request, or one row."""

    inputs: RowInputs  # Inputs and parameters of the request
    rows: Sequence[int]  # Indices of the rows in the traffic


def _run_functions(
    spec: ModelSpec,
    reader: OwnReader,
    requests: Sequence[GateRequest],
    hooks: ModuleType | None,
) -> list[Check]:
    try:
        runs = {name: _open_synthetic(spec.with_model(name)) for name in spec.models or [""]}
        found = find_stages(spec, reader, requests, runs, rows=takes_rows(hooks, spec))
    except UserError as error:
        if isinstance(error.__cause__, RequestError) and len(spec.steps) > 1:
            note = f"{error} (of synthetic outputs of the core)"
            return [Check("between-models", "warning", note)]
        return [Check("preprocess", "error", str(error))]
    first = found.stages[0]
    info = info_of_interface(first.own)
    task = own_task(spec)
    maker = reader.maker(info)
    alone = [_Chunk(request.row_inputs, [index]) for index, request in enumerate(requests)]
    together = _joined(reader, requests)
    made, preprocess = _check_preprocess(maker, alone, together)
    if preprocess.severity == "error":
        return [preprocess]
    graphs = found.graphs.values()
    shown = ", ".join(t.name for graph in graphs for t in (*graph.inputs, *graph.outputs))
    checks = [Check("model", note=shown), preprocess]
    arrays: Sequence[Arrays] = [each.tensors for each in made]
    for index, stage in enumerate(found.stages):
        # A core returns for a row in a batch what it returns alone.
        past = [tensor.name for tensor in stage.own.past_core]
        results = [
            {**run_models(runs, stage.models, each), **{name: each[name] for name in past}}
            for each in arrays
        ]
        if index + 1 < len(found.stages):
            step = reader.step(found.stages[index + 1])
            arrays, check = _check_behind(step.name, step, requests, results)
        else:
            decoder = find_class(task.decode)(task.settings(info), spec.folder)
            arrays, check = _check_behind("postprocess", decoder, requests, results)
        checks.append(check)
        if len(arrays) < len(requests):
            break
    return checks


def _open_synthetic(spec: ModelSpec) -> RunGraph:
    """Return a function with synthetic outputs of the model's shapes.

    A module shows its outputs by its results alone.
    """
    return (
        synthetic_graph(read_graph(spec).outputs)
        if spec.model.onnx is not None
        else open_own_model(spec)
    )


def _joined(reader: OwnReader, requests: Sequence[GateRequest]) -> list[_Chunk]:
    """Return the rows in requests of several rows, as far as parameters and shapes allow it."""
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        shapes = [np.shape(value)[1:] for value in (request.columns or {}).values()]
        key = f"{sorted(request.parameters.items())} {shapes}"
        groups.setdefault(key, []).append(index)
    chunks = []
    for rows in groups.values():
        for start in range(0, len(rows), TOGETHER):
            chosen = rows[start : start + TOGETHER]
            chunks.append(_Chunk(reader.join([requests[index] for index in chosen]), chosen))
    return chunks


def _check_preprocess(
    maker: OwnRowMaker, alone: Sequence[_Chunk], together: Sequence[_Chunk]
) -> tuple[list[CoreRows], Check]:
    began = time.perf_counter()
    singles = maker.make([chunk.inputs for chunk in alone])
    row_us = (time.perf_counter() - began) / len(alone) * 1e6
    made: list[CoreRows] = []
    for index, single in enumerate(singles):
        if isinstance(single, Exception):
            return [], Check("preprocess", "error", f"{TRAFFIC_FILE}, row {index + 1}: {single}")
        made.append(single)
    for chunk, joined in zip(together, maker.make([c.inputs for c in together]), strict=True):
        if isinstance(joined, RequestError) and "at most" in str(joined):
            continue  # more core rows than a request may have
        if isinstance(joined, Exception):
            note = f"fails on {len(chunk.rows)} rows in one request, but not alone: {joined}"
            return made, Check("preprocess", "error", note)
        for name in maker.core_inputs:
            # Rows that are shorter alone are padded as those of a request are.
            wide = [widen_rows(made[index], joined.width, 0) for index in chunk.rows]
            parts = [each.tensors[name] for each in wide]
            if len({part.shape[1:] for part in parts}) > 1 or not equal_outputs(
                joined.tensors[name], np.concatenate(parts)
            ):
                note = f"`{name}` of a row depends on the other rows of its request"
                return made, Check("preprocess", "error", note)
    return made, Check("preprocess", note=f"{len(alone)} rows, {row_us:,.0f} us a row")


def _check_behind(
    name: str,
    decoder: OwnDecoder | OwnStep,
    requests: Sequence[GateRequest],
    results: Sequence[Arrays],
) -> tuple[list[Arrays], Check]:
    """Return what a function behind a model makes of synthetic results, as far as it does."""
    began, answers = time.perf_counter(), list[Arrays]()
    for request, arrays in zip(requests, results, strict=True):
        try:
            answers.append(decoder.decode(arrays, (), request.parameters))
        except RequestError as error:
            return [], Check(name, "warning", f"{error} (of synthetic outputs of the core)")
        except RuntimeError as error:
            if error.__cause__ is None or isinstance(error.__cause__, TypeError | ValueError):
                return [], Check(name, "error", str(error))
            note = (
                f"{error} (of synthetic outputs of the core: `build` calls it with the model's own)"
            )
            return [], Check(name, "warning", note)
    row_us = (time.perf_counter() - began) / len(requests) * 1e6
    shapes = ", ".join(f"{name} {list(value.shape[1:])}" for name, value in answers[0].items())
    note = f"{len(answers)} synthetic rows, {row_us:,.0f} us a row: {shapes}"
    return answers, Check(name, note=note)


def synthetic_graph(outputs: Sequence[Tensor]) -> RunGraph:
    """Return a function with random outputs of the declared shapes, from 0 to 1, mostly small.

    A free axis has the size `VARIABLE`.
    """
    random = np.random.default_rng(0)

    def run(feed: Arrays) -> dict[str, NDArray[np.generic]]:
        count = len(next(iter(feed.values())))
        return {tensor.name: make(tensor, count) for tensor in outputs}

    def make(tensor: Tensor, count: int) -> NDArray[np.generic]:
        dims = [VARIABLE if isinstance(axis, str) else axis for axis in tensor.dims]
        return (random.random((count, *dims)) ** 8).astype(NUMPY_TYPES[tensor.dtype])

    return run
