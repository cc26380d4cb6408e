"""Masks of attention that 16-bit floats can hold."""

from __future__ import annotations

from typing import Any

from triptych.graph.names import drop_unused, free_mark

MASKED = -1e4
"""Stands for "never": its exponential is exactly 0 in fp32 next to any score, and fp16 holds it."""

_LARGEST_FP16 = 65504.0
_INPUTS = {"Where": (1, 2), "Mul": (0, 1), "Add": (0, 1)}
"""Operators that put a mask's number in, and their inputs that may hold it."""


def soften_masks(model: Any) -> int:
    """Replace what a mask adds to a score, where it is beyond fp16, by `MASKED`.

    PyTorch exports masks as the lowest fp32 number or as minus infinity. Both become minus
    infinity in 16 bits (the lowest fp32 number even in bf16), and a row of nothing else then comes
    out of a softmax as NaN. A single number is replaced only: weights are not masks.

    Args:
        model: an `onnx.ModelProto`, changed in place.

    Returns:
        How many numbers were replaced.
    """
    import numpy as np
    import onnx

    graph = model.graph
    lowest = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
        and int(np.prod(tensor.dims)) == 1
        and onnx.numpy_helper.to_array(tensor).min() < -_LARGEST_FP16
    }
    softened: dict[str, str] = {}
    mark = free_mark(graph)
    for node in graph.node:
        for place in _INPUTS.get(node.op_type, ()):
            if node.input[place] in lowest:
                name = softened.setdefault(node.input[place], f"{node.input[place]}{mark}softened")
                node.input[place] = name
    for old, new in softened.items():
        tensor = next(tensor for tensor in graph.initializer if tensor.name == old)
        number = np.full(list(tensor.dims), MASKED, dtype=np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(number, new))
    drop_unused(graph)
    return len(softened)
