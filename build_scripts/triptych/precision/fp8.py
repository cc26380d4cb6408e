"""fp32 graph -> fp8 graph for GPUs since Hopper: explicit Q/DQ around the linear layers.

E4M3 in standard operators: an input is quantised and dequantised, a weight is stored in fp8 and
dequantised, the layer itself and all else stay as they were. One scale for a whole tensor, for
inputs and for weights: TensorRT multiplies in fp8 only where both operands have a single scale,
and with one for each output of a weight it would dequantise and multiply in 16 bits. fp8 keeps its
relative precision over a wide range, so little is lost by that. Scales are fixed at build, by
calibration rows: a row's result does not depend on what shares its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.graph.files import read_model, write_model
from triptych.graph.names import drop_unused, free_mark
from triptych.graph.opset import at_opset
from triptych.precision.float16 import halve_quantised
from triptych.precision.linear import Group, find_groups
from triptych.precision.ranges import model_ranges
from triptych.precision.recipe import Recipe, check_quantisable
from triptych.repository.records import Conversion

Feed = Mapping[str, NDArray[Any]]
LARGEST = 448.0
"""Number of E4M3. Beyond it a value is cut off to it."""


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` with fp8 linear layers, inputs and outputs as `source` has them.

    Args:
        source: an fp32 graph.
        target: folder to write into.
        recipe: `Recipe.kept` names groups of layers that stay fp32, or become fp16 as all else does
            where the backend is TensorRT.
        feeds: calibration rows.

    Returns:
        `Conversion.layers` are the groups of layers, ``ranges`` the largest magnitude of each
        group's input.

    Raises:
        UserError: as `check_quantisable`.
    """
    model = read_model(source)
    groups = find_groups(model.graph)
    layers = tuple(group.name for group in groups)
    check_quantisable(recipe, layers, feeds)
    seen = model_ranges(model, feeds)
    ranges = {group.name: seen[group.input] for group in groups}
    wanted = [group for group in groups if group.name not in recipe.kept]
    written = quantised(at_opset(model), wanted, ranges)
    write_model(halve_quantised(written, seen) if recipe.backend == "tensorrt" else written, target)
    kept = tuple(group.name for group in groups if group not in wanted)
    return Conversion(layers, kept, ranges=ranges)


def quantised(model: Any, groups: Sequence[Group], ranges: Mapping[str, float]) -> Any:
    """The graph with Q/DQ around the layers of `groups`.

    Args:
        model: an fp32 `onnx.ModelProto`, changed in place.
        groups: of layers, as `find_groups` gives them for this graph.
        ranges: largest magnitude of each group's input, by its name.
    """
    import onnx

    graph, mark = model.graph, free_mark(model.graph)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    stored: set[str] = set()
    before: dict[int, list[Any]] = {}
    for group in groups:
        own = group.input + mark
        first = min(layer.nodes[0] for layer in group.layers)
        before.setdefault(first, []).extend(_pair(graph, group.input, own, ranges[group.name]))
        for layer in group.layers:
            place = layer.nodes[0]
            node = graph.node[place]
            if layer.weight not in stored:
                stored.add(layer.weight)
                weight = onnx.numpy_helper.to_array(weights[layer.weight])
                _store(graph, layer.weight + mark, weight)
            dequantised = f"{node.output[0]}{mark}weight"
            before.setdefault(place, []).append(_dequantise(layer.weight + mark, dequantised))
            node.input[0], node.input[1] = f"{own}dequantised", dequantised
    nodes = []
    for place, node in enumerate(graph.node):
        nodes += [*before.get(place, ()), node]
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused(graph)
    return model


def _pair(graph: Any, value: str, own: str, largest: float) -> list[Any]:
    """The nodes that quantise and dequantise a value, their constants put into the graph.

    Args:
        graph: changed in place.
        value: to quantise.
        own: begins the names of what is added.
        largest: magnitude of the value.
    """
    import onnx

    _constants(graph, own, largest)
    operands = [value, f"{own}scale", f"{own}zero"]
    quantise = onnx.helper.make_node(
        "QuantizeLinear", operands, [f"{own}fp8"], name=f"{own}quantise", saturate=1
    )
    return [quantise, _dequantise(own, f"{own}dequantised")]


def _dequantise(own: str, result: str) -> Any:
    import onnx

    operands = [f"{own}fp8", f"{own}scale", f"{own}zero"]
    return onnx.helper.make_node("DequantizeLinear", operands, [result], name=f"{result}/node")


def _constants(graph: Any, own: str, largest: float) -> np.float32:
    """Put scale and zero point of a value into the graph; returns the scale."""
    import ml_dtypes
    import onnx

    scale = np.float32(largest / LARGEST or 1.0)
    zero = np.zeros((), dtype=ml_dtypes.float8_e4m3fn)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(scale), f"{own}scale"))
    graph.initializer.append(onnx.numpy_helper.from_array(zero, f"{own}zero"))
    return scale


def _store(graph: Any, own: str, weight: NDArray[np.float32]) -> None:
    """Put a weight in fp8 into the graph, last, with its scale and zero point."""
    import ml_dtypes
    import onnx

    scale = _constants(graph, own, float(np.abs(weight).max()))
    cut = np.clip(weight / scale, -LARGEST, LARGEST)
    stored = cut.astype(ml_dtypes.float8_e4m3fn)
    graph.initializer.append(onnx.numpy_helper.from_array(stored, f"{own}fp8"))
