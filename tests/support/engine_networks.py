"""Small ONNX graphs, and profiles and options of engine plans for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from triptych.core.engine.api import USUAL_CAPABILITY, RtxApi
from triptych.core.engine.inspection import check_products
from triptych.core.engine.make import Request, make_engine
from triptych.spec.engine_plan import ShapeRange

OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("workspace_mib", "optimization_level")),
    **dict.fromkeys(("version_compatible", "refit", "weight_streaming", "tf32"), False),
    "hardware": "none",
}
"""Options of an engine plan without any setting."""
FINE = {"x": ShapeRange((1, 4), (2, 4), (8, 4))}


def write(
    folder: Path, nodes: Sequence[Any], *, kind: int = TensorProto.FLOAT, out: int | None = None
) -> Path:
    """Write a graph from ``x`` ``[rows, 4]`` to ``y`` with fp32 weights ``w`` ``[4, 4]``."""
    x = helper.make_tensor_value_info("x", kind, ["rows", 4])
    y = helper.make_tensor_value_info("y", kind if out is None else out, ["rows", 4])
    weights = [
        numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"),
        numpy_helper.from_array(np.array(0.1, np.float32), "scale"),
        numpy_helper.from_array(np.zeros((), np.int8), "zero"),
        numpy_helper.from_array(np.eye(4, dtype=np.int8), "w8"),
    ]
    graph = helper.make_graph(list(nodes), "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


class _ParsedError(Exception):
    """Ends a build after its graph is parsed."""


def count_products(request: Request, fp32_products: Sequence[str] = ()) -> dict[str, int]:
    """Parse a graph with NVIDIA's parser; returns the counts of `check_products`."""
    counts: dict[str, int] = {}

    def look(network: Any) -> None:
        counts.update(check_products(network, request, fp32_products))
        raise _ParsedError

    api = RtxApi(USUAL_CAPABILITY)
    with pytest.raises(_ParsedError):
        make_engine(api, request, timing_file=None, tell=lambda _: None, look=look)
    return counts


PRODUCT = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
SAME = [helper.make_node("Identity", ["x"], ["y"], name="same")]
LOWER = [
    helper.make_node("Cast", ["x"], ["xl"], name="c", to=TensorProto.FLOAT16),
    helper.make_node("Cast", ["w"], ["wl"], name="d", to=TensorProto.FLOAT16),
    helper.make_node("MatMul", ["xl", "wl"], ["yl"], name="product"),
    helper.make_node("Cast", ["yl"], ["y"], name="e", to=TensorProto.FLOAT),
]
QUANTIZED = [
    helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"], name="q"),
    helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"], name="dx"),
    helper.make_node("DequantizeLinear", ["w8", "scale", "zero"], ["wd"], name="dw"),
    helper.make_node("Transpose", ["wd"], ["wt"], name="t"),
    helper.make_node("MatMul", ["xd", "wt"], ["y"], name="product"),
]
