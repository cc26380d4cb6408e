"""What the inner values of an fp32 graph look like on calibration rows: samples and extremes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_files import write_model
from triptych.base.onnx_nodes import copy_model, free_mark
from triptych.base.onnx_types import FLOAT, value_types

Feed = Mapping[str, NDArray[Any]]
MOST_VECTORS = 4096
"""Vectors kept of each value: enough to round the weights of usual layers by."""
_PROBE = "largest magnitude of "


@dataclass(frozen=True)
class Activations:
    """One value over all calibration rows.

    Attributes:
        vectors: FP32 ``[n, K]``, evenly spread over the rows.
        low: FP32 ``[K]``, the lowest of each element over all rows.
        high: the highest.
    """

    vectors: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @classmethod
    def of(cls, vectors: NDArray[np.float32]) -> Activations:
        return cls(vectors, vectors.min(0), vectors.max(0))

    @property
    def largest(self) -> float:
        """The largest magnitude of any element."""
        return float(max(-self.low.min(), self.high.max()))


def capture(model: Any, values: Sequence[str], feeds: Sequence[Feed]) -> dict[str, Activations]:
    """Run the graph on `feeds` and look at `values`.

    Args:
        model: an `onnx.ModelProto`; it is not changed.
        values: of the graph, FP32 ``[..., K]`` each.
        feeds: one calibration row each, without padding: a pad is nothing to calibrate on.
    """
    import onnx

    if not feeds:
        raise ValueError("there are no calibration rows")
    probed = copy_model(model)
    mark = free_mark(model.graph)
    probes = {value: f"{value}{mark}vectors" for value in values}
    probed.graph.node.extend(
        onnx.helper.make_node("Flatten", [value], [flat], axis=-1) for value, flat in probes.items()
    )
    share = max(4, MOST_VECTORS // len(feeds))
    kept: list[list[NDArray[np.float32]]] = [[] for _ in values]
    lows: list[list[NDArray[np.float32]]] = [[] for _ in values]
    highs: list[list[NDArray[np.float32]]] = [[] for _ in values]
    for results in _run(probed, list(probes.values()), [None, None], feeds):
        for place, vectors in enumerate(results):
            lows[place].append(vectors.min(0))
            highs[place].append(vectors.max(0))
            chosen = np.unique(np.linspace(0, len(vectors) - 1, share).astype(int))
            kept[place].append(vectors[chosen].copy())
    found = {}
    for place, value in enumerate(values):
        low, high = np.min(lows[place], axis=0), np.max(highs[place], axis=0)
        found[value] = Activations(np.concatenate(kept[place]), low, high)
        kept[place].clear()  # of all values together this is most of the memory
    return found


def model_ranges(model: Any, feeds: Iterable[Feed]) -> dict[str, float]:
    """The largest magnitude of each float value, the graph's inputs with them, over all `feeds`.

    The graph itself reduces each value to one number, so no more than a batch is in memory.

    Args:
        model: an fp32 `onnx.ModelProto`; it is not changed.
        feeds: its inputs, batch by batch.

    Returns:
        By value, in the order of the graph; infinity or NaN where a value is.
    """
    import onnx

    node, types = onnx.helper.make_node, value_types(model)
    probed = copy_model(model)
    graph = probed.graph
    names = [value.name for value in graph.input]
    names += [name for one in graph.node for name in one.output if name]
    values = [name for name in names if types[name] == FLOAT]
    for value in values:
        magnitude = f"magnitude of {value}"
        graph.node.append(node("Abs", [value], [magnitude]))
        graph.node.append(node("ReduceMax", [magnitude], [_PROBE + value], keepdims=0))
    largest = np.zeros(len(values))
    for seen in _run(probed, [_PROBE + value for value in values], [], feeds):
        largest = np.maximum(largest, np.array(seen, dtype=np.float64))
    return dict(zip(values, largest.tolist(), strict=True))


def _run(
    model: Any, outputs: Sequence[str], axes: Sequence[None], feeds: Iterable[Feed]
) -> Iterator[list[NDArray[np.float32]]]:
    """Values of the graph, FP32 with these axes, feed by feed."""
    import onnx
    import onnxruntime

    del model.graph.output[:]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, FLOAT, axes) for name in outputs
    )
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime.InferenceSession(
            write_model(model, Path(folder)), quiet_options(), providers=["CPUExecutionProvider"]
        )
        for feed in feeds:
            yield session.run(None, dict(feed))


def quiet_options() -> Any:
    """Session options that keep ONNX Runtime's remarks on a graph off the terminal."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options
