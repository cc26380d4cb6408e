"""What the ONNX graph says that the engine must keep to: inputs, outputs, types of its nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.graph.value_types import value_types
from triptych.plan.engine_spec import Dims

TENSORRT_TYPES = {
    1: "FLOAT",
    2: "UINT8",
    3: "INT8",
    6: "INT32",
    7: "INT64",
    9: "BOOL",
    10: "HALF",
    16: "BF16",
    17: "FP8",
}
"""Number of `onnx.TensorProto.DataType` to TensorRT's name."""

PRECISIONS = {1: "fp32", 3: "int8", 10: "fp16", 16: "bf16", 17: "fp8"}
"""The same to `core.precision`'s name, for types that a product can be computed in."""

BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 16: 2, 17: 1}
"""Of an element."""

PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "Einsum", "Attention"))
"""Operators whose type decides accuracy and speed: nearly all work of a model is in them."""

_CASTS = frozenset(("Cast", "QuantizeLinear", "DequantizeLinear"))
_SEEN_THROUGH = frozenset(("Identity", "Reshape", "Transpose"))


@dataclass(frozen=True)
class Value:
    """An input or output of the graph.

    Attributes:
        dtype: TensorRT's name of its type.
        dims: -1 where it varies.
    """

    dtype: str
    dims: Dims


@dataclass(frozen=True)
class Graph:
    """What is known of a graph without its weights.

    Attributes:
        inputs: by name.
        outputs: by name.
        node_types: node to the type of its floating-point results, in `core.precision`'s words.
        products: node that multiplies matrices to the precision it asks for.
        casts: nodes that convert types.
        stored_bytes: of all weights, in their own types.
        wide_bytes: more that would be, if the 16- and 8-bit weights of `products` were fp32.
    """

    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    node_types: Mapping[str, str]
    products: Mapping[str, str]
    casts: frozenset[str]
    stored_bytes: int
    wide_bytes: int

    @property
    def kinds(self) -> frozenset[str]:
        """All precisions that something in the graph asks for."""
        return frozenset((*self.node_types.values(), *self.products.values()))


def node_id(node: Any) -> str:
    """How TensorRT's parser names a node's layers: after its first output if it has no name."""
    return str(node.name or node.output[0])


def read_graph(path: Path) -> Graph:
    """Read a ``model.onnx``; weights in a file beside it stay there."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph, types = model.graph, value_types(model)
    makers = {name: node for node in graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    products = {
        node_id(node): wanted
        for node in graph.node
        if node.op_type in PRODUCTS and (wanted := _wanted(node, types, makers))
    }
    names = {node_id(node): node for node in graph.node}
    read = {
        weight.name: weight
        for product in products
        for value in names[product].input
        if (weight := weights.get(_origin(value, makers))) is not None
    }
    return Graph(
        inputs={value.name: _value(value) for value in graph.input if value.name not in weights},
        outputs={value.name: _value(value) for value in graph.output},
        node_types={
            node_id(node): PRECISIONS[kind]
            for node in graph.node
            if node.output and (kind := types.get(node.output[0], 0)) in (1, 10, 16)
        },
        products=products,
        casts=frozenset(node_id(node) for node in graph.node if node.op_type in _CASTS),
        stored_bytes=sum(
            _size(tensor) * BYTES.get(tensor.data_type, 4) for tensor in weights.values()
        ),
        wide_bytes=sum(
            _size(tensor) * (4 - BYTES[tensor.data_type])
            for tensor in read.values()
            if tensor.data_type in PRECISIONS
        ),
    )


def _wanted(node: Any, types: Mapping[str, int], makers: Mapping[str, Any]) -> str:
    """The precision a product asks for; empty where it multiplies whole numbers.

    One whose operands are both dequantised is to be computed on what they were quantised to.
    """
    kinds = [_stored(value, types, makers) for value in node.input[:2]]
    if all(kind in (2, 3) for kind in kinds):
        return "int8"
    if all(kind == 17 for kind in kinds):
        return "fp8"
    return PRECISIONS.get(types.get(node.input[0], 0), "")


def _stored(value: str, types: Mapping[str, int], makers: Mapping[str, Any]) -> int:
    """The type that a dequantised value was quantised to; 0 where it was not quantised."""
    while (maker := makers.get(value)) is not None and maker.op_type in _SEEN_THROUGH:
        value = maker.input[0]
    if maker is None or maker.op_type != "DequantizeLinear":
        return 0
    return types.get(maker.input[0], 0)


def _origin(value: str, makers: Mapping[str, Any]) -> str:
    """The value that `value` is after dequantising and moving, if it is a weight."""
    while (maker := makers.get(value)) is not None and (
        maker.op_type in _SEEN_THROUGH or maker.op_type == "DequantizeLinear"
    ):
        value = maker.input[0]
    return value


def _value(value: Any) -> Value:
    tensor = value.type.tensor_type
    dims = tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
    )
    return Value(TENSORRT_TYPES.get(tensor.elem_type, str(tensor.elem_type)), dims)


def _size(tensor: Any) -> int:
    return math.prod(tensor.dims)
