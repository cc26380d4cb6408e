"""Graphs for other hardware on a CPU, with the accuracy that they have there.

ONNX Runtime's CPU provider has no kernel for most operators in bf16 (Add, MatMul, Softmax, ...: a
session does not open). fp16 it computes in fp32, and it takes out the casts that it put around its
kernels, so that a value may pass several operators without ever being rounded to fp16: one beyond
65,504 does not overflow there as it does on a GPU.

So either is run as a view of the graph: every operator computes in fp32 on values that are 16-bit
numbers, and its result is rounded to the type by a Cast to it and one back. That is what kernels
do that add up in fp32 and store in 16 bits. ONNX Runtime leaves such pairs of casts, which lose
something, alone.

fp8 it quantises and dequantises as written, as long as it does not fuse: it takes fp8 for int8
then, so that a session does not open, or drops a Relu before a QuantizeLinear, silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.base.onnx_nodes import copy_model, free_mark, set_nodes
from triptych.base.onnx_types import BFLOAT16, FLOAT, FLOAT16, FP8, value_types

_HALVES = (FLOAT16, BFLOAT16)
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


def open_session(path: Path, options: Any = None) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU, whatever the graph's precision.

    Args:
        path: of a ``model.onnx``, with fp32 outputs.
        options: `onnxruntime.SessionOptions` to add to; the usual ones where left out.
    """
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions() if options is None else options
    model_graph = onnx.load(path, load_external_data=False).graph
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


def _has_unsigned_inputs(graph: Any) -> bool:
    """Whether layers take UINT8 inputs, as graphs for ONNX Runtime have them and TensorRT's not."""
    import onnx

    unsigned = any(one.data_type == onnx.TensorProto.UINT8 for one in graph.initializer)
    return unsigned or any(node.op_type == "DynamicQuantizeLinear" for node in graph.node)


def _set_entry(options: Any, key: str, value: str) -> None:
    """Set what is not set yet: ONNX Runtime warns of an entry that is set again."""
    try:
        options.get_session_config_entry(key)
    except RuntimeError:
        options.add_session_config_entry(key, value)


def runnable(path: Path) -> bytes | Path:
    """What to open in ONNX Runtime on a CPU instead of the graph at `path`.

    Returns:
        A view of the graph as above, or `path` itself where nothing in it is fp16 or bf16. Weights
        in a file beside the graph stay there.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    types = value_types(model)
    if not any(kind in _HALVES for kind in types.values()):
        return path
    view: bytes = _view(model, types).SerializeToString()
    return view


def _view(model: Any, types: dict[str, int]) -> Any:
    """The graph with its 16-bit values as fp32 values of the same numbers."""
    graph = model.graph
    nodes = []
    mark = free_mark(graph)
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            name = tensor.name
            tensor.name = f"{name}{mark}stored"
            nodes.append(_cast(tensor.name, name, FLOAT))
    for node in graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            kind = types.get(name)
            if kind not in _HALVES or node.op_type in _MOVES:
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


def _cast(source: str, target: str, kind: int) -> Any:
    import onnx

    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/cast", to=kind)
