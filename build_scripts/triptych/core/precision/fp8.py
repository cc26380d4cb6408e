"""Convert an fp32 graph to fp8 for GPUs since Hopper.

The graph gets explicit QuantizeLinear and DequantizeLinear nodes around its linear layers, in
standard operators and the E4M3 format. An input is quantized and dequantized, a weight is stored in
fp8 and dequantized. The layers themselves and everything else do not change.

Each input and each weight has a single scale, because TensorRT multiplies in fp8 only in that case.
With one scale per output of a weight, it would dequantize and multiply in 16 bits. fp8 keeps its
relative precision over a wide range, so a single scale costs little accuracy. Calibration rows fix
the scales at build time, so a row's result does not depend on other rows in the batch.
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
"""Largest number of E4M3. Larger values are clipped to it."""


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
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


def _quantized(model: Any, groups: Sequence[LinearGroup], ranges: Mapping[str, float]) -> Any:
    """Change the graph in place and return it, with Q/DQ nodes around the layers of `groups`."""
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
