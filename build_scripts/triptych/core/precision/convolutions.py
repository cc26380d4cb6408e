"""Convert a convolution network to int8 with the static quantization of ONNX Runtime.

Weights are symmetric, with one scale per output channel. The inputs of each layer are unsigned,
with one scale and zero point from the smallest and largest value on the calibration rows. ONNX
Runtime's session makes one integer kernel of the QuantizeLinear and DequantizeLinear nodes around
a convolution. Everything else stays fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.files import scratch_folder
from triptych.base.onnx_graph import (
    MODEL_FILE,
    copy_model,
    drop_unused,
    initializers,
    node_name,
    read_model,
    reads,
    save_onnx,
    set_nodes,
)
from triptych.core.precision.calibrate import Feed
from triptych.core.precision.linear import Recipe, check_quantizable
from triptych.models.loading import quiet
from triptych.repository.records import Conversion

if TYPE_CHECKING:
    import onnx

OPERATORS = ("Conv", "MatMul", "Gemm")
"""Operators with a weight that are quantized."""


def is_convolutional(graph: onnx.GraphProto) -> bool:
    """Return whether convolutions have more weights than the other layers of a graph."""
    counts = dict.fromkeys(OPERATORS, 0)
    for node, size in _weighted(graph):
        counts[node.op_type] += size
    return counts["Conv"] > sum(counts.values()) / 2


def _weighted(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield each node that multiplies by a weight, with the number of elements of the weight."""
    weights = initializers(graph)
    for node in graph.node:
        if node.op_type in OPERATORS and node.input[1] in weights:
            yield node, math.prod(weights[node.input[1]].dims)


class ConvolutionQuantizer:
    """Converted convolution network that can be written with any selection of excluded layers.

    Args:
        source: The fp32 graph.
        feeds: Calibration rows, one each.

    Raises:
        UserError: See `check_quantizable`.
    """

    def __init__(self, source: Path, recipe: Recipe, feeds: Sequence[Feed]) -> None:
        self._original = read_model(source)
        for node in self._original.graph.node:
            node.name = node_name(node)
        self.layers = tuple(node.name for node, _ in _weighted(self._original.graph))
        check_quantizable(recipe, self.layers, feeds)
        self._quantized = _quantize(self._original, feeds)

    def converted(self, kept: Sequence[str]) -> tuple[onnx.ModelProto, Conversion]:
        """Return the quantized graph as an `onnx.ModelProto`, and the record of the conversion.

        The layers in `kept` stay fp32.
        """
        model, excluded = copy_model(self._quantized), set(kept)
        graph = model.graph
        makers = {output: node for node in graph.node for output in node.output}
        sources = {node.name: node for node in self._original.graph.node}
        weights = initializers(self._original.graph)
        whole = set()  # values that no conversion rounds
        for node in graph.node:
            if node.name in excluded:
                for index, name in enumerate(sources[node.name].input):
                    if name in weights:  # its name is taken by the dequantized weight
                        node.input[index] = f"{name}/{node.name}"
                        weight = graph.initializer.add()
                        weight.CopyFrom(weights[name])
                        weight.name = node.input[index]
                whole.add(node.output[0])
        for node in graph.node:
            is_rounded = node.op_type in OPERATORS and node.name not in excluded
            for index, name in enumerate(() if is_rounded else node.input):
                given = _before_rounding(name, makers)
                if node.name in excluded or given in whole:
                    node.input[index] = given
        for output in graph.output:
            given = _before_rounding(output.name, makers)
            if given in whole:
                makers[output.name].CopyFrom(_identity(given, output.name))
        _drop_unread(graph)
        record = Conversion(
            layers=self.layers,
            excluded_layers=tuple(name for name in self.layers if name in excluded),
        )
        return model, record


def _identity(source: str, target: str) -> onnx.NodeProto:
    import onnx

    return onnx.helper.make_node("Identity", [source], [target], name=f"{target}/node")


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the nodes and weights that nothing reads; nodes are in topological order."""
    used = {output.name for output in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if used & set(node.output):
            nodes.append(node)
            used |= set(reads(node))
    set_nodes(graph, nodes[::-1])
    drop_unused(graph)


def _before_rounding(name: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value that a pair of QuantizeLinear and DequantizeLinear rounds to `name`."""
    last = makers.get(name)
    if last is None or last.op_type != "DequantizeLinear":
        return name
    first = makers.get(last.input[0])
    return name if first is None or first.op_type != "QuantizeLinear" else str(first.input[0])


def _quantize(model: onnx.ModelProto, feeds: Sequence[Feed]) -> onnx.ModelProto:
    """Return a graph with all layers quantized."""
    from onnxruntime.quantization import QuantType, quantize_static

    with scratch_folder("triptych-int8-") as scratch, quiet():
        save_onnx(copy_model(model), scratch / MODEL_FILE)
        target = scratch / "int8.onnx"
        quantize_static(
            scratch / MODEL_FILE,
            target,
            _Rows(feeds),
            op_types_to_quantize=list(OPERATORS),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return read_model(target)


class _Rows:
    """Calibration rows in the form that ONNX Runtime reads them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._rows = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._rows, None)
