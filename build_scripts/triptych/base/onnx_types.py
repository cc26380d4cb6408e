"""Element types of the values of a graph, found without its weights, whatever their size."""

from __future__ import annotations

from typing import Any

FLOAT, FLOAT16, BFLOAT16, FP8 = 1, 10, 16, 17
"""Numbers of `onnx.TensorProto.DataType`; fp8 is E4M3FN."""

SMALL = 1024
"""Bytes of an initializer that inference gets to read: sizes and axes, not weights."""


def value_types(model: Any) -> dict[str, int]:
    """Every value's type as a number of `onnx.TensorProto.DataType`, by name.

    Args:
        model: an `onnx.ModelProto`; it is not changed. Its weights need not be loaded.

    Raises:
        ValueError: inference cannot tell the type of some value.
    """
    import onnx

    graph, helper = model.graph, onnx.helper
    weights = [tensor for tensor in graph.initializer if tensor.ByteSize() > SMALL]
    skeleton = helper.make_model(
        helper.make_graph(
            graph.node,
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
    inferred = onnx.shape_inference.infer_shapes(skeleton).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for name in node.output:
            if name and not types.get(name):
                raise ValueError(f"the type of {name} cannot be inferred")
    return types
