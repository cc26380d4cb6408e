"""Load the user's own PyTorch module, run it as it is, and export it to ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.arrays import Array
from triptych.base.cache import key_of, sha256_of
from triptych.base.errors import UserError
from triptych.base.onnx_edges import to_served
from triptych.base.onnx_graph import MODEL_FILE, save_onnx
from triptych.base.tensors import Tensor
from triptych.core.export.own_graph import (
    OwnGraph,
    RunGraph,
    triton_type,
    with_axis,
)
from triptych.core.export.to_onnx import convert
from triptych.models.loading import quiet
from triptych.runtime.hooking import load_file
from triptych.spec.model_fields import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

_MODULE_NAME = "triptych_own_module"
_ROWS = 3
"""Number of rows of the batch to trace with; sizes 0 and 1 would become constants."""


def load_module(spec: ModelSpec) -> nn.Module:
    """Return the `torch.nn.Module` of a spec with its weights, in evaluation mode and fp32.

    Raises:
        UserError: The file, the factory or the weights have a mistake.
    """
    import torch

    file, factory = spec.module_file, spec.model.factory
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # weights that are not trained are the same in each process
            module = getattr(load_file(file, _MODULE_NAME), factory)()
    except (Exception, SystemExit) as error:
        raise _refused(
            "model.module",
            f"must name a function or class that makes a module without arguments: {factory}",
            error,
            "Correct the file",
        ) from error
    if not isinstance(module, torch.nn.Module):
        rule = f"must make a torch.nn.Module: {factory}"
        raise _refused("model.module", rule, type(module).__name__, "Return the module")
    if spec.weights_file is not None:
        try:
            module.load_state_dict(_read_weights(spec.weights_file))
        except Exception as error:  # of the file, or of other names and shapes
            raise _refused(
                "model.weights",
                "must have the weights of the module",
                error,
                "Save them with safetensors.torch.save_file(module.state_dict(), FILE)",
            ) from error
    return module.eval().float()


def _read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    import torch
    from safetensors.torch import load_file

    is_safe = path.suffix == ".safetensors"
    weights: Mapping[str, torch.Tensor] = (
        load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    )
    return weights


def _refused(field: str, rule: str, given: object, remedy: str) -> UserError:
    return UserError(field, rule, given=" ".join(str(given).split())[:300], remedy=remedy)


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of `forward`, which are the inputs of the graph."""
    return list(inspect.signature(module.forward).parameters)


def open_module(spec: ModelSpec, module: nn.Module, *, double: bool = False) -> RunGraph:
    """Return a function that runs a module as it is, in fp32, or in fp64 if `double`.

    Raises:
        UserError: The module fails, or returns something else than tensors.
    """
    import torch

    names = input_names(module)
    if double:
        module = module.double()

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        arrays = _shaped(spec, feed, names)
        tensors = [torch.from_numpy(np.require(each, None, ("C", "W"))) for each in arrays]
        tensors = [t.double() if double and t.is_floating_point() else t for t in tensors]
        try:
            with torch.inference_mode():
                result = module(*tensors)
        except Exception as error:  # the user's own code
            each = zip(names, arrays, strict=True)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in each)
            rule = f"must run on the arrays of preprocess: {shapes}"
            raise _refused(
                "model.module", rule, error, "Correct `forward` or preprocess"
            ) from error
        found = {name: tensor.numpy() for name, tensor in _named(spec, result).items()}
        return {n: array[:, None] if array.ndim == 1 else array for n, array in found.items()}

    return run


def _shaped(spec: ModelSpec, feed: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    """Return arrays ``[rows, ...]`` in the shapes that `forward` takes."""
    scalars = spec.model.scalars or ()
    return [feed[name].reshape(-1) if name in scalars else feed[name] for name in names]


def find_scalars(
    spec: ModelSpec, module: nn.Module, example: Mapping[str, Array], known: Sequence[str]
) -> list[str]:
    """Return the inputs without a shape that a module takes as ``[batch]``: all, or none.

    Args:
        example: Inputs ``[1, ...]`` of one row.
        known: Names of the inputs without a shape.

    If both forms run, the results choose the one that fits the declared outputs.

    Raises:
        UserError: Both forms run, with other results, and the outputs do not choose.
    """
    results = dict[tuple[str, ...], dict[str, Array]]()
    for names in (list(known), list[str]()):
        run = open_module(with_scalars(spec, names), module)
        try:
            alone, together = (
                run({n: np.repeat(a, count, axis=0) for n, a in example.items()})
                for count in (1, _ROWS)
            )
        except UserError:
            continue
        # Numbers [batch] that are added to [batch, 1] make [batch, batch].
        if all(together[n].shape == (_ROWS, *a.shape[1:]) for n, a in alone.items()):
            results[tuple(names)] = alone
    fitting = [names for names, alone in results.items() if _fits(spec, alone)]
    if len(fitting) == 1:
        return list(fitting[0])
    if len(results) == 2:
        pairs = zip(*(each.values() for each in results.values()), strict=True)
        if not all(a.size == b.size and np.allclose(a.ravel(), b.ravel()) for a, b in pairs):
            raise _refused(
                "model.scalars",
                "must name the arguments of `forward` that have the shape [batch], because other "
                "results follow if they have the shape [batch, 1]",
                "",
                f"Add `scalars: [{', '.join(known)}]` to `model`, or `scalars: []` for [batch, 1]",
            )
    return list(next(iter(results), ()))


def _fits(spec: ModelSpec, results: Mapping[str, Array]) -> bool:
    """Return whether results have the names and shapes of the declared outputs."""
    fields = spec.outputs
    if len(results) == len(fields) == 1:
        results = dict(zip(fields, results.values(), strict=True))
    return all(
        name in results
        and results[name].ndim - 1 == len(field.shape or [1])
        and all(
            isinstance(a, str) or a == b
            for a, b in zip(field.shape or [1], results[name].shape[1:], strict=True)
        )
        for name, field in fields.items()
    )


def with_scalars(spec: ModelSpec, names: Sequence[str]) -> ModelSpec:
    """Return the spec of one model with the arguments of `forward` that have one axis."""
    model = spec.model.model_copy(update={"scalars": list(names)})
    return spec.model_copy(update={"model": model})


def _named(
    spec: ModelSpec, result: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a result by name: of a dict, or in the order of `model.outputs`."""
    import torch

    if isinstance(result, Mapping):
        named = dict(result)
    else:
        values = [result] if isinstance(result, torch.Tensor) else list(result)
        names = spec.model.outputs or [f"output_{index}" for index in range(len(values))]
        if len(names) != len(values):
            rule = f"must name the {len(values)} outputs of the module"
            raise _refused("model.outputs", rule, ", ".join(names), "Correct the list")
        named = dict(zip(names, values, strict=True))
    wrong = [name for name, value in named.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        given = f"{wrong[0]} is {type(named[wrong[0]]).__name__}"
        raise _refused("model.module", "must return tensors", given, "Return tensors alone")
    return named


def read_module(spec: ModelSpec, run: RunGraph, example: Mapping[str, Array]) -> OwnGraph:
    """Return the interface of a module, known from its results on an example of one row."""
    name, axis = spec.model.axis
    results = run(example)
    inputs = [_tensor(each, array) for each, array in example.items()]
    outputs = [_tensor(each, array) for each, array in results.items()]
    if axis is not None:  # an axis of a result varies if it follows the size of the input
        longer = run({n: _longer(array, axis.of.get(n)) for n, array in example.items()})
        outputs = [_with_free(tensor, longer[tensor.name].shape[1:], name) for tensor in outputs]
    files = [file for file in (spec.module_file, spec.weights_file) if file is not None]
    key = {
        "files": [sha256_of(file) for file in files],
        "factory": spec.model.factory,
        "outputs": spec.model.outputs,
        "scalars": spec.model.scalars,
    }
    return with_axis(spec, OwnGraph(key_of("own_module", key), tuple(inputs), tuple(outputs)))


def _tensor(name: str, array: Array) -> Tensor:
    if not array.ndim:
        rule = f"must return tensors with the batch as first axis: {name}"
        raise _refused("model.module", rule, "no axis", "Return one value for each row")
    return Tensor(name, triton_type(name, array), array.shape[1:])


def _longer(array: Array, axis: int | None) -> Array:
    """Return an array with its last element again along an axis; the array itself without one."""
    if axis is None:
        return array
    return np.pad(array, [(0, int(place == axis)) for place in range(array.ndim)], mode="edge")


def _with_free(tensor: Tensor, longer: Sequence[int], name: str) -> Tensor:
    dims = zip(tensor.dims, longer, strict=True)
    return replace(tensor, dims=tuple(size if size == other else name for size, other in dims))


def export_module(spec: ModelSpec, example: Mapping[str, Array], target: Path) -> None:
    """Write ``target/model.onnx``: the module with a batch axis of variable size.

    Args:
        example: Arrays of one row.
        target: Folder of the file.

    Raises:
        UserError: The module does not export.
    """
    import torch

    module = load_module(spec)
    names = input_names(module)
    axis_name, axis = spec.model.axis
    of = {} if axis is None else axis.of
    # Sizes 0 and 1 would become constants, too.
    arrays = [np.repeat(array, _ROWS, axis=0) for array in _shaped(spec, example, names)]
    for _ in range(2):
        arrays = [_longer(a, of.get(n)) for n, a in zip(names, arrays, strict=True)]
    tensors = tuple(torch.from_numpy(array) for array in arrays)
    with torch.inference_mode():
        outputs = list(_named(spec, module(*tensors)))
    batch = torch.export.Dim("batch", min=1, max=4096)
    free = None if axis is None else torch.export.Dim(axis_name, min=axis.min, max=axis.max)
    dynamic = tuple({0: batch, **({of[name]: free} if name in of else {})} for name in names)
    try:
        with quiet(), torch.no_grad():
            proto = convert(module, tensors, dynamic, names, outputs)
    except Exception as error:
        raise _refused(
            "model.module",
            "must be a module that torch.export and torch.onnx can export with a variable batch",
            f"{type(error).__name__}: {error}",
            "Remove branches on values and on the batch size from `forward`, or export it to ONNX",
        ) from error
    to_served(proto)
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(proto, target / MODEL_FILE)
