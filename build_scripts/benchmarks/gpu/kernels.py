"""Operators and copies of a graph on a GPU, counted without one.

The list of kernels of ONNX Runtime's CUDA provider is a file, because the provider's library does
not load without a driver. ONNX Runtime runs a node on the CPU that has no kernel there, or whose
inputs are all small and on the CPU already (``fallback_cpu_capability.cc``), and adds a copy for
each value that one side makes and the other one reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.files import scratch_folder
from triptych.base.onnx_graph import FLOAT, MODEL_FILE, initializers, read_model, value_types

KERNELS_FILE = Path(__file__).with_name("cuda_kernels.txt")

_HOST_INPUTS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(("Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile"), frozenset({1})),
    **dict.fromkeys(("Split", "OneHot", "CumSum", "TopK", "Pad"), frozenset({1, 2, 3})),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean"), frozenset({1})),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare"), frozenset({1})),
    "Slice": frozenset({1, 2, 3, 4}),
    "Range": frozenset({0, 1, 2}),
    "ConstantOfShape": frozenset({0}),
}
"""Inputs that a CUDA kernel reads on the CPU, such as shapes."""

_HOST_OUTPUTS = frozenset(("Shape", "Size"))
_MAX_SMALL = 100
"""Maximum number of elements of an initializer that counts as being on the CPU, too."""


class Kernel(NamedTuple):
    """Kernel of an operator.

    Attributes:
        first: First opset version of the operator.
        last: Last one; None if the kernel is for `first` alone, until the operator changes.
        types: Names of the types by parameter, such as ``float16``.
    """

    first: int
    last: int | None
    types: Mapping[str, frozenset[str]]


class OperatorCount(NamedTuple):
    """Operators of a graph after ONNX Runtime's optimization, on a GPU.

    Attributes:
        operators: Number of operators.
        on_cpu: Names of those that run on the CPU.
        copies: Values that are copied before the first one that depends on weights.
        late_copies: Values that are copied from there on.
        input_copies: Inputs that are copied to the GPU.
    """

    operators: int
    on_cpu: tuple[str, ...]
    copies: tuple[str, ...]
    late_copies: tuple[str, ...]
    input_copies: tuple[str, ...]


@cache
def read_kernels() -> Mapping[str, tuple[Kernel, ...]]:
    """Return the kernels by operator; the name of another domain is in front of it."""
    kernels: dict[str, tuple[Kernel, ...]] = {}
    for line in KERNELS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, versions, *constraints = line.split()
        first, _, last = versions.rstrip("+").partition("-")
        types = {
            parameter: frozenset(kinds.split(","))
            for parameter, _, kinds in (each.partition("=") for each in constraints)
        }
        kernel = Kernel(int(first), int(last) if last else None, types)
        kernels[name] = (*kernels.get(name, ()), kernel)
    return kernels


def find_missing_kernels() -> list[str]:
    """Return the kernels of the list that the installed ONNX Runtime lacks for a GPU."""
    from onnxruntime.capi import onnxruntime_pybind11_state as library

    found: dict[str, list[Any]] = {}
    for one in library.get_all_opkernel_def():
        if one.provider == "CUDAExecutionProvider":
            name = f"{one.domain}::{one.op_name}" if one.domain else one.op_name
            found.setdefault(name, []).append(one)
    return [
        f"{name} {kernel.first}"
        for name, kernels in read_kernels().items()
        for kernel in kernels
        if not any(
            one.version_range[0] <= kernel.first <= one.version_range[1]
            for one in found.get(name, ())
        )
    ]


def count_operators(graph: Path) -> OperatorCount:
    """Return the operators and copies of an ONNX file on a GPU.

    Args:
        graph: Path of the file; its float values are fp32.
    """
    import onnxruntime

    with scratch_folder("triptych-operators-") as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(folder / MODEL_FILE)
        onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        return count_nodes(read_model(folder / MODEL_FILE))


def count_nodes(model: Any) -> OperatorCount:
    """Return the operators and copies of an `onnx.ModelProto` as it is, on a GPU."""
    graph, types = model.graph, value_types(model)
    opsets = {one.domain: one.version for one in model.opset_import}
    constants = initializers(graph)
    inputs = {value.name for value in graph.input} - constants.keys()
    small = {name for name, one in constants.items() if _size(one) <= _MAX_SMALL} | inputs
    host: set[str] = set()
    learned: set[str] = set()
    sides: list[bool] = []
    for node in graph.node:
        here = has_kernel(node, opsets, types)
        names = [name for name in node.input if name]
        on_host = [name for name in names if name in host]
        pinned = _HOST_INPUTS.get(node.op_type, frozenset())
        read = [name for place, name in enumerate(node.input) if name and place not in pinned]
        if here and on_host and set(read) & host and all(name in host | small for name in names):
            here = False
        sides.append(here)
        if not here or node.op_type in _HOST_OUTPUTS:
            host |= set(node.output)
        matrices = [constants[name] for name in names if name in constants]
        weighed = any(one.data_type == FLOAT and len(one.dims) > 1 for one in matrices)
        if weighed or learned.intersection(names):
            learned |= set(node.output)
    copied: dict[str, bool] = {}
    fed: dict[str, None] = {}
    for node, here in zip(graph.node, sides, strict=True):
        pinned = _HOST_INPUTS.get(node.op_type, frozenset())
        for place, name in enumerate(node.input):
            if not name or name in constants:
                continue
            wants_host = not here or place in pinned
            if name in inputs:
                fed |= {} if wants_host else {name: None}
            elif wants_host != (name in host):
                copied[name] = name in learned
    return OperatorCount(
        len(graph.node),
        tuple(n.name or n.output[0] for n, here in zip(graph.node, sides, strict=True) if not here),
        tuple(name for name, late in copied.items() if not late),
        tuple(name for name, late in copied.items() if late),
        tuple(fed),
    )


def has_kernel(node: Any, opsets: Mapping[str, int], types: Mapping[str, int]) -> bool:
    """Check that the CUDA provider has a kernel for a node with values of these types."""
    import onnx

    if node.domain:
        since, parameters = 1, {"T": list(node.output[:1])}
    else:
        schema = onnx.defs.get_schema(node.op_type, opsets[""], "")
        since = schema.since_version
        parameters = {}
        for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for place, name in enumerate(names):
                parameter = formal[min(place, len(formal) - 1)]
                parameters.setdefault(parameter.type_str, []).append(name)
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return any(
        (kernel.first == since if kernel.last is None else kernel.first <= since <= kernel.last)
        and all(
            _type_name(types.get(value, 0)) in kernel.types[parameter]
            for parameter, values in parameters.items()
            for value in values
            if value and parameter in kernel.types
        )
        for kernel in read_kernels().get(name, ())
    )


def _type_name(kind: int) -> str:
    """Return ONNX Runtime's name of a type of `onnx.TensorProto.DataType`."""
    import onnx

    return str(onnx.TensorProto.DataType.Name(kind)).lower() if kind else ""


def _size(tensor: Any) -> int:
    size = 1
    for axis in tensor.dims:
        size *= axis
    return size
