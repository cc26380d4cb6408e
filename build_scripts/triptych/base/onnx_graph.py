"""Read, edit and write ONNX graphs, and run graphs in 16 bits on a CPU with a GPU's rounding.

ONNX Runtime's CPU provider has no bf16 kernel for most operators (Add, MatMul, Softmax), so a
session does not open. It computes fp16 in fp32 and removes the casts around its kernels, so that a
value may pass several operators without rounding to fp16: a value above 65,504 does not overflow
there as it does on a GPU.

Such graphs are therefore run as a view: every operator computes in fp32 on values that are 16-bit
numbers, and a pair of Casts rounds its result. Kernels that add in fp32 and store in 16 bits do the
same. ONNX Runtime keeps such pairs of casts, because they lose precision.

ONNX Runtime quantizes and dequantizes fp8 correctly unless it fuses. When it fuses, it treats fp8
as int8: a session does not open, or a Relu before a QuantizeLinear is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.base.arrays import Array

if TYPE_CHECKING:
    import onnx
    from numpy.typing import ArrayLike
    from onnxruntime import InferenceSession, SessionOptions

MODEL_FILE = "model.onnx"
MAX_PROTOBUF = 1_900_000_000
"""Maximum size of a graph in bytes; weights of a larger graph are stored in a file beside it."""


def hashes_of_graph(files: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `files` (name to hash) for the graph and the weights beside it."""
    return {name: digest for name, digest in files.items() if name.startswith(MODEL_FILE)}


class GraphTensor(NamedTuple):
    """An input or output of a graph."""

    name: str  # Name of the tensor
    kind: str  # Type of the elements as ONNX names it, such as ``FLOAT``
    # Size of each axis, or its name; an axis without either is named after the tensor. None if the
    # file does not contain them.
    axes: tuple[int | str, ...] | None

    @property
    def row_axes(self) -> tuple[int | str, ...]:
        """Axes without the first, which is the batch."""
        return (self.axes or ())[1:]


class GraphInterface(NamedTuple):
    """Inputs and outputs of a graph, and the entries that its exporter added."""

    inputs: tuple[GraphTensor, ...]  # Inputs without weights
    outputs: tuple[GraphTensor, ...]
    metadata: Mapping[str, str]
    weight_files: tuple[str, ...]  # Names of the files with weights beside the graph


def read_interface(path: Path) -> GraphInterface:
    """Read the interface of an ONNX file, without its weights.

    Raises:
        Exception: The file cannot be read; protobuf has no common class of errors.
    """
    return interface_of(read_model(path, weights=False))


def interface_of(model: onnx.ModelProto) -> GraphInterface:
    """Return the interface of an `onnx.ModelProto`."""
    import onnx

    weights = {tensor.name for tensor in model.graph.initializer}
    stored_apart = filter(onnx.external_data_helper.uses_external_data, model.graph.initializer)
    beside = {e.value for t in stored_apart for e in t.external_data if e.key == "location"}
    return GraphInterface(
        tuple(_graph_tensor(value) for value in model.graph.input if value.name not in weights),
        tuple(_graph_tensor(value) for value in model.graph.output),
        {entry.key: entry.value for entry in model.metadata_props},
        tuple(sorted(beside)),
    )


def _graph_tensor(value: onnx.ValueInfoProto) -> GraphTensor:
    import onnx

    found, kinds = value.type.tensor_type, onnx.TensorProto.DataType
    kind = kinds.Name(found.elem_type) if found.elem_type in kinds.values() else "INVALID"
    axes = tuple(
        axis.dim_value if axis.HasField("dim_value") else axis.dim_param or f"{value.name}_{index}"
        for index, axis in enumerate(found.shape.dim)
    )
    return GraphTensor(value.name, kind, axes if found.HasField("shape") else None)


def read_model(path: Path, *, weights: bool = True) -> onnx.ModelProto:
    """Return the graph as an `onnx.ModelProto`, with or without `weights` in a file beside it."""
    import onnx

    return onnx.load(path, load_external_data=weights)


def write_model(model: onnx.ModelProto, target: Path) -> Path:
    """Check and write ``target/model.onnx``; return its path."""
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(model, target / MODEL_FILE)
    return target / MODEL_FILE


def save_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Save a graph without traces of the machine that exported it."""
    import onnx

    graph = model.graph
    # Shapes of inner values have the old axis names, and metadata has source paths.
    del graph.value_info[:]
    model.producer_version = ""
    nodes = (node for one in (graph, *model.functions) for node in one.node)
    values = (*graph.input, *graph.output, *graph.initializer)
    for part in (model, graph, *model.functions, *nodes, *values):
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.checker.check_model(model)
    large = model.ByteSize() > MAX_PROTOBUF
    onnx.save(
        model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None
    )


OPSET = 19
"""First opset whose QuantizeLinear and DequantizeLinear support fp8 and 16-bit scales."""

PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "Einsum", "Attention"))
"""Operators with nearly all work of a model; their type determines accuracy and speed."""


Initializers = Mapping[str, "onnx.TensorProto"]
"""Initializers of a graph by name."""


def initializers(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the graph's initializers by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def value_of(tensor: onnx.TensorProto) -> Array:
    import onnx

    value: Array = onnx.numpy_helper.to_array(tensor)
    return value


def add_constant(graph: onnx.GraphProto, name: str, value: ArrayLike) -> str:
    """Append an initializer and return its name."""
    import onnx

    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return name


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def set_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Replace all nodes of a graph."""
    del graph.node[:]
    graph.node.extend(nodes)


def at_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Raise the opset of a graph of opset 18 or later to `OPSET`, in place, and return the graph.

    From 18 to 19 operators gained types and settings without other changes, so only the number
    changes.
    """
    declared = next(one for one in model.opset_import if not one.domain)
    declared.version = max(declared.version, OPSET)
    return model


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of an If, a Loop or a Scan."""
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, each followed by those of its subgraphs."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of a node, or that of its first output if it has none."""
    return str(node.name or next(iter(node.output), ""))


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including all names in its subgraphs."""
    yield from node.input
    for body in bodies(node):
        for inner in body.node:
            yield from reads(inner)
        yield from (output.name for output in body.output)


def readers(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return the indices of the nodes that read a value, by the name of the value."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for name in dict.fromkeys(reads(node)):
            found.setdefault(name, []).append(index)
    return found


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove the initializers that nothing reads any more, in place."""
    used = {name for node in graph.node for name in reads(node)}
    used |= {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def free_mark(graph: onnx.GraphProto) -> str:
    """Return a separator that no name in the graph contains, for unique new names."""
    taken = list(_names(graph))
    mark = "/"
    while any(mark in name for name in taken):
        mark += "/"
    return mark


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from node.output
        for body in bodies(node):
            yield from _names(body)


FLOAT, FLOAT16, BFLOAT16, FP8 = 1, 10, 16, 17
"""Numbers of `onnx.TensorProto.DataType`; fp8 is E4M3FN."""

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators; only the first result of each is read."""

SMALL = 1024
"""Bytes of an initializer that inference gets to read: sizes and axes, not weights."""


def infer_graph(model: onnx.ModelProto, *, data_prop: bool = False) -> onnx.ModelProto:
    """Return the graph, without large weights, with the types and shapes that ONNX infers.

    With `data_prop`, shapes that the graph computes are followed, too.
    """
    import onnx

    graph, helper = model.graph, onnx.helper
    weights = [tensor for tensor in graph.initializer if tensor.ByteSize() > SMALL]
    known = [_stand_in(node) if node.domain == MICROSOFT else node for node in graph.node]
    skeleton = helper.make_model(
        helper.make_graph(
            known,
            "skeleton",
            [
                *graph.input,
                *(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in weights),
            ],
            graph.output,
            [tensor for tensor in graph.initializer if tensor.ByteSize() <= SMALL],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    return onnx.shape_inference.infer_shapes(skeleton, data_prop=data_prop).graph


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the type of every value by name, as a number of `onnx.TensorProto.DataType`."""
    import onnx

    graph, inferred = model.graph, infer_graph(model)
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.domain == MICROSOFT:
            types |= dict.fromkeys(node.output[1:], onnx.TensorProto.INT32)  # mask of embeddings
        for name in node.output:
            if name and not types.get(name):
                raise ValueError(f"the type of {name} cannot be inferred")
    return types


def _stand_in(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a standard operator whose first result has the type and axes of the node's."""
    import onnx

    make = onnx.helper.make_node
    if node.op_type == "EmbedLayerNormalization":
        return make("Gather", [node.input[2], node.input[0]], node.output[:1])
    return make("Identity", node.input[:1], node.output[:1])


HALVES = (FLOAT16, BFLOAT16)
_MOVES = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity"),
        *("Neg", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
        *("Unsqueeze", "Where"),
    }
)
"""Operators whose results need no rounding: they are among their inputs, or their negatives."""

_TYPED_BY_ATTRIBUTE = frozenset(("Cast", "Constant", "ConstantOfShape"))
"""Operators that output the 16-bit value themselves."""


def open_session(path: Path, options: SessionOptions | None = None) -> InferenceSession:
    """Open an `onnxruntime.InferenceSession` on the CPU, whatever the graph's precision.

    Args:
        path: Path of a ``model.onnx`` with fp32 outputs.
        options: `onnxruntime.SessionOptions` to add to; None for the defaults.
    """
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions() if options is None else options
    model_graph = read_model(path, weights=False).graph
    weights = model_graph.initializer
    if not _has_unsigned_inputs(model_graph):
        # Without VNNI, products of bytes add pairs up in 16 bits, which overflow. A GPU adds them
        # up in 32. A graph for ONNX Runtime is judged with the kernels that serve it.
        _set_entry(options, "session.x64quantprecision", "1")
    if any(tensor.data_type == FP8 for tensor in weights):
        _set_entry(options, "session.disable_quant_qdq", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    graph = runnable(path)
    if graph != path and any(map(onnx.external_data_helper.uses_external_data, weights)):
        # A view is no file, so where its weights lie must be said.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.parent)
        )
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _has_unsigned_inputs(graph: onnx.GraphProto) -> bool:
    """Whether layers take UINT8 inputs, as graphs for ONNX Runtime have them and TensorRT's not."""
    import onnx

    unsigned = any(one.data_type == onnx.TensorProto.UINT8 for one in graph.initializer)
    return unsigned or any(node.op_type == "DynamicQuantizeLinear" for node in graph.node)


def _set_entry(options: SessionOptions, key: str, value: str) -> None:
    """Set what is not set yet: ONNX Runtime warns of an entry that is set again."""
    try:
        options.get_session_config_entry(key)
    except RuntimeError:
        options.add_session_config_entry(key, value)


def runnable(path: Path) -> bytes | Path:
    """Return what ONNX Runtime can open on a CPU in place of the graph at `path`.

    Returns:
        A view of the graph as described above, or `path` if no value is fp16 or bf16. Weights in a
        file beside the graph stay there.
    """
    model = read_model(path, weights=False)
    try:
        types = value_types(model)
    except ValueError:  # operators of ai.onnx.ml, for which ONNX infers nothing, have no 16 bits
        return path
    if not any(kind in HALVES for kind in types.values()):
        return path
    view: bytes = _view(model, types).SerializeToString()
    return view


def _view(model: onnx.ModelProto, types: dict[str, int]) -> onnx.ModelProto:
    """Return the graph with its 16-bit values as fp32 values of the same numbers."""
    graph = model.graph
    nodes = []
    mark = free_mark(graph)
    for tensor in graph.initializer:
        if tensor.data_type in HALVES:
            name = tensor.name
            tensor.name = f"{name}{mark}stored"
            nodes.append(_cast(tensor.name, name, FLOAT))
    for node in graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            kind = types.get(name)
            if kind not in HALVES or node.op_type in _MOVES:
                continue
            stored = f"{name}{mark}stored"
            if node.op_type in _TYPED_BY_ATTRIBUTE:
                node.output[place] = stored
            else:
                node.output[place] = f"{name}{mark}exact"
                nodes.append(_cast(node.output[place], stored, kind))
            nodes.append(_cast(stored, name, FLOAT))
    view = copy_model(model)
    del view.graph.value_info[:]
    set_nodes(view.graph, nodes)
    return view


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    import onnx

    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/cast", to=kind)


def open_original(path: Path, *, optimize: bool) -> InferenceSession:
    """Open an `onnxruntime.InferenceSession` of a graph as it is, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
