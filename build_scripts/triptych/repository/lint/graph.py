"""The inputs and outputs of an ONNX file, in Triton's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FLOATS = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64"}


@dataclass(frozen=True)
class GraphTensor:
    """Its dims have the batch dimension, -1 where variable; None when the file does not say."""

    data_type: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True)
class Graph:
    """What one ONNX file says about itself.

    Attributes:
        file: path relative to the repository.
        data_files: files with weights that it refers to, relative to its folder.
        problem: why it could not be read; empty when it could.
    """

    file: str
    inputs: dict[str, GraphTensor] = field(default_factory=dict)
    outputs: dict[str, GraphTensor] = field(default_factory=dict)
    data_files: tuple[str, ...] = ()
    problem: str = ""


def onnx_installed() -> bool:
    try:
        import onnx  # noqa: F401
    except ImportError:
        return False
    return True


def read_graph(path: Path, file: str) -> Graph:
    """Read the graph at `path` without its external weights; a broken file is a graph's `problem`.

    Raises:
        ImportError: onnx is not installed (see `onnx_installed`).
    """
    import onnx

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as problem:  # the parser raises more than its documented DecodeError
        return Graph(file, problem=f"{type(problem).__name__}: {problem}")
    if not graph.output:
        return Graph(file, problem="no graph with an output in it")
    weights = {tensor.name for tensor in graph.initializer}
    stored_apart = filter(onnx.external_data_helper.uses_external_data, graph.initializer)
    locations = {e.value for t in stored_apart for e in t.external_data if e.key == "location"}
    return Graph(
        file,
        inputs={value.name: _tensor(value) for value in graph.input if value.name not in weights},
        outputs={value.name: _tensor(value) for value in graph.output},
        data_files=tuple(sorted(locations)),
    )


def _tensor(value: Any) -> GraphTensor:
    import onnx

    tensor = value.type.tensor_type
    known = tensor.elem_type in onnx.TensorProto.DataType.values()
    name = onnx.TensorProto.DataType.Name(tensor.elem_type) if known else "INVALID"
    dims = None
    if tensor.HasField("shape"):
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    return GraphTensor(f"TYPE_{_FLOATS.get(name, name)}", dims)
