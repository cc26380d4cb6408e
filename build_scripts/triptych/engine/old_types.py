"""TensorRT 8.6 only: every layer told to keep the type that its ONNX node has.

Before strong typing, TensorRT takes fp32 for 16 bits wherever that is faster once fp16 is allowed
at all. So each layer that computes in floating point gets the type of its node as a constraint;
what the gate wanted in fp32 stays fp32, and the flag OBEY_PRECISION_CONSTRAINTS makes the build
fail where a constraint cannot be met. What multiplies quantised values is left alone: its type is
theirs, and a constraint would keep TensorRT from fusing it with them.
"""

from __future__ import annotations

from typing import Any

from triptych.engine.api import Api
from triptych.engine.graph import Graph
from triptych.engine.layer_names import onnx_nodes

_NAMES = {"fp32": "FLOAT", "fp16": "HALF"}
_FREE = ("CAST", "CONSTANT", "IDENTITY", "SHAPE", "QUANTIZE", "DEQUANTIZE")
"""Layers whose type is a setting of theirs, and weights, which are stored as what reads them wants.
"""


def keep_types(api: Api, network: Any, graph: Graph) -> int:
    """Constrain the layers of a parsed network; returns how many.

    Args:
        api: a release before strong typing.
        network: as the parser filled it; changed.
        graph: of the ONNX file it was parsed from.
    """
    trt, constrained = api.trt, 0
    if "fp16" not in graph.kinds:  # then nothing but fp32 is allowed, besides what is quantised
        return constrained
    floats = (trt.DataType.FLOAT, trt.DataType.HALF)
    free = [getattr(trt.LayerType, name) for name in _FREE]
    for place in range(network.num_layers):
        layer = network.get_layer(place)
        wanted = _type_of(layer, graph)
        if not wanted or layer.type in free:
            continue
        outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
        real = [index for index, output in enumerate(outputs) if output.dtype in floats]
        if not real or any(output.is_shape_tensor for output in outputs):
            continue
        kind = getattr(trt.DataType, _NAMES[wanted])
        layer.precision = kind
        for index in real:
            layer.set_output_type(index, kind)
        constrained += 1
    return constrained


def _type_of(layer: Any, graph: Graph) -> str:
    """The type of the node that a layer was made for; empty where none is known."""
    for node in (*onnx_nodes(layer.metadata or ""), layer.name):
        if node in graph.node_types:
            return "" if graph.products.get(node) == "int8" else graph.node_types[node]
    return ""
