"""Write quantized linear layers into a graph, as explicit Q/DQ nodes of standard ONNX.

Each input is shifted, divided by its scale and quantized (QuantizeLinear, DequantizeLinear). Its
product with the dequantized weight gets the bias. ONNX Runtime fuses DequantizeLinear,
DequantizeLinear and MatMul into one integer kernel; TensorRT makes an INT8 layer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_graph import add_constant, copy_model, drop_unused, free_mark, set_nodes
from triptych.core.precision.calibrate import LEVELS, Smoothing
from triptych.core.precision.linear import Linear, LinearGroup

_MIN_STEP = 1e-9


@dataclass(frozen=True)
class QuantizedLayer:
    """Quantized weights of one linear layer.

    Attributes:
        layer: Layer of the fp32 graph that is replaced.
        weight: INT8 ``[K, N]``.
        scale: Scale of the weight, FP32 ``[N]``.
        bias: FP32 ``[N]``; includes the contribution of the smoothing's shift.
    """

    layer: Linear
    weight: NDArray[np.int8]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedGroup:
    """Layers that read one value, and the quantization of that value."""

    group: LinearGroup
    smoothing: Smoothing
    layers: tuple[QuantizedLayer, ...]


def rewrite(model: Any, groups: Sequence[QuantizedGroup], *, signed: bool) -> Any:
    """Return a copy of the fp32 `onnx.ModelProto` with `groups` quantized.

    With `signed`, inputs are INT8 around 0, as TensorRT requires; otherwise UINT8 around 128.
    """
    result = copy_model(model)
    writer = _Writer(result.graph, signed=signed)
    instead: dict[int, list[Any]] = {}
    for quantized in groups:
        nodes, value, step = writer.quantize(quantized.group.input, quantized.smoothing)
        for one in quantized.layers:
            first, *others = one.layer.nodes
            instead[first] = [*nodes, *writer.multiply(one, value, step)]
            instead.update((place, []) for place in others)
            nodes = []  # the first layer of a group quantizes the input for all
    rewritten = [
        new for index, node in enumerate(model.graph.node) for new in instead.get(index, [node])
    ]
    set_nodes(result.graph, rewritten)
    drop_unused(result.graph)
    return result


class _Writer:
    """Creates nodes, and adds the constants that they read to a graph."""

    def __init__(self, graph: Any, *, signed: bool) -> None:
        self._graph = graph
        self._zero = np.int8(0) if signed else np.uint8(LEVELS + 1)
        self._known: set[str] = set()
        self._mark = free_mark(graph)

    def quantize(self, name: str, smoothing: Smoothing) -> tuple[list[Any], str, str]:
        """Return the nodes, the name of the quantized value, and the name of its step per vector.

        The step is empty if calibration fixed one range for all vectors.
        """
        own = name + self._mark
        shift = self._constant(f"{own}shift", smoothing.shift)
        factor = self._constant(f"{own}factor", 1 / smoothing.scale)
        nodes = [
            _node("Sub", [name, shift], f"{own}shifted"),
            _node("Mul", [f"{own}shifted", factor], f"{own}smooth"),
        ]
        value, step, limit = f"{own}smooth", "", smoothing.range
        if limit is None:
            nodes += self._scale_each(own)
            value, step, limit = f"{own}steps", f"{own}step", float(LEVELS)
        scale = self._constant(f"{own}scale", np.float32(limit / LEVELS))
        zero = self._constant(f"int8{self._mark}zero", self._zero)
        nodes += [
            _node("QuantizeLinear", [value, scale, zero], f"{own}int8"),
            _node("DequantizeLinear", [f"{own}int8", scale, zero], f"{own}dequantized"),
        ]
        return nodes, f"{own}dequantized", step

    def multiply(self, one: QuantizedLayer, value: str, step: str) -> list[Any]:
        """Return the nodes that compute the layer from the quantized value."""
        own = one.layer.output + self._mark
        stored = self._constant(f"{own}weight", one.weight)
        scale = self._constant(f"{own}weight_scale", one.scale)
        zero = self._constant(f"{own}weight_zero", np.zeros(len(one.scale), np.int8))
        bias = self._constant(f"{own}bias", one.bias)
        product = f"{own}product"
        nodes = [
            _node("DequantizeLinear", [stored, scale, zero], f"{own}weight_fp32", axis=1),
            _node("MatMul", [value, f"{own}weight_fp32"], product),
        ]
        if step:
            nodes.append(_node("Mul", [product, step], f"{own}rescaled"))
            product = f"{own}rescaled"
        return [*nodes, _node("Add", [product, bias], one.layer.output)]

    def _scale_each(self, own: str) -> list[Any]:
        """Return nodes that divide each vector by its own step: its largest element becomes 127."""
        share = self._constant(f"int8{self._mark}share", np.float32(1 / LEVELS))
        least = self._constant(f"int8{self._mark}least", np.float32(_MIN_STEP))
        last = self._constant(f"int8{self._mark}last_axis", np.array([-1], dtype=np.int64))
        return [
            _node("Abs", [f"{own}smooth"], f"{own}magnitude"),
            _node("ReduceMax", [f"{own}magnitude", last], f"{own}largest"),
            _node("Mul", [f"{own}largest", share], f"{own}raw_step"),
            _node("Max", [f"{own}raw_step", least], f"{own}step"),
            _node("Div", [f"{own}smooth", f"{own}step"], f"{own}steps"),
        ]

    def _constant(self, name: str, value: Any) -> str:
        if name not in self._known:
            self._known.add(name)
            add_constant(self._graph, name, value)
        return name


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> Any:
    import onnx

    name = f"{output}.{kind.lower()}"
    return onnx.helper.make_node(kind, list(inputs), [output], name=name, **attributes)
