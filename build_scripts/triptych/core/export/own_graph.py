"""Read the user's own ONNX file, run it as it is, and write it as the core of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.base.arrays import Array
from triptych.base.cache import (
    MINUTES_ONCE,
    cached_stage,
    code_hash,
    key_of,
    sha256_of,
    versions_of,
)
from triptych.base.errors import Progress, UserError, no_progress
from triptych.base.onnx_edges import read_labels, to_served
from triptych.base.onnx_graph import (
    MODEL_FILE,
    GraphInterface,
    GraphTensor,
    hashes_of_graph,
    interface_of,
    open_original,
    read_model,
    save_onnx,
)
from triptych.base.tensors import DType, Tensor
from triptych.core.export.to_onnx import Exported
from triptych.runtime.hooking import NUMPY_TYPES
from triptych.runtime.row_types import Arrays
from triptych.spec.model_fields import ModelSpec
from triptych.spec.plan import Plan

CODE = (
    "core/export/own_*.py",
    "core/export/operators.py",
    "core/export/to_onnx.py",
    "base/onnx_graph.py",
    "base/onnx_edges.py",
)

if TYPE_CHECKING:
    import onnx
_DTYPES: Mapping[str, DType] = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "DOUBLE": "FP64",
    "INT64": "INT64",
    "INT32": "INT32",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "UINT32": "UINT32",
    "BOOL": "BOOL",
}
"""Triton's data type by that of ONNX."""


def _shown(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{tensor.name} {tensor.dtype} {tensor.dims}" for tensor in tensors]


RunGraph = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Function from the inputs of a graph, ``[rows, ...]`` each, to its outputs by name."""


@dataclass(frozen=True)
class OwnGraph:
    """Interface of the user's graph."""

    sha256: str  # Hash of the file and of its weights, in hex
    inputs: tuple[Tensor, ...]  # Inputs without the batch axis
    outputs: tuple[Tensor, ...]  # Outputs without the batch axis
    # Texts of the labels of each output whose values are their numbers
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)


def read_served(file: Path, field: str) -> tuple[onnx.ModelProto, GraphInterface]:
    """Return an ONNX file in the form of a core, without its weights, and its interface.

    Raises:
        UserError: The file, which `field` names, cannot be read.
    """
    try:
        model = read_model(file, weights=False)
        to_served(model)
        return model, interface_of(model)
    except Exception as error:  # protobuf's error, or that of the file
        raise UserError(
            field,
            "must be a readable ONNX file",
            given=f"{file}: {' '.join(str(error).split())[:200]}",
            remedy="Correct the path, or export the model again",
        ) from error


def read_graph(spec: ModelSpec) -> OwnGraph:
    """Read the interface of the graph that a spec names.

    Raises:
        UserError: The file cannot be read, or its graph has no batch axis or unsupported types.
    """
    file = spec.model_file
    model, graph = read_served(file, "model.onnx")
    if not graph.inputs:
        raise UserError(
            "model.onnx", "must have an input", given="none", remedy="Export it with its inputs"
        )
    missing = [name for name in graph.weight_files if not (file.parent / name).is_file()]
    if missing:
        raise UserError(
            "model.onnx",
            "must have its weights beside it",
            given=f"no file {missing[0]} in {file.parent}",
            remedy="Copy the file that the export wrote beside the graph",
        )
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    return OwnGraph(
        _hash(file, graph),
        tuple(_read_tensor(tensor, "input", makers) for tensor in graph.inputs),
        tuple(_read_tensor(tensor, "output", makers) for tensor in graph.outputs),
        read_labels(graph.metadata),
    )


def _hash(file: Path, graph: GraphInterface) -> str:
    files = (file, *(file.parent / name for name in graph.weight_files))
    return key_of("own_graph", {"files": [sha256_of(path) for path in files]})


def served_file(spec: ModelSpec) -> Path:
    """Return the user's ONNX file, or its graph in the form of a core if it differs, cached."""
    file = spec.model_file
    try:
        model = read_model(file, weights=False)
        if not to_served(model):
            return file
    except Exception:  # of protobuf; `read_graph` reports it
        return file
    stage = {"model": _hash(file, interface_of(model)), "code": code_hash(*CODE)}

    def work(target: Path) -> None:
        model = read_model(file)
        to_served(model)
        save_onnx(model, target / MODEL_FILE)

    return cached_stage("own_served", stage, work, no_progress).folder / MODEL_FILE


def _read_tensor(tensor: GraphTensor, kind: str, makers: Mapping[str, str]) -> Tensor:
    name, axes = tensor.name, tensor.axes
    dtype = _DTYPES.get(tensor.kind)
    if dtype is None:
        raise UserError(
            "model.onnx",
            f"has an {kind} `{name}` of an unsupported type",
            given=f"{tensor.kind} of the operator {makers.get(name, 'none')}",
            remedy=f"Export it with one of {', '.join(_DTYPES)}, such as labels that are numbers, "
            "or cut the graph before it (onnx.utils.extract_model)",
        )
    if not axes or isinstance(axes[0], int):
        given = f"a first axis of {axes[0]}" if axes else "no axis"
        raise UserError(
            "model.onnx",
            f"must have a batch axis of variable size as the first axis of its {kind} `{name}`",
            given=given,
            remedy="Export it with this axis dynamic (torch.onnx.export: dynamic_shapes, or "
            "dynamic_axes), so that Triton can batch requests. If the batch is another axis, name "
            "it batch",
        )
    return Tensor(name, dtype, tensor.row_axes)


def with_axis(spec: ModelSpec, graph: OwnGraph) -> OwnGraph:
    """Return the interface with the name of the declared axis where `of` gives its number.

    Raises:
        UserError: No input has the axis, or `of` names an unknown input.
    """
    name, axis = spec.model.axis
    if axis is None:
        return graph
    known = {tensor.name for tensor in graph.inputs}
    inputs = []
    for tensor in graph.inputs:
        dims = list(tensor.dims)
        if tensor.name in axis.of and axis.of[tensor.name] <= len(dims):
            dims[axis.of[tensor.name] - 1] = name
        inputs.append(replace(tensor, dims=tuple(dims)))
    if set(axis.of) - known or not any(name in tensor.dims for tensor in inputs):
        free = sorted({str(d) for t in graph.inputs for d in t.dims if isinstance(d, str)})
        raise UserError(
            f"model.axes.{name}",
            "must be an axis of an input of the graph",
            given=f"free axes: {', '.join(free) or 'none'}; inputs: {', '.join(sorted(known))}",
            remedy="Use the name of the graph, or give the number of the axis for each input in of",
        )
    return replace(graph, inputs=tuple(inputs))


def open_graph(file: Path, *, optimize: bool = True) -> RunGraph:
    """Return a function that runs the user's graph as it is, with ONNX Runtime on the CPU.

    Without `optimize`, its operators run one by one as they stand in the file.

    Raises:
        UserError: ONNX Runtime cannot open the file.
    """
    try:
        session = open_original(file, optimize=optimize)
    except Exception as error:  # ONNX Runtime has an exception class for each reason
        raise UserError(
            "model.onnx",
            "must be a graph that ONNX Runtime can run on a CPU",
            given=" ".join(str(error).split())[:300],
            remedy="Export it again with operators and an opset that ONNX Runtime supports",
        ) from error
    return run_session(session)


def run_session(session: Any) -> RunGraph:
    """Return a function that runs an `onnxruntime.InferenceSession`."""
    names = [output.name for output in session.get_outputs()]

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, session.run(None, dict(feed)), strict=True))

    return run


def open_own_model(spec: ModelSpec, *, other_rounding: bool = False) -> RunGraph:
    """Return a function that runs the user's model as it is.

    With `other_rounding`, a module runs in fp64. A graph, which cannot, runs its operators one by
    one, so that the difference shows how much the order of additions matters.

    Raises:
        UserError: The model cannot be opened.
    """
    if spec.model.onnx is not None:
        return open_graph(served_file(spec), optimize=not other_rounding)
    from triptych.core.export.own_module import load_module, open_module

    return open_module(spec, load_module(spec), double=other_rounding)


def mixed_rows(given: str) -> UserError:
    """Return the error for a model whose rows depend on each other, with what shows it."""
    return UserError(
        "model",
        "must compute each row of a batch by itself",
        given=given,
        remedy="Export the model in evaluation mode with a dynamic batch axis, and without "
        "operations across rows. If the batch is not the first axis of an ONNX file, name its axis "
        "batch; a module takes it first (batch_first=True)",
    )


def triton_type(name: str, array: Array) -> DType:
    """Return the data type of Triton for an array.

    Raises:
        UserError: There is none.
    """
    by_numpy = {np.dtype(NUMPY_TYPES[dtype]): dtype for dtype in _DTYPES.values()}
    dtype = by_numpy.get(array.dtype)
    if dtype is None:
        raise UserError(
            name,
            "must be an array of a type that Triton has",
            given=array.dtype,
            remedy=f"Convert it to one of {', '.join(map(str, by_numpy))}",
        )
    return dtype


def _set_sizes(values: Sequence[onnx.ValueInfoProto], plan: Plan) -> None:
    """Set the size of each free axis that is the same for all rows, as the config declares it."""
    known = {tensor.name: tensor.dims for tensor in (*plan.core_inputs, *plan.core.outputs)}
    for value in values:  # weights may be among the inputs
        axes = value.type.tensor_type.shape.dim[1:]
        for axis, size in zip(axes, known.get(value.name, ()), strict=False):
            if isinstance(size, int):
                axis.dim_value = size


def find_own_graph(spec: ModelSpec, sha256: str, example: Arrays, progress: Progress) -> Path:
    """Return the user's ONNX file in the form of a core, or that of an exported module, cached.

    Args:
        sha256: Hash of the model.
        example: Inputs of the core for one row.
    """
    if spec.model.onnx is not None:
        return served_file(spec)
    of = getattr(spec.model.axis[1], "of", {})
    stage: dict[str, object] = {
        "model": sha256,
        "tensors": {
            name: f"{value.dtype} {np.delete(value.shape, of.get(name, []))}"
            for name, value in example.items()
        },
        "axes": spec.model.model_dump(mode="json")["axes"],
        "scalars": spec.model.scalars,
        "versions": versions_of("onnx", "torch", "onnxscript"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        from triptych.core.export.own_module import export_module

        progress("export", f"{spec.model.source} to ONNX; with the gate {MINUTES_ONCE}")
        export_module(spec, example, target)

    return cached_stage("own_module", stage, work, progress).folder / MODEL_FILE


def export_graph(
    plan: Plan, spec: ModelSpec, example: Mapping[str, Array], progress: Progress
) -> Exported:
    """Return the user's model as the fp32 core of a pipeline, cached.

    Args:
        example: Inputs of the core for one row.
    """
    stage: dict[str, object] = {
        "model": plan.info.sha256,
        "tensors": _shown((*plan.core_inputs, *plan.core.outputs)),
        "versions": versions_of("onnx", "torch", "onnxscript"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        model = read_model(find_own_graph(spec, plan.info.sha256, example, progress))
        _set_sizes([*model.graph.input, *model.graph.output], plan)
        save_onnx(model, target / MODEL_FILE)

    folder, cached, files = cached_stage("own_graph", stage, work, progress)
    graph = hashes_of_graph(files)
    size = sum((folder / name).stat().st_size for name in graph) / 1e6
    progress("export", f"{spec.model.source}, {size:.1f} MB{' (cached)' if cached else ''}")
    return Exported(folder / MODEL_FILE, key_of("own_graph", stage), files=graph)
