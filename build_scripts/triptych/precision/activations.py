"""What the inputs of a graph's layers look like on calibration rows: samples and extremes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.graph.files import write_model
from triptych.graph.names import free_mark

MOST_VECTORS = 4096
"""Vectors kept of each value: enough to round the weights of usual layers by."""


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
        """Of `vectors` and nothing else."""
        return cls(vectors, vectors.min(0), vectors.max(0))

    @property
    def largest(self) -> float:
        """The largest magnitude of any element."""
        return float(max(-self.low.min(), self.high.max()))


def capture(
    model: Any, values: Sequence[str], feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> dict[str, Activations]:
    """Run the graph on `feeds` and look at `values`.

    Args:
        model: an `onnx.ModelProto`; it is not changed.
        values: of the graph, FP32 ``[..., K]`` each.
        feeds: one calibration row each, without padding: a pad is nothing to calibrate on.
    """
    import onnx

    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    graph, mark = probed.graph, free_mark(model.graph)
    del graph.output[:]
    for value in values:
        flat = f"{value}{mark}vectors"
        graph.node.append(onnx.helper.make_node("Flatten", [value], [flat], axis=-1))
        graph.output.append(
            onnx.helper.make_tensor_value_info(flat, onnx.TensorProto.FLOAT, [None, None])
        )
    seen = [_Seen(_step(len(feeds))) for _ in values]
    for results in _run(probed, feeds):
        for one, vectors in zip(seen, results, strict=True):
            one.add(vectors)
    return {value: one.activations() for value, one in zip(values, seen, strict=True)}


def _run(
    model: Any, feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> Iterator[list[NDArray[np.float32]]]:
    """The graph's outputs, feed by feed."""
    import onnxruntime

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


def _step(rows: int) -> int:
    """Vectors kept of a row."""
    return max(4, MOST_VECTORS // max(1, rows))


class _Seen:
    def __init__(self, most: int) -> None:
        self._most = most
        self._vectors: list[NDArray[np.float32]] = []
        self._low: NDArray[np.float32] | None = None
        self._high: NDArray[np.float32] | None = None

    def add(self, vectors: NDArray[np.float32]) -> None:
        low, high = vectors.min(0), vectors.max(0)
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)
        places = np.unique(np.linspace(0, len(vectors) - 1, self._most).astype(int))
        self._vectors.append(vectors[places].copy())

    def activations(self) -> Activations:
        if self._low is None or self._high is None:
            raise ValueError("there are no calibration rows")
        vectors = np.concatenate(self._vectors)
        self._vectors.clear()  # of all values together this is most of the memory
        return Activations(vectors, self._low, self._high)
