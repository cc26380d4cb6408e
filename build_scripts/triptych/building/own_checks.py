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
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.building.pipeline_checks import (
    VARIABLE,
    Check,
    check_imports,
    run_tests,
    without_bytecode,
)
from triptych.core.export.own_graph import RunGraph, open_own_model
from triptych.core.gate.answers import equal_outputs
from triptych.core.own_inputs import OwnReader, find_interface, read_interface, takes_rows
from triptych.core.requests import GateRequest
from triptych.runtime.hooking import HOOKS_FILE, MODULE_NAME, NUMPY_TYPES, REDACT, load_hooks
from triptych.runtime.own_model import OwnDecoder, OwnRowMaker
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.spec.model_fields import ModelSpec, load_model_spec
from triptych.spec.model_info import ModelInfo, OwnInterface
from triptych.spec.tasks.own import COMPARE_PREFIX, own_task
from triptych.spec.traffic import TRAFFIC_FILE

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "setup": ("context",),
    "preprocess": ("rows", "parameters"),
    "postprocess": ("arrays", "rows", "parameters", "counts"),
}
"""Functions of ``hooks.py`` that a pipeline calls, with the arguments that they may take."""

PACKAGES = ("numpy", "PIL", "tokenizers")
"""Modules of the serving image, which `serving.python_env` packs as well."""

TOGETHER = 8
"""Maximum number of rows in a request of the check."""


def check_own_pipeline(folder: Path) -> list[Check]:
    """Check everything in a pipeline's folder that needs neither the model's results nor a server.

    Raises:
        UserError: The spec, the graph's interface or the traffic cannot be read.
    """
    spec = load_model_spec(folder)
    spec.own_files()
    reader = OwnReader(spec, own_task(spec))
    requests = reader.read(folder / TRAFFIC_FILE)
    checks = [Check("spec"), Check("traffic", note=f"{len(requests)} rows")]
    # Functions may print, but stdout is reserved for results.
    with redirect_stdout(sys.stderr), without_bytecode():
        if (folder / HOOKS_FILE).is_file():
            try:
                hooks = load_hooks(folder)
                imports = check_imports(folder, spec.serving.python_env, PACKAGES)
                checks += [Check("hooks-load"), imports]
            except (Exception, SystemExit) as error:
                note = f"{HOOKS_FILE}: {type(error).__name__}: {error}"
                return [*checks, Check("hooks-load", "error", note)]
            checks.append(_check_functions(spec, hooks))
        else:
            hooks = None
            checks.append(Check("hooks", note="none: tensors of the same name are passed on"))
        if checks[-1].severity != "error":
            checks += _run_functions(spec, reader, requests, takes_rows=takes_rows(hooks))
    if hooks is not None:
        checks.append(run_tests(folder))
    return checks


def _check_functions(spec: ModelSpec, hooks: ModuleType | None) -> Check:
    problems, found = [], []
    compared = {
        f"{COMPARE_PREFIX}{name}"
        for name, field in spec.outputs.items()
        if field.compared_by == "function"
    }
    known = {**FUNCTIONS, **dict.fromkeys(compared, ("actual", "expected")), REDACT: None}
    for name, value in vars(hooks).items():
        is_own = inspect.isfunction(value) and value.__module__ == MODULE_NAME
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
        elif is_own and not name.startswith("_"):
            problems.append(
                f"`{name}` is called by nobody: the functions are {', '.join(FUNCTIONS)}; begin the"
                " name of a function for your own use with `_`"
            )
    problems += [f"`{name}` is missing" for name in sorted(compared - set(found))]
    if problems:
        return Check("hooks-functions", "error", f"{HOOKS_FILE}: {'; '.join(problems)}")
    return Check("hooks-functions", note=", ".join(found))


class _Chunk(NamedTuple):
    """Rows of the traffic in one request, or one row.

    Attributes:
        inputs: Inputs and parameters of the request.
        rows: Indices of the rows in the traffic.
    """

    inputs: RowInputs
    rows: Sequence[int]


def _run_functions(
    spec: ModelSpec, reader: OwnReader, requests: Sequence[GateRequest], *, takes_rows: bool
) -> list[Check]:
    # A module shows its outputs by its results alone.
    original = synthetic_graph(()) if spec.model.onnx is not None else open_own_model(spec)
    try:
        graph = read_interface(spec, reader, requests, original)
    except UserError as error:
        return [Check("model", "error", str(error))]
    try:
        own = OwnInterface(graph.inputs, graph.outputs, takes_rows=takes_rows)
        run = synthetic_graph(own.outputs)
        own = find_interface(own, reader.discover(own, requests), spec, run)
    except UserError as error:
        return [Check("preprocess", "error", str(error))]
    info = ModelInfo("", "", 0, 0, 0, own=own)
    maker = reader.maker(info)
    decoder = OwnDecoder(own_task(spec).settings(info), spec.folder)
    alone = [_Chunk(request.row_inputs, [index]) for index, request in enumerate(requests)]
    together = _joined(reader, requests)
    made, preprocess = _check_preprocess(maker, alone, together)
    if preprocess.severity == "error":
        return [preprocess]
    # A core returns for a row in a batch what it returns alone.
    feeds = [{t.name: each.tensors[t.name] for t in own.inputs} for each in made]
    outputs = [run(feed) for feed in feeds]
    shown = ", ".join(tensor.name for tensor in (*own.inputs, *own.outputs))
    return [
        Check("model", note=shown),
        preprocess,
        _check_postprocess(decoder, own, requests, made, outputs),
    ]


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
            parts = [made[index].tensors[name] for index in chunk.rows]
            if not equal_outputs(joined.tensors[name], np.concatenate(parts)):
                note = f"`{name}` of a row depends on the other rows of its request"
                return made, Check("preprocess", "error", note)
    return made, Check("preprocess", note=f"{len(alone)} rows, {row_us:,.0f} us a row")


def _check_postprocess(
    decoder: OwnDecoder,
    own: OwnInterface,
    requests: Sequence[GateRequest],
    made: Sequence[CoreRows],
    outputs: Sequence[Mapping[str, NDArray[Any]]],
) -> Check:
    past_core = [tensor.name for tensor in own.past_core]
    began, answers = time.perf_counter(), []
    for request, core_rows, values in zip(requests, made, outputs, strict=True):
        arrays = {**values, **{name: core_rows.tensors[name] for name in past_core}}
        try:
            answers.append(decoder.decode(arrays, (), request.parameters))
        except RequestError as error:
            return Check("postprocess", "warning", f"{error} (of synthetic outputs of the core)")
        except RuntimeError as error:
            if error.__cause__ is None or isinstance(error.__cause__, TypeError | ValueError):
                return Check("postprocess", "error", str(error))
            note = (
                f"{error} (of synthetic outputs of the core: `build` calls it with the model's own)"
            )
            return Check("postprocess", "warning", note)
    row_us = (time.perf_counter() - began) / len(requests) * 1e6
    shapes = ", ".join(f"{name} {list(value.shape[1:])}" for name, value in answers[0].items())
    return Check(
        "postprocess", note=f"{len(answers)} synthetic rows, {row_us:,.0f} us a row: {shapes}"
    )


def synthetic_graph(outputs: Sequence[Tensor]) -> RunGraph:
    """Return a function with random outputs of the declared shapes, from 0 to 1, mostly small.

    A free axis has the size `VARIABLE`.
    """
    random = np.random.default_rng(0)

    def run(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        count = len(next(iter(feed.values())))
        return {tensor.name: make(tensor, count) for tensor in outputs}

    def make(tensor: Tensor, count: int) -> NDArray[Any]:
        dims = [VARIABLE if isinstance(axis, str) else axis for axis in tensor.dims]
        return (random.random((count, *dims)) ** 8).astype(NUMPY_TYPES[tensor.dtype])

    return run
