"""Element types of the values of a graph, found without its weights, whatever their size."""

from __future__ import annotations

from typing import Any

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

    graph = model.graph
    weights = [tensor for tensor in graph.initializer if tensor.ByteSize() > SMALL]
    skeleton = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.node,
            "skeleton",
            [*graph.input, *(_declared(tensor) for tensor in weights)],
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
    made = [name for node in graph.node for name in node.output if name]
    unknown = [name for name in made if not types.get(name)]
    if unknown:
        raise ValueError(f"the type of {unknown[0]} cannot be inferred")
    return types


def _declared(tensor: Any) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
