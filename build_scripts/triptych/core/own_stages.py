"""Find the tensors between the steps of an own pipeline by running its functions and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import NamedTuple

from triptych.base.arrays import Array
from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.core.export.own_graph import (
    OwnGraph,
    RunGraph,
    read_graph,
    triton_type,
    with_axis,
)
from triptych.core.own_chain import (
    arrays_of,
    name_arrays,
    name_passed,
    rows_of_model,
    run_models,
)
from triptych.core.own_reader import OwnReader
from triptych.core.requests import GateRequest, Sample
from triptych.models.info import ModelNames, OwnInterface, OwnStage
from triptych.runtime.hooking import FORWARDED_PREFIX, HOOKS_FILE, has_parameter
from triptych.runtime.own_model import ROW_COUNTS
from triptych.runtime.own_step import PASSED, unpack_arrays
from triptych.runtime.row_types import Arrays, CoreRows
from triptych.spec.model_fields import ModelSpec

APART_ROWS = 4
"""Number of rows that run alone and in one batch to find a graph that mixes rows."""


def takes_rows(hooks: ModuleType | None, spec: ModelSpec) -> bool:
    """Return whether a function behind a model takes the inputs of the request.

    Raises:
        UserError: ``hooks.py`` lacks a function between models.
    """
    between = list(spec.steps)[1:]
    for name in between:
        if not callable(getattr(hooks, name, None)):
            raise UserError(
                str(spec.folder / HOOKS_FILE),
                f"has no function `{name}`, which makes the inputs of a model",
                given="none",
                remedy=f"Write `def {name}(arrays, rows, parameters, counts)`",
            )
    return any(has_parameter(getattr(hooks, n, None), "rows") for n in (*between, "postprocess"))


class Stages(NamedTuple):
    """The functions and models of a pipeline, as far as some requests show them."""

    stages: tuple[OwnStage, ...]  # Functions and models; a single model has an empty name
    graphs: Mapping[str, OwnGraph]  # Interface of each model
    rows: Mapping[str, Sequence[Sample]]  # Core rows of each model
    spec: ModelSpec  # Spec of the pipeline, with `scalars` of each module


def find_stages(
    spec: ModelSpec,
    reader: OwnReader,
    requests: Sequence[GateRequest],
    runs: dict[str, RunGraph],
    *,
    rows: bool,
) -> Stages:
    """Run the functions and models on requests to find all tensors between the steps.

    Args:
        requests: Requests of one row each.
        runs: Function that runs each model; that of a module is replaced by one that takes its
            `scalars`.
        rows: Whether a function behind a model takes the inputs of the request.

    Raises:
        UserError: A model has a mistake, a function fails, or its arrays do not fit the models.
    """
    stages: list[OwnStage] = []
    graphs: dict[str, OwnGraph] = {}
    samples: dict[str, list[Sample]] = {}
    results: list[Arrays] = []
    for function, models in spec.steps.items():

        def make(
            own: OwnInterface,
            names: tuple[ModelNames, ...],
            some: Sequence[GateRequest],
            function: str = function,
            behind: Sequence[Arrays] = tuple(results),
        ) -> list[CoreRows]:
            if not stages:
                return reader.discover(own, some)
            step = reader.step(OwnStage(function, own, names))
            return [reader.call(step, *each) for each in zip(some, behind, strict=False)]

        here = {}
        for name in models:
            one = spec.with_model(name)
            if one.model.onnx is not None:
                here[name] = with_axis(one, read_graph(one))
            else:
                here[name], one, runs[name] = read_module_interface(one, reader, requests, make)
                every = {**spec.models, name: one.model} if name else {}
                first = next(iter(every.values()), one.model)
                spec = spec.model_copy(update={"models": every, "model": first})
        names = name_arrays(here)
        run = partial(run_models, runs, names)
        labels = {name: each for graph in here.values() for name, each in graph.labels.items()}
        if labels and spec.models:
            raise UserError(
                "models",
                "must have labels that are numbers if there are several models",
                given=f"texts of the output `{next(iter(labels))}` of {', '.join(models)}",
                remedy="Train with numbers, or give the classifier a pipeline of its own",
            )
        own = OwnInterface(*arrays_of(here, names), takes_rows=rows, labels=labels)
        made = make(own, names, requests)
        own = find_interface(own, made, spec.with_model(models[0]), run)
        if stages:
            passed = [name_passed(each.tensors) for each in made]
            own = replace(own, past_core=(passed[0],))
        stages.append(OwnStage(function, own, names))
        known = {tensor.name: tensor for tensor in (*own.inputs, *own.outputs)}
        for each in names:
            graph = here[each.model]
            graphs[each.model] = replace(
                graph,
                inputs=tuple(replace(known[a], name=n) for n, a in each.inputs.items()),
                outputs=tuple(replace(known[a], name=n) for n, a in each.outputs.items()),
            )
            samples[each.model] = [row for m in made for row in rows_of_model(m.tensors, each)]
        if len(stages) < len(spec.steps):
            past = [tensor.name for tensor in own.past_core]
            results = [{**run(m.tensors), **{n: m.tensors[n] for n in past}} for m in made]
    return Stages(tuple(stages), graphs, samples, spec)


MakeRows = Callable[[OwnInterface, tuple[ModelNames, ...], Sequence[GateRequest]], list[CoreRows]]
"""Function that makes the rows of models with an interface."""


def read_module_interface(
    spec: ModelSpec, reader: OwnReader, requests: Sequence[GateRequest], make: MakeRows
) -> tuple[OwnGraph, ModelSpec, RunGraph]:
    """Return the interface of a module by its results on one row, the spec, and what runs it.

    The spec has the `scalars` of the module.

    Raises:
        UserError: The model has a mistake, or `preprocess` fails.
    """
    from triptych.core.export import own_module

    module = own_module.load_module(spec)
    names = own_module.input_names(module)
    (made,) = make(OwnInterface((), ()), (), requests[:1])
    tensors = made.tensors
    arrays = unpack_arrays(tensors[PASSED]) if PASSED in tensors else tensors
    is_sent = not arrays
    arrays = arrays or reader.named(requests[0], names)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise UserError(
            "model.module",
            "must take arrays that preprocess returns, or inputs of the pipeline, by their names",
            given=f"`forward` takes {missing[0]}; there are {', '.join(arrays) or 'none'}",
            remedy="Rename the argument or the array",
        )
    scalars = spec.model.scalars
    if scalars is None:
        scalars = [name for name in names if arrays[name].ndim == 1]
    example = {n: a[:, None] if (a := arrays[n]).ndim == 1 else a for n in names}
    if is_sent and spec.model.scalars is None:
        known = [name for name in names if not spec.inputs[name].shape]
        scalars = own_module.find_scalars(spec, module, example, known)
    spec = own_module.with_scalars(spec, scalars)
    run = own_module.open_module(spec, module)
    return own_module.read_module(spec, run, example), spec, run


def find_interface(
    own: OwnInterface, made: Sequence[CoreRows], spec: ModelSpec, run: RunGraph
) -> OwnInterface:
    """Return the interface with the sizes of free axes, and with the tensors past the core.

    Args:
        own: Interface as the graph and the functions declare it.
        made: Results of `OwnReader.discover`, at least one.

    Raises:
        UserError: Rows differ in the size of an axis, or arrays do not fit the graph.
    """
    names = {tensor.name for tensor in own.inputs}
    named, _ = spec.model.axis
    inputs = tuple(_sized(t, [each.tensors[t.name] for each in made], named) for t in own.inputs)
    for tensor in inputs:
        free = [axis for axis in tensor.dims if isinstance(axis, str) and axis != named]
        if free:
            sizes = sorted({str(each.tensors[tensor.name].shape[1:]) for each in made})
            differ = f"axes {' and '.join(free)} differ" if free[1:] else f"axis {free[0]} differs"
            raise UserError(
                f"model: {tensor.name}",
                f"must get arrays of one shape, but its {differ} between rows",
                given=", ".join(sizes[:4]),
                remedy="Resize or cut the rows in preprocess"
                + (
                    "; one axis at most may differ"
                    if named or len(free) > 1
                    else f", or declare the axis: model.axes: {{{free[0]}: {{max: SIZE}}}}"
                ),
            )
    results = [run({t.name: each.tensors[t.name] for t in inputs}) for each in made[:APART_ROWS]]
    outputs = tuple(_sized(t, [each[t.name] for each in results], named) for t in own.outputs)
    counts = {ROW_COUNTS in each.tensors for each in made}
    if len(counts) > 1:
        raise UserError(
            str(spec.folder / HOOKS_FILE),
            "has a function `preprocess` that returns counts for some rows alone",
            given="a dict for one row, a dict and counts for another",
            remedy="Always return the counts",
        )
    passed = [t for t in made[0].tensors if t not in names and not t.startswith(FORWARDED_PREFIX)]
    past_core = [_passed(name, [each.tensors.get(name) for each in made], spec) for name in passed]
    if own.takes_rows:
        for name, field in spec.inputs.items():
            tensor = field.tensor(name)
            past_core.append(replace(tensor, name=FORWARDED_PREFIX + name, optional=False))
    return replace(
        own,
        inputs=inputs,
        outputs=outputs,
        past_core=tuple(past_core),
        has_counts=ROW_COUNTS in made[0].tensors,
    )


def _sized(tensor: Tensor, arrays: Sequence[Array], kept: str = "") -> Tensor:
    """Return a tensor with the size of each free axis that is the same in all arrays.

    The axis `kept` stays free.
    """
    dims = [
        axis if isinstance(axis, int) or axis == kept or len(sizes) > 1 else next(iter(sizes))
        for axis, sizes in (
            (axis, {array.shape[place] for array in arrays})
            for place, axis in enumerate(tensor.dims, start=1)
        )
    ]
    return replace(tensor, dims=tuple(dims))


def _passed(name: str, arrays: Sequence[Array | None], spec: ModelSpec) -> Tensor:
    """Return the tensor of an array that `preprocess` makes beside the inputs of the core.

    Raises:
        UserError: Rows differ in type, number of axes or names.
    """
    known = [array for array in arrays if array is not None]
    forms = {(array.dtype.name, array.ndim) for array in known}
    if len(known) < len(arrays) or len(forms) > 1 or known[0].ndim < 2:
        found = ", ".join(f"{kind} with {axes} axes" for kind, axes in sorted(forms))
        raise UserError(
            f"{spec.folder / HOOKS_FILE}: {name}",
            "must be an array of numbers [core rows, ...] of the same type in each request, since "
            "it is not an input of the graph",
            given=found if len(known) == len(arrays) else f"{found}, and none in another request",
            remedy="Return an array with two axes or more, for example [core rows, 1]",
        )
    return _sized(
        Tensor(
            name, triton_type(name, known[0]), tuple(f"{name}_{i}" for i in range(1, known[0].ndim))
        ),
        known,
    )
