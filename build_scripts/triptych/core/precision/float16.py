"""fp32 graph -> fp16 or bf16 graph, with fp32 inputs and outputs.

ONNX Runtime's converter changes the types. Around it:

- the nodes it leaves in fp32 are chosen by `float_nodes`, with the ranges of real rows;
- it would round what passes from one such node to the next to fp16 and back, overflow and all:
  they are joined;
- a constant that both kinds of node read becomes two, or the fp32 ones would read it rounded;
- bf16 it does not know: its fp16 becomes bf16, and constants are rounded from fp32 once;
- masks of attention become numbers that 16 bits can hold.

Which nodes of a graph of 16-bit floats compute in fp32 all the same, and why.

fp16 ends at 65,504 and loses numbers below 6e-5; bf16 reaches as far as fp32 with 8 bits of each
number. What stays in fp32:

- What comes before any weight: places, masks, the scaling of pixels. Whole numbers beyond
  2,048 (fp16) or 256 (bf16) are not exact in 16 bits, and angles of rotary positions or buckets of
  relative ones consist of such numbers. It happens once a batch, not once a layer.
- What follows the last layer: pooling, normalization (its epsilon of 1e-12 is 0 in fp16), the
  probabilities. It costs next to nothing, and its results are what users compare.
- Sums over a row and powers (`FRAGILE`), wherever they are.
- A node with a number that has no 16-bit form, and one that the standard does not define for the
  type. Where such a number is an epsilon, what it keeps from 0 goes on in fp32 up to the node that
  divides by it: rounded before, it would be 0 there.
- A node next to a value that calibration rows drove too close to the end of the range.

In 16 bits stay, on purpose: LayerNormalization and Softmax. Standard and runtimes compute both in
fp32 inside, whatever the type of what they read, and casts around them would keep TensorRT from
recognizing attention.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_graph import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    PRODUCTS,
    Initializers,
    add_constant,
    at_opset,
    drop_unused,
    free_mark,
    initializers,
    read_model,
    set_nodes,
    value_of,
    value_types,
    write_model,
)
from triptych.core.precision.calibrate import Feed, model_ranges
from triptych.core.precision.linear import Recipe, check_kept, find_groups
from triptych.repository.records import Conversion

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
    # Weights that are stored quantized count as what their DequantizeLinear outputs.
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
        # A node that dequantizes a stored weight belongs to the layer that reads it.
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


MASKED = -1e4
"""Stands for "never": its exponential is exactly 0 in fp32 next to any score, and fp16 holds it."""

_MASK_INPUTS = {"Where": (1, 2), "Mul": (0, 1), "Add": (0, 1)}
"""Operators that put a mask's number in, and their inputs that may hold it."""


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` in fp16 or bf16, with the inputs and outputs of `source`.

    `Recipe.kept` names groups of linear layers or nodes. Without `feeds`, calibration rows,
    nothing is known to overflow.

    Returns:
        `Conversion.layers` are the groups of linear layers; ``kept`` are what was asked for and the
        nodes that stay fp32 for the ``reasons``; ``ranges`` is by value.

    Raises:
        UserError: a layer to keep does not exist.
    """
    model = read_model(source)
    nodes = model.graph.node
    _name_nodes(model.graph)
    groups = find_groups(model.graph)
    layers = tuple(group.name for group in groups)
    check_kept(recipe, [*layers, *(node.name for node in nodes)])
    asked = {node.name for node in nodes if node.name in recipe.kept}
    for group in groups:
        if group.name in recipe.kept:
            asked |= {nodes[index].name for layer in group.layers for index in layer.nodes}
    softened = _soften_masks(model)
    ranges = model_ranges(model, feeds) if feeds else {}
    halved, reasons = _halve(model, recipe.precision, ranges, asked)
    write_model(halved, target)
    notes = []
    if softened:
        notes.append(f"{softened} mask constants beyond fp16 became {MASKED:g}")
    if not ranges and recipe.precision == "fp16":
        notes.append("No calibration rows: what overflows fp16 is not known")
    return Conversion(
        layers=layers,
        kept=(*(name for name in recipe.kept if name not in reasons), *reasons),
        reasons=reasons,
        ranges=ranges,
        notes=tuple(notes),
        fp32_products=_products(halved.graph, asked | reasons.keys()),
    )


def halve_quantized(model: Any, ranges: Mapping[str, float]) -> tuple[Any, tuple[str, ...]]:
    """A graph with Q/DQ layers, changed so that its fp32 values are fp16, scales with them.

    With it come the matrix products that stay in fp32, as `Conversion.fp32_products`.

    TensorRT computes what is not quantized as the graph says: attention and the rest in fp32 would
    cost more than the quantized layers gain. `ranges` are those of the fp32 graph, by value.
    """
    at_opset(model)
    _name_nodes(model.graph)
    _soften_masks(model)
    halved, reasons = _halve(model, "fp16", ranges, frozenset())
    return halved, _products(halved.graph, reasons)


def _products(graph: Any, names: Container[str]) -> tuple[str, ...]:
    """The matrix products among the nodes of these names."""
    return tuple(n.name for n in graph.node if n.op_type in PRODUCTS and n.name in names)


def _halve(
    model: Any, precision: str, ranges: Mapping[str, float], asked: Set[str]
) -> tuple[Any, dict[str, str]]:
    """The graph in 16 bits, and the nodes that stay fp32 to why, but for those in `asked`.

    Args:
        model: an `onnx.ModelProto` with fp32 values whose masks are softened; it may be changed.
        precision: ``fp16`` or ``bf16``.
        ranges: largest magnitude of values on calibration rows, where it is known.
        asked: names of more nodes that stay fp32.
    """
    types = value_types(model)
    by_index = fp32_nodes(model, types, ranges, precision)
    reasons = {model.graph.node[index].name: reason for index, reason in by_index.items()}
    return _retyped(model, types, asked | reasons.keys(), precision), reasons


def _name_nodes(graph: Any) -> None:
    """Give every node a name of its own; those that have one keep it."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        taken.add(node.name)


def _soften_masks(model: Any) -> int:
    """Replace what a mask adds to a score, where it is beyond fp16, by `MASKED`; returns how many.

    PyTorch exports masks as the lowest fp32 number or as minus infinity. Both become minus
    infinity in 16 bits (the lowest fp32 number even in bf16), and a row of nothing else then comes
    out of a softmax as NaN. A single number is replaced only: weights are not masks.
    """
    graph = model.graph
    lowest = {
        name: tensor
        for name, tensor in initializers(graph).items()
        if tensor.data_type == FLOAT
        and int(np.prod(tensor.dims)) == 1
        and value_of(tensor).min() < -HALF_TYPES["fp16"].largest
    }
    softened: dict[str, str] = {}
    mark = free_mark(graph)
    for node in graph.node:
        for place in _MASK_INPUTS.get(node.op_type, ()):
            name = node.input[place]
            if name in lowest:
                node.input[place] = softened.setdefault(name, f"{name}{mark}softened")
    for old, new in softened.items():
        add_constant(graph, new, np.full(list(lowest[old].dims), MASKED, dtype=np.float32))
    drop_unused(graph)
    return len(softened)


def _retyped(model: Any, types: Mapping[str, int], fp32: Set[str], precision: str) -> Any:
    """The graph with every float in 16 bits but inputs, outputs and the nodes named in `fp32`.

    `model` may be changed; its nodes have names, its values `types`.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    graph = model.graph
    _split_constants(graph, fp32)
    # The converter recognizes floats by these.
    del graph.value_info[:]
    inner = {name for node in graph.node for name in node.output if name}
    inner -= {value.name for value in graph.output}
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, types[name], None) for name in sorted(inner)
    )
    own = {node.name for node in graph.node}
    exact = {
        name: value_of(tensor)
        for name, tensor in initializers(graph).items()
        if precision == "bf16" and tensor.data_type == FLOAT
    }
    logging.getLogger("onnxruntime.transformers").setLevel(logging.WARNING)
    converted = convert_float_to_float16(
        model,
        keep_io_types=True,
        disable_shape_infer=True,
        op_block_list=[],
        node_block_list=sorted(fp32),
    )
    del converted.graph.value_info[:]
    _join(converted.graph, own)
    OnnxModel(converted).topological_sort(is_deterministic=True)
    if precision == "bf16":
        _to_bf16(converted.graph, exact)
    return converted


def _split_constants(graph: Any, fp32: Set[str]) -> None:
    """Give the nodes in `fp32` copies of the float constants they share with other nodes."""
    constants = {t.name: t for t in graph.initializer if t.data_type == FLOAT}
    shared = {name for node in graph.node if node.name not in fp32 for name in node.input}
    copied = set()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if node.name in fp32 and name in constants and name in shared:
                node.input[place] = f"{name}_fp32"
                copied.add(name)
    for name in sorted(copied):
        copy = graph.initializer.add()
        copy.CopyFrom(constants[name])
        copy.name = f"{name}_fp32"


def _cast_to(node: Any) -> int:
    """The type a Cast casts to; 0 for other nodes."""
    if node.op_type != "Cast":
        return 0
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _join(graph: Any, own: Set[str]) -> None:
    """Take out casts down to fp16 and up again, and double casts, that are not the graph's own.

    The graph is changed in place; `own` are the names of the nodes before the conversion.
    """
    added = [node for node in graph.node if node.name not in own]
    behind = {node.output[0]: node.input[0] for node in added if _cast_to(node) == FLOAT16}
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    known: set[str] = set()
    dropped = set()
    for node in added:
        if _cast_to(node) != FLOAT:
            continue
        before, result = behind.get(node.input[0]), node.output[0]
        if before is not None and result in outputs:
            renamed[before] = result
        elif before is not None:
            renamed[result] = before
        if before is not None or result in known:
            dropped.add(id(node))
        known.add(result)
    # Two steps at most: a value behind an output's cast may have been renamed itself.
    final = {old: renamed.get(new, new) for old, new in renamed.items()}
    nodes = [node for node in graph.node if id(node) not in dropped]
    for node in nodes:
        node.input[:] = [final.get(name, name) for name in node.input]
        node.output[:] = [final.get(name, name) for name in node.output]
    read = {name for node in nodes for name in node.input} | outputs
    set_nodes(graph, [node for node in nodes if node.name in own or node.output[0] in read])


def _to_bf16(graph: Any, exact: Mapping[str, NDArray[Any]]) -> None:
    """Turn all fp16 into bf16; constants are rounded from `exact`, their fp32 values by name."""
    import ml_dtypes
    import onnx

    def store(tensor: Any, values: NDArray[Any]) -> None:
        rounded = values.astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(rounded, tensor.name))

    for tensor in graph.initializer:
        if tensor.data_type == FLOAT16:
            store(tensor, exact[tensor.name])
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == FLOAT16:
                attribute.i = BFLOAT16
            if attribute.HasField("t") and attribute.t.data_type == FLOAT16:
                store(attribute.t, value_of(attribute.t))
