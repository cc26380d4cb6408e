"""Convert an fp32 graph to int8 or fp8, with parameters found on calibration rows.

Both formats are written as explicit QuantizeLinear and DequantizeLinear nodes of standard ONNX
around the linear layers. A row's result never depends on other rows in the batch, as it would with
a scale computed for each batch.

int8: weights are symmetric, with one scale per output. A layer's input is smoothed (see
`calibrate`), shifted and quantized: with one scale from calibration (``int8``), or with one scale
that the graph computes for each vector (``int8_dynamic``). ONNX Runtime fuses DequantizeLinear,
DequantizeLinear and MatMul into one integer kernel; TensorRT makes an INT8 layer of them.

fp8 (E4M3), for GPUs since Hopper: each input and each weight has a single scale, because TensorRT
multiplies in fp8 only in that case. With one scale per output of a weight, it would dequantize and
multiply in 16 bits. fp8 keeps its relative precision over a wide range, so a single scale costs
little accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_graph import (
    add_constant,
    at_opset,
    copy_model,
    drop_unused,
    free_mark,
    initializers,
    read_model,
    set_nodes,
    value_of,
    write_model,
)
from triptych.core.precision.calibrate import (
    LEVELS,
    Activations,
    Feed,
    Smoothing,
    capture,
    find_smoothing,
    model_ranges,
    quantized,
    round_together,
    scale_of,
)
from triptych.core.precision.float16 import halve_quantized
from triptych.core.precision.linear import (
    Linear,
    LinearGroup,
    Recipe,
    check_quantizable,
    find_groups,
)
from triptych.repository.records import Conversion

if TYPE_CHECKING:
    import onnx
    from numpy.typing import ArrayLike


class Quantizer:
    """Calibrated graph that can be written with any selection of excluded layers.

    The search for layers to exclude writes many versions; the calibration is shared by all of them.
    """

    def __init__(self, model: onnx.ModelProto, recipe: Recipe, feeds: Sequence[Feed]) -> None:
        self._model = model
        self._feeds = feeds
        self._value_ranges: dict[str, float] | None = None
        self._for_tensorrt = recipe.backend == "tensorrt"
        groups = find_groups(model.graph)
        self.layers = tuple(group.name for group in groups)
        check_quantizable(recipe, self.layers, feeds)
        seen = capture(model, [group.input for group in groups], feeds)
        self._ranges = {group.name: seen[group.input].largest for group in groups}
        dynamic = "dynamic" in recipe.precision
        self._quantized = [
            _quantize(model, group, seen[group.input], dynamic=dynamic) for group in groups
        ]

    def converted(self, kept: Sequence[str]) -> tuple[onnx.ModelProto, Conversion]:
        """Return the quantized graph as an `onnx.ModelProto`, and the record of the conversion.

        The groups in `kept` stay fp32; for TensorRT they become fp16, like all else.
        """
        graph, fp32_products = self._graph(kept)
        notes = []
        for name, one in zip(self.layers, self._quantized, strict=True):
            found = one.smoothing
            if name not in kept:
                notes.append(
                    f"{name}: smoothed by range^{found.power}, range: {found.method}, "
                    f"error of the layer {found.error:.1e}"
                )
        return graph, Conversion(
            layers=self.layers,
            excluded_layers=tuple(name for name in self.layers if name in kept),
            ranges=self._ranges,
            notes=tuple(notes),
            fp32_products=fp32_products,
        )

    def _graph(self, kept: Sequence[str]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return the graph, and `Conversion.fp32_products` for TensorRT."""
        chosen = [one for one in self._quantized if one.group.name not in kept]
        # ONNX Runtime's x86 kernels need unsigned inputs; TensorRT needs signed inputs around 0.
        written = rewrite(self._model, chosen, signed=self._for_tensorrt)
        if not self._for_tensorrt:
            return written, ()
        if self._value_ranges is None:
            self._value_ranges = model_ranges(self._model, self._feeds)
        return halve_quantized(written, self._value_ranges)


def _quantize(
    model: onnx.ModelProto, group: LinearGroup, seen: Activations, *, dynamic: bool
) -> QuantizedGroup:
    tensors = initializers(model.graph)
    stored = [value_of(tensors[layer.weight]) for layer in group.layers]
    weights = [
        weight.T if layer.transposed else weight
        for layer, weight in zip(group.layers, stored, strict=True)
    ]
    together = np.concatenate(weights, axis=1)
    smoothing = find_smoothing(seen, together, dynamic=dynamic)
    scaled = together * smoothing.scale[:, None]
    offset = smoothing.shift / smoothing.scale
    inputs = quantized((seen.vectors - smoothing.shift) / smoothing.scale, smoothing.range)
    rounded, scale = round_together(scaled, inputs + offset), scale_of(scaled)
    # The bias adds back what the shift removed, computed with the rounded weights.
    bias = offset @ (rounded * scale)
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    parts = zip(
        np.split(rounded, ends, axis=1), np.split(scale, ends), np.split(bias, ends), strict=True
    )
    layers = []
    for layer, (part, steps, added) in zip(group.layers, parts, strict=True):
        own = value_of(tensors[layer.bias]) if layer.bias else np.float32(0)
        layers.append(QuantizedLayer(layer, part, steps, (added + own).astype(np.float32)))
    return QuantizedGroup(group, smoothing, tuple(layers))


_MIN_STEP = 1e-9


@dataclass(frozen=True)
class QuantizedLayer:
    """Quantized weights of one linear layer."""

    layer: Linear  # Layer of the fp32 graph that is replaced
    weight: NDArray[np.int8]  # INT8 ``[K, N]``
    scale: NDArray[np.float32]  # Scale of the weight, FP32 ``[N]``
    bias: NDArray[np.float32]  # FP32 ``[N]``; includes the contribution of the smoothing's shift


@dataclass(frozen=True)
class QuantizedGroup:
    """Layers that read one value, and the quantization of that value."""

    group: LinearGroup
    smoothing: Smoothing
    layers: tuple[QuantizedLayer, ...]


def rewrite(
    model: onnx.ModelProto, groups: Sequence[QuantizedGroup], *, signed: bool
) -> onnx.ModelProto:
    """Return a copy of the fp32 `onnx.ModelProto` with `groups` quantized.

    With `signed`, inputs are INT8 around 0, as TensorRT requires; otherwise UINT8 around 128.
    """
    result = copy_model(model)
    writer = _Writer(result.graph, signed=signed)
    instead: dict[int, list[onnx.NodeProto]] = {}
    for quantized_group in groups:
        nodes, value, step = writer.quantize(quantized_group.group.input, quantized_group.smoothing)
        for layer in quantized_group.layers:
            first, *others = layer.layer.nodes
            instead[first] = [*nodes, *writer.multiply(layer, value, step)]
            instead.update((index, []) for index in others)
            nodes = []  # the first layer of a group quantizes the input for all
    rewritten = [
        new for index, node in enumerate(model.graph.node) for new in instead.get(index, [node])
    ]
    set_nodes(result.graph, rewritten)
    drop_unused(result.graph)
    return result


class _Writer:
    """Creates nodes, and adds the constants that they read to a graph."""

    def __init__(self, graph: onnx.GraphProto, *, signed: bool) -> None:
        self._graph = graph
        self._zero = np.int8(0) if signed else np.uint8(LEVELS + 1)
        self._known: set[str] = set()
        self._mark = free_mark(graph)

    def quantize(self, name: str, smoothing: Smoothing) -> tuple[list[onnx.NodeProto], str, str]:
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

    def multiply(self, one: QuantizedLayer, value: str, step: str) -> list[onnx.NodeProto]:
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

    def _scale_each(self, own: str) -> list[onnx.NodeProto]:
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

    def _constant(self, name: str, value: ArrayLike) -> str:
        if name not in self._known:
            self._known.add(name)
            add_constant(self._graph, name, value)
        return name


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    import onnx

    name = f"{output}.{kind.lower()}"
    return onnx.helper.make_node(kind, list(inputs), [output], name=name, **attributes)


MAX_FP8 = 448.0
"""Largest number of E4M3. Larger values are clipped to it."""


def convert_fp8(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` with fp8 linear layers and the inputs and outputs of `source`.

    `Recipe.kept` names groups of layers that stay fp32; for TensorRT they become fp16, like all
    else. `Conversion.ranges` is the largest magnitude of each group's input.

    Raises:
        UserError: See `check_quantizable`.
    """
    model = read_model(source)
    groups = find_groups(model.graph)
    layers = tuple(group.name for group in groups)
    check_quantizable(recipe, layers, feeds)
    seen = model_ranges(model, feeds)
    wanted = [group for group in groups if group.name not in recipe.kept]
    written = _quantized(at_opset(model), wanted, seen)
    fp32_products: tuple[str, ...] = ()
    if recipe.backend == "tensorrt":
        written, fp32_products = halve_quantized(written, seen)
    write_model(written, target)
    return Conversion(
        layers,
        excluded_layers=tuple(group.name for group in groups if group not in wanted),
        ranges={group.name: seen[group.input] for group in groups},
        fp32_products=fp32_products,
    )


def _quantized(
    model: onnx.ModelProto, groups: Sequence[LinearGroup], ranges: Mapping[str, float]
) -> onnx.ModelProto:
    """Change the graph in place and return it, with Q/DQ nodes around the layers of `groups`."""
    import ml_dtypes
    import onnx

    graph, mark = model.graph, free_mark(model.graph)
    weights = initializers(graph)
    stored: set[str] = set()
    before: dict[int, list[onnx.NodeProto]] = {}

    def add_scale(own: str, largest: float) -> np.float32:
        """Add scale and zero point of a value, whose names begin with `own`."""
        scale = np.float32(largest / MAX_FP8 or 1.0)
        add_constant(graph, f"{own}scale", scale)
        add_constant(graph, f"{own}zero", np.zeros((), dtype=ml_dtypes.float8_e4m3fn))
        return scale

    def dequantize(own: str, result: str) -> onnx.NodeProto:
        operands = [f"{own}fp8", f"{own}scale", f"{own}zero"]
        return onnx.helper.make_node("DequantizeLinear", operands, [result], name=f"{result}/node")

    for group in groups:
        own = group.input + mark
        add_scale(own, ranges[group.input])
        operands = [group.input, f"{own}scale", f"{own}zero"]
        quantize = onnx.helper.make_node(
            "QuantizeLinear", operands, [f"{own}fp8"], name=f"{own}quantize", saturate=1
        )
        first = min(layer.nodes[0] for layer in group.layers)
        before.setdefault(first, []).extend([quantize, dequantize(own, f"{own}dequantized")])
        for layer in group.layers:
            place = layer.nodes[0]
            node = graph.node[place]
            held = layer.weight + mark
            if layer.weight not in stored:
                stored.add(layer.weight)
                weight = value_of(weights[layer.weight])
                scale = add_scale(held, float(np.abs(weight).max()))
                cut = np.clip(weight / scale, -MAX_FP8, MAX_FP8)
                add_constant(graph, f"{held}fp8", cut.astype(ml_dtypes.float8_e4m3fn))
            dequantized = f"{node.output[0]}{mark}weight"
            before.setdefault(place, []).append(dequantize(held, dequantized))
            node.input[0], node.input[1] = f"{own}dequantized", dequantized
    nodes = []
    for place, node in enumerate(graph.node):
        nodes += [*before.get(place, ()), node]
    set_nodes(graph, nodes)
    drop_unused(graph)
    return model
