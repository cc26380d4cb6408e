"""How large the inner values of a graph become on calibration rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from triptych.graph.files import read_model, write_model
from triptych.graph.value_types import value_types

Feed = Mapping[str, NDArray[Any]]
_PROBE = "largest magnitude of "


def value_ranges(source: Path, feeds: Iterable[Feed]) -> dict[str, float]:
    """The largest magnitude of each float value, the graph's inputs with them, over all `feeds`.

    Args:
        source: an fp32 graph.
        feeds: its inputs, batch by batch. The graph itself reduces each value to one number, so
            no more than a batch is in memory.

    Returns:
        By value, in the order of the graph; infinity or NaN where a value is.
    """
    return model_ranges(read_model(source), feeds)


def model_ranges(model: Any, feeds: Iterable[Feed]) -> dict[str, float]:
    """`value_ranges` of an `onnx.ModelProto`; it is not changed."""
    import numpy as np
    import onnxruntime

    probed, values = _probed(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime.InferenceSession(
            write_model(probed, Path(folder)), options, providers=["CPUExecutionProvider"]
        )
        largest = np.zeros(len(values))
        for feed in feeds:
            seen = session.run([_PROBE + value for value in values], dict(feed))
            largest = np.maximum(largest, np.array(seen, dtype=np.float64))
    return dict(zip(values, largest.tolist(), strict=True))


def _probed(model: Any) -> tuple[Any, list[str]]:
    """The graph with the largest magnitude of each float value as an output, and those values."""
    import onnx

    types = value_types(model)
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    graph = probed.graph
    names = [value.name for value in graph.input]
    names += [name for node in graph.node for name in node.output if name]
    values = [name for name in names if types[name] == onnx.TensorProto.FLOAT]
    for value in values:
        magnitude = f"magnitude of {value}"
        graph.node.extend(
            [
                onnx.helper.make_node("Abs", [value], [magnitude]),
                onnx.helper.make_node("ReduceMax", [magnitude], [_PROBE + value], keepdims=0),
            ]
        )
    del graph.output[:]
    graph.output.extend(
        onnx.helper.make_tensor_value_info(_PROBE + value, onnx.TensorProto.FLOAT, [])
        for value in values
    )
    return probed, values
