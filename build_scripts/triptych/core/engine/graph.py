"""Properties of an ONNX graph that its engine must preserve: inputs, outputs, types of its nodes.

`describe_position` describes where in the model a node is. Exported nodes have numbers for names,
but weights have the names of their modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from triptych.base.onnx_graph import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    FP8,
    PRODUCTS,
    initializers,
    node_name,
    read_model,
    readers,
    reads,
    value_types,
)
from triptych.spec.engine_plan import Dims

if TYPE_CHECKING:
    import onnx


class ElementType(NamedTuple):
    """TensorRT's name of a type, bytes per element, and `core.precision`'s name for products."""

    tensorrt: str
    size: int
    precision: str = ""


ELEMENT_TYPES = {
    FLOAT: ElementType("FLOAT", 4, "fp32"),
    2: ElementType("UINT8", 1),
    3: ElementType("INT8", 1, "int8"),
    6: ElementType("INT32", 4),
    7: ElementType("INT64", 8),
    9: ElementType("BOOL", 1),
    FLOAT16: ElementType("HALF", 2, "fp16"),
    BFLOAT16: ElementType("BF16", 2, "bf16"),
    FP8: ElementType("FP8", 1, "fp8"),
}
"""Element types by the number of `onnx.TensorProto.DataType`."""

_UNKNOWN = ElementType("", 4)
_CASTS = frozenset(("Cast", "QuantizeLinear", "DequantizeLinear"))
_SEEN_THROUGH = ("Identity", "Reshape", "Transpose")
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\s|\x1e|\[|$)")
_FUSED = re.compile(r"\s*\+\s*")
_MYELIN = re.compile(r"_myl\d*_\d+$")


class GraphValue(NamedTuple):
    """An input or output of the graph.

    `dtype` is TensorRT's name of its type; varying dims are -1.
    """

    dtype: str
    dims: Dims


@dataclass(frozen=True)
class EngineGraph:
    """Properties of a graph, without its weights."""

    inputs: Mapping[str, GraphValue]
    outputs: Mapping[str, GraphValue]
    products: Mapping[str, str]  # Precision that each matrix product requires, by node
    casts: frozenset[str]  # Nodes that convert types
    stored_bytes: int  # Bytes of all weights, in their own types
    wide_bytes: int  # Additional bytes if the 16- and 8-bit weights of `products` were fp32


def read_graph(path: Path) -> EngineGraph:
    """Read a ``model.onnx`` without the weights in a file beside it.

    Nodes have the names that TensorRT's parser gives their layers: `node_name`.
    """
    model = read_model(path, weights=False)
    graph, types = model.graph, value_types(model)
    sources = {name: node for node in graph.node for name in node.output}
    weights = initializers(graph)
    products: dict[str, str] = {}
    multiplied: set[str] = set()
    for node in graph.node:
        if node.op_type in PRODUCTS and (wanted := _wanted(node, types, sources)):
            products[node_name(node)] = wanted
            origins = (_origin(value, sources, "DequantizeLinear") for value in node.input)
            multiplied |= weights.keys() & set(origins)
    stored = {
        name: math.prod(tensor.dims) * ELEMENT_TYPES.get(tensor.data_type, _UNKNOWN).size
        for name, tensor in weights.items()
    }
    wide = 0
    for name in multiplied:
        known = ELEMENT_TYPES.get(weights[name].data_type, _UNKNOWN)
        if known.precision:
            wide += stored[name] // known.size * (4 - known.size)
    return EngineGraph(
        inputs={value.name: _value(value) for value in graph.input if value.name not in weights},
        outputs={value.name: _value(value) for value in graph.output},
        products=products,
        casts=frozenset(node_name(node) for node in graph.node if node.op_type in _CASTS),
        stored_bytes=sum(stored.values()),
        wide_bytes=wide,
    )


def onnx_nodes(metadata: str) -> list[str]:
    """Return the nodes named by ``[ONNX Layer: name][ONNX Layer: …]`` in a layer's metadata."""
    return _NODE.findall(metadata)


def fused_layers(name: str) -> list[str]:
    """Return the layers that one was fused from: ``a + b``, or Myelin's ``a+b_myl0_16``."""
    return [part for part in _FUSED.split(_MYELIN.sub("", name)) if part]


def _wanted(
    node: onnx.NodeProto, types: Mapping[str, int], sources: Mapping[str, onnx.NodeProto]
) -> str:
    """Return the precision that a product requires; empty if it multiplies integers.

    A product of two dequantized operands must be computed in the type they were quantized to.
    """
    kinds = []
    for value in node.input[:2]:
        source = sources.get(_origin(value, sources))
        if source is not None and source.op_type == "DequantizeLinear":
            kinds.append(types.get(source.input[0], 0))
        else:
            kinds.append(0)
    if all(kind in (2, 3) for kind in kinds):
        return "int8"
    if all(kind == FP8 for kind in kinds):
        return "fp8"
    return ELEMENT_TYPES.get(types.get(node.input[0], 0), _UNKNOWN).precision


def _origin(value: str, sources: Mapping[str, onnx.NodeProto], *through: str) -> str:
    """Return the value that `value` was before moves and the operators in `through`."""
    while (source := sources.get(value)) is not None and source.op_type in (
        *_SEEN_THROUGH,
        *through,
    ):
        value = source.input[0]
    return value


def _value(value: onnx.ValueInfoProto) -> GraphValue:
    tensor = value.type.tensor_type
    dims = tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
    )
    known = ELEMENT_TYPES.get(tensor.elem_type)
    return GraphValue(known.tensorrt if known else str(tensor.elem_type), dims)


def describe_position(graph: onnx.GraphProto, node: str) -> str:
    """Return ``after layer.3.output.dense``, or ``before`` it, for a node of an `onnx.GraphProto`.

    It names the module of the nearest parameter that the node depends on; else of the nearest one
    that follows. Empty if there is neither.
    """
    start = next((one for one in graph.node if node_name(one) == node), None)
    if start is None:
        return ""
    modules = {name: _module(name) for name in initializers(graph)}
    makers = {name: one for one in graph.node for name in one.output}
    users = readers(graph)

    def back(one: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        return (makers[name] for name in reads(one) if name in makers)

    def onwards(one: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        return (graph.node[place] for name in one.output for place in users.get(name, ()))

    for word, step in (("after", back), ("before", onwards)):
        if found := _nearest(start, step, modules):
            return f"{word} {found}"
    return ""


def _nearest(
    start: onnx.NodeProto,
    step: Callable[[onnx.NodeProto], Iterable[onnx.NodeProto]],
    modules: Mapping[str, str],
) -> str:
    """Return the module of the first parameter in a breadth-first search from `start`."""
    seen, front = {node_name(start)}, [start]
    while front:
        following = []
        for node in front:
            if found := next(filter(None, (modules.get(name) for name in reads(node))), ""):
                return found
            following += [one for one in step(node) if node_name(one) not in seen]
            seen |= {node_name(one) for one in following}
        front = following
    return ""


def _module(parameter: str) -> str:
    """Return the module ``a.b`` of a parameter ``a.b.weight``; empty for names that are numbers."""
    module, _, kind = parameter.rpartition(".")
    return module if kind in ("weight", "bias") else ""
