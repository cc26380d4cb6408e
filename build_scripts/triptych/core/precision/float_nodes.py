"""Which nodes of a graph of 16-bit floats compute in fp32 all the same, and why.

fp16 ends at 65,504 and loses numbers below 6e-5; bf16 reaches as far as fp32 with 8 bits of each
number. What stays in fp32:

- What comes before any weight: places, masks, the scaling of pixels. Whole numbers beyond
  2,048 (fp16) or 256 (bf16) are not exact in 16 bits, and angles of rotary positions or buckets of
  relative ones consist of such numbers. It happens once a batch, not once a layer.
- What follows the last layer: pooling, normalisation (its epsilon of 1e-12 is 0 in fp16), the
  probabilities. It costs next to nothing, and its results are what users compare.
- Sums over a row and powers (`FRAGILE`), wherever they are.
- A node with a number that has no 16-bit form, and one that the standard does not define for the
  type. Where such a number is an epsilon, what it keeps from 0 goes on in fp32 up to the node that
  divides by it: rounded before, it would be 0 there.
- A node next to a value that calibration rows drove too close to the end of the range.

In 16 bits stay, on purpose: LayerNormalization and Softmax. Standard and runtimes compute both in
fp32 inside, whatever the type of what they read, and casts around them would keep TensorRT from
recognising attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_nodes import Initializers, initializers, value_of
from triptych.base.onnx_types import FLOAT

HEADROOM = 4.0
"""How much larger than on calibration rows a value may become while serving. Between two thirds of
MiniLM's traffic and the other third no value grew by more than 1.2, from 8 rows by 2.5. A mask of
-1e4 must fit too."""

SUMS = "adds up a whole row: longer rows than those of calibration may leave the range"
POWERS = "a power: leaves the range sooner than what it is taken of"
FRAGILE: Mapping[str, str] = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceProd", "CumSum", "GlobalAveragePool"), SUMS),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "LpNormalization"), SUMS),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "InstanceNormalization"), SUMS),
    **dict.fromkeys(("GroupNormalization", "MeanVarianceNormalization"), SUMS),
    **dict.fromkeys(("Pow", "Exp", "Log", "Sqrt", "Reciprocal"), POWERS),
}
EPSILON = "uses what a small epsilon keeps from 0"
PLACES = "comes before any weight: of places, masks or pixels"
RESULT = "makes the result of the last layer"


@dataclass(frozen=True)
class HalfType:
    """A 16-bit type: an operator's schema's name, largest number, smallest with all its bits."""

    type: str
    largest: float
    smallest: float

    def vanishes(self, number: NDArray[Any]) -> bool:
        """Whether it is an epsilon too small for the type: a weight may vanish, among others."""
        return number.size == 1 and 0 < abs(float(number.reshape(()))) < self.smallest


HALF_TYPES: Mapping[str, HalfType] = {
    "fp16": HalfType("tensor(float16)", 65504.0, 2.0**-14),
    "bf16": HalfType("tensor(bfloat16)", 3.3895313892515355e38, 2.0**-126),
}
"""By precision."""

_WEIGHED = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0}
"""Operators that bring learned weights in, and the input that holds them."""


def fp32_nodes(
    model: Any, types: Mapping[str, int], ranges: Mapping[str, float], precision: str
) -> dict[int, str]:
    """The nodes to keep in fp32, by index, with the reason.

    Args:
        model: an fp32 `onnx.ModelProto`.
        types: of its values.
        ranges: largest magnitude of each inner value; where one is unknown, it is taken for small.
        precision: ``fp16`` or ``bf16``.
    """
    import onnx

    graph, wanted = model.graph, HALF_TYPES[precision]
    constants = initializers(graph)
    # Weights that are stored quantised count as what their DequantizeLinear outputs.
    weights = constants | {
        node.output[0]: onnx.TensorProto(dims=constants[node.input[0]].dims, data_type=FLOAT)
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in constants
    }
    learned = _learned(graph, types, weights)
    before = _before_layers(graph, weights)
    domains = {one.domain: one.version for one in model.opset_import}
    small = _near_epsilons(graph, types, constants, wanted)
    reasons: dict[int, str] = {}
    for index, node in enumerate(graph.node):
        values = [name for name in (*node.input, *node.output) if types.get(name) == FLOAT]
        if not values:
            continue
        schema = onnx.defs.get_schema(node.op_type, domains[node.domain], node.domain)
        reason = (
            (PLACES if index not in learned else "")
            or (RESULT if index not in before else "")
            or FRAGILE.get(node.op_type, "")
            or _undefined(node, schema, types, wanted)
            or _without_form(_numbers(node, constants), wanted)
            or (EPSILON if index in small else "")
            or _too_large(values, ranges, wanted)
        )
        if reason:
            reasons[index] = reason
    return reasons


def _is_weighed(node: Any, constants: Initializers) -> bool:
    """Whether the node applies a matrix (or more) of learned weights."""
    place = _WEIGHED.get(node.op_type)
    if place is None or place >= len(node.input) or node.input[place] not in constants:
        return False
    weight = constants[node.input[place]]
    return len(weight.dims) >= 2 and weight.data_type == FLOAT


def _learned(graph: Any, types: Mapping[str, int], constants: Initializers) -> set[int]:
    """The nodes whose result weights took part in, by index."""
    values: set[str] = set()
    nodes = set()
    for index, node in enumerate(graph.node):
        # A node that dequantises a stored weight belongs to the layer that reads it.
        stored = not constants.keys().isdisjoint(node.output)
        if stored or _is_weighed(node, constants) or values.intersection(node.input):
            nodes.add(index)
            passes = node.op_type == "QuantizeLinear"  # in integers, to be floats again at once
            values |= {name for name in node.output if passes or types.get(name) == FLOAT}
    return nodes


def _before_layers(graph: Any, constants: Initializers) -> set[int]:
    """The nodes that are such a layer or whose result reaches one, by index."""
    wanted: set[str] = set()
    nodes = set()
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if _is_weighed(node, constants) or wanted.intersection(node.output):
            nodes.add(index)
            wanted |= set(node.input)
    return nodes


def _near_epsilons(
    graph: Any, types: Mapping[str, int], constants: Initializers, wanted: HalfType
) -> set[int]:
    """The nodes between an epsilon that vanishes in 16 bits and what divides by its result."""
    values: set[str] = set()
    nodes = set()
    for index, node in enumerate(graph.node):
        held = any(map(wanted.vanishes, _numbers(node, constants)))
        if not held and not values.intersection(node.input):
            continue
        nodes.add(index)
        if held or node.op_type not in ("Div", "Mul"):
            values |= {name for name in node.output if types.get(name) == FLOAT}
    return nodes


def _numbers(node: Any, constants: Initializers) -> list[NDArray[Any]]:
    """The float constants a node reads."""
    tensors = [constants[name] for name in node.input if name in constants]
    return [value_of(tensor) for tensor in tensors if tensor.data_type == FLOAT]


def _undefined(node: Any, schema: Any, types: Mapping[str, int], wanted: HalfType) -> str:
    """Why the operator cannot take the type, empty where it can."""
    for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for place, name in enumerate(names):
            parameter = parameters[min(place, len(parameters) - 1)]  # the last may repeat
            if types.get(name) == FLOAT and wanted.type not in parameter.types:
                return f"{node.op_type} {schema.since_version} is not defined for {wanted.type}"
    return ""


def _without_form(numbers: list[NDArray[Any]], wanted: HalfType) -> str:
    """Which constant has no 16-bit form, empty where all have."""
    for number in numbers:
        largest = np.abs(number[np.isfinite(number)]).max(initial=0.0)
        if largest > wanted.largest:
            return f"holds {largest:.3g}, beyond {wanted.largest:.3g}"
        if wanted.vanishes(number):
            return f"holds {largest:.3g}, below {wanted.smallest:.3g}"
    return ""


def _too_large(values: list[str], ranges: Mapping[str, float], wanted: HalfType) -> str:
    """Which value comes too close to the end of the range, empty where none does."""
    for name in values:
        if not ranges.get(name, 0.0) * HEADROOM <= wanted.largest:
            return f"{name} reaches {ranges[name]:.3g} on calibration rows"
    return ""
