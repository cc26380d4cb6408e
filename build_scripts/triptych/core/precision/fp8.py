"""fp32 graph -> fp8 graph for GPUs since Hopper: explicit Q/DQ around the linear layers.

E4M3 in standard operators: an input is quantized and dequantized, a weight is stored in fp8 and
dequantized, the layer itself and all else stay as they were. One scale for a tensor, for
inputs and for weights: TensorRT multiplies in fp8 only where both operands have a single scale,
and with one for each output of a weight it would dequantize and multiply in 16 bits. fp8 keeps its
relative precision over a wide range, so little is lost by that. Scales are fixed at build, by
calibration rows: a row's result does not depend on what shares its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.onnx_graph import (
    add_constant,
    at_opset,
    drop_unused,
    free_mark,
    initializers,
    read_model,
    set_nodes,
    value_of,
    write_model,
)
from triptych.core.precision.calibrate import Feed, model_ranges
from triptych.core.precision.float16 import halve_quantized
from triptych.core.precision.linear import LinearGroup, Recipe, check_quantizable, find_groups
from triptych.repository.records import Conversion

LARGEST = 448.0
"""Number of E4M3. Beyond it a value is cut off to it."""


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` with fp8 linear layers, inputs and outputs as `source` has them.

    `Recipe.kept` names groups of layers that stay fp32, or become fp16 as all else does where the
    backend is TensorRT. `Conversion.ranges` is the largest magnitude of each group's input.

    Raises:
        UserError: as `check_quantizable`.
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
        kept=tuple(group.name for group in groups if group not in wanted),
        ranges={group.name: seen[group.input] for group in groups},
        fp32_products=fp32_products,
    )


def _quantized(model: Any, groups: Sequence[LinearGroup], ranges: Mapping[str, float]) -> Any:
    """The graph, changed in place, with Q/DQ around the layers of `groups`."""
    import ml_dtypes
    import onnx

    graph, mark = model.graph, free_mark(model.graph)
    weights = initializers(graph)
    stored: set[str] = set()
    before: dict[int, list[Any]] = {}

    def add_scale(own: str, largest: float) -> np.float32:
        """Add scale and zero point of a value, whose names begin with `own`."""
        scale = np.float32(largest / LARGEST or 1.0)
        add_constant(graph, f"{own}scale", scale)
        add_constant(graph, f"{own}zero", np.zeros((), dtype=ml_dtypes.float8_e4m3fn))
        return scale

    def dequantize(own: str, result: str) -> Any:
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
                cut = np.clip(weight / scale, -LARGEST, LARGEST)
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
