"""The fake TensorRT's ONNX parser: reads the real graph, or fails as a test says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx

from triptych.base.onnx_graph import value_types

TYPES = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}
TYPES |= {16: "BF16", 17: "FP8"}
LAYERS = {
    "MatMul": "MATRIX_MULTIPLY",
    "Gemm": "MATRIX_MULTIPLY",
    "Cast": "CAST",
    "QuantizeLinear": "QUANTIZE",
    "DequantizeLinear": "DEQUANTIZE",
    "Shape": "SHAPE",
    "Constant": "CONSTANT",
}


class ParserError:
    _trt: Any

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def code(self) -> Any:
        return getattr(self._trt.ErrorCode, self._fields["code"])

    def desc(self) -> str:
        return str(self._fields["desc"])

    def node(self) -> int:
        return int(self._fields["node"])

    def node_name(self) -> str:
        return str(self._fields["node_name"])

    def node_operator(self) -> str:
        return str(self._fields["node_operator"])


class OnnxParser:
    _trt: Any

    def __init__(self, network: Any, logger: Any) -> None:
        self._network = network
        self._logger = logger
        self._errors: list[Any] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def parse_from_file(self, model: str) -> bool:
        if not isinstance(model, str):
            raise TypeError("incompatible function arguments: a path is no str")
        errors = [dict(fields) for fields in self._trt._play.parser_errors]
        self._errors = [self._trt.ParserError(fields) for fields in errors]
        if errors:
            return False
        self._fill(Path(model))
        return True

    def _fill(self, path: Path) -> None:
        loaded = onnx.load(path)
        types = value_types(loaded)
        graph, trt, network = loaded.graph, self._trt, self._network
        network._onnx = loaded.SerializeToString()
        for values, found in ((graph.input, network._inputs), (graph.output, network._outputs)):
            for value in values:
                dims = tuple(dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim)
                found.append(trt.ITensor(value.name, self._dtype(types[value.name]), dims))
        for weight in graph.initializer:
            tensor = trt.ITensor(weight.name, self._dtype(weight.data_type), tuple(weight.dims))
            network._layers.append(trt.ILayer(weight.name, trt.LayerType.CONSTANT, "", [tensor]))
        makers = {name: node for node in graph.node for name in node.output}
        sizes = {weight.name: math.prod(weight.dims) for weight in graph.initializer}
        for node in graph.node:
            kind = getattr(trt.LayerType, LAYERS.get(node.op_type, "ELEMENTWISE"))
            outputs = [
                trt.ITensor(name, self._dtype(types[name]), ()) for name in node.output if name
            ]
            name = node.name or node.output[0]
            layer = trt.ILayer(name, kind, f"[ONNX Layer: {name}]", outputs)
            network._layers.append(layer)
            if node.op_type in ("MatMul", "Gemm", "Conv"):
                quantized = [_stored(value, types, makers) for value in node.input[:2]]
                network._products.append(
                    {
                        "name": name,
                        "dtype": TYPES.get(types[node.input[0]], ""),
                        "quantized": quantized[0] if quantized[0] == quantized[1] else "",
                        "elements": sizes.get(node.input[1], 0),
                    }
                )

    def _dtype(self, kind: int) -> Any:
        return getattr(self._trt.DataType, TYPES[kind])


def _stored(value: str, types: dict[str, int], makers: dict[str, Any]) -> str:
    """The type a value was quantized to; empty where it was not."""
    maker = makers.get(value)
    while maker is not None and maker.op_type in ("Transpose", "Reshape"):
        maker = makers.get(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear":
        return ""
    return TYPES[types[maker.input[0]]]


CLASSES: dict[str, type] = {"ParserError": ParserError, "OnnxParser": OnnxParser}
