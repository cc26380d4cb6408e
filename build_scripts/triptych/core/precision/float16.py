"""Convert an fp32 graph to fp16 or bf16, with fp32 inputs and outputs.

ONNX Runtime's converter changes the types. This module does the rest:

- It selects the nodes that stay fp32 (`fp32_nodes`), with value ranges from calibration rows.
- It removes casts between neighboring fp32 nodes, which would round and overflow in between.
- It duplicates constants that fp32 and 16-bit nodes share, so that fp32 nodes read exact values.
- For bf16, which the converter does not support, it turns fp16 into bf16 and rounds constants
  from fp32 once.
- It replaces attention mask values with numbers that 16 bits can represent.

fp16 ends at 65,504 and loses numbers below 6e-5; bf16 has the range of fp32 with 8 bits of
precision. The following nodes stay in fp32:

- Nodes before the first weight: positions, masks, the scaling of pixels. Whole numbers beyond
  2,048 (fp16) or 256 (bf16) are not exact in 16 bits, and rotary angles and relative position
  buckets consist of such numbers. These nodes run once per batch, not once per layer.
- Nodes after the last layer: pooling, normalization (its epsilon of 1e-12 is 0 in fp16) and
  probabilities. They cost little, and users compare their results.
- Sums over a row and powers (`FRAGILE`), everywhere.
- Nodes with a constant that has no 16-bit representation, or without a definition for the type.
  If the constant is an epsilon, all nodes up to the division by its result stay in fp32, where
  the result would otherwise be 0.
- Nodes next to a value that came too close to the end of the range on calibration rows.

LayerNormalization and Softmax become 16-bit on purpose. The standard and the runtimes compute both
in fp32 internally, and casts around them would keep TensorRT from recognizing attention.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.base.onnx_graph import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    MICROSOFT,
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

if TYPE_CHECKING:
    import onnx

HEADROOM = 4.0
"""Factor by which a value may grow while serving, compared with calibration rows. Between two
thirds of MiniLM's traffic and the rest no value grew by more than 1.2, with 8 rows by 2.5. A mask
of -1e4 must fit, too."""

SUMS = "sums over a row, so rows longer than those of calibration may overflow"
POWERS = "computes a power, which overflows earlier than its input"
FRAGILE: Mapping[str, str] = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceProd", "CumSum", "GlobalAveragePool"), SUMS),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "LpNormalization"), SUMS),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "InstanceNormalization"), SUMS),
    **dict.fromkeys(("GroupNormalization", "MeanVarianceNormalization"), SUMS),
    **dict.fromkeys(("Pow", "Exp", "Log", "Sqrt", "Reciprocal"), POWERS),
}
EPSILON = "depends on an epsilon that is 0 in 16 bits"
PLACES = "comes before the first weight (positions, masks or pixels)"
RESULT = "comes after the last layer"


@dataclass(frozen=True)
class HalfType:
    """A 16-bit type: name in operator schemas, largest and smallest number of full precision."""

    type: str
    largest: float
    smallest: float

    def vanishes(self, number: NDArray[np.generic]) -> bool:
        """Return whether a single number is too small for the type.

        Larger tensors are weights, some of which may vanish.
        """
        return number.size == 1 and 0 < abs(float(number.reshape(()))) < self.smallest


HALF_TYPES: Mapping[str, HalfType] = {
    "fp16": HalfType("tensor(float16)", 65504.0, 2.0**-14),
    "bf16": HalfType("tensor(bfloat16)", 3.3895313892515355e38, 2.0**-126),
}
"""The 16-bit types, by precision."""

_WEIGHED = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0}
_WEIGHED["EmbedLayerNormalization"] = 2
"""Operators that read learned weights, and the index of the input that holds them."""


def fp32_nodes(
    model: onnx.ModelProto, types: Mapping[str, int], ranges: Mapping[str, float], precision: str
) -> dict[int, str]:
    """Return the indices of the nodes to leave in fp32, with the reason of each.

    Args:
        model: An fp32 `onnx.ModelProto`.
        types: Type of each value, by name.
        ranges: Largest magnitude of each inner value; a value without an entry counts as small.
        precision: ``fp16`` or ``bf16``.
    """
    import onnx

    graph, wanted = model.graph, HALF_TYPES[precision]
    constants = initializers(graph)
    # A quantized weight is represented by the output of its DequantizeLinear.
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
        reason = (
            (PLACES if index not in learned else "")
            or (RESULT if index not in before else "")
            or FRAGILE.get(node.op_type, "")
            or _undefined(node, domains, types, wanted)
            or _without_form(_numbers(node, constants), wanted)
            or (EPSILON if index in small else "")
            or _too_large(values, ranges, wanted)
        )
        if reason:
            reasons[index] = reason
    return reasons


def _is_weighed(node: onnx.NodeProto, constants: Initializers) -> bool:
    """Check that the node applies a matrix (or more axes) of learned weights."""
    place = _WEIGHED.get(node.op_type)
    if place is None or place >= len(node.input) or node.input[place] not in constants:
        return False
    weight = constants[node.input[place]]
    return len(weight.dims) >= 2 and weight.data_type == FLOAT


def _learned(graph: onnx.GraphProto, types: Mapping[str, int], constants: Initializers) -> set[int]:
    """Return the indices of the nodes whose result depends on weights."""
    values: set[str] = set()
    nodes = set()
    for index, node in enumerate(graph.node):
        # A node that dequantizes a stored weight belongs to the layer that reads it.
        stored = not constants.keys().isdisjoint(node.output)
        if stored or _is_weighed(node, constants) or values.intersection(node.input):
            nodes.add(index)
            passes = node.op_type == "QuantizeLinear"  # integers that become floats again at once
            values |= {name for name in node.output if passes or types.get(name) == FLOAT}
    return nodes


def _before_layers(graph: onnx.GraphProto, constants: Initializers) -> set[int]:
    """Return the indices of the layers with weights, and of the nodes whose result reaches one."""
    wanted: set[str] = set()
    nodes = set()
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if _is_weighed(node, constants) or wanted.intersection(node.output):
            nodes.add(index)
            wanted |= set(node.input)
    return nodes


def _near_epsilons(
    graph: onnx.GraphProto, types: Mapping[str, int], constants: Initializers, wanted: HalfType
) -> set[int]:
    """Return the indices of the nodes from a vanishing epsilon to the division by its result."""
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


def _numbers(node: onnx.NodeProto, constants: Initializers) -> list[NDArray[np.generic]]:
    """Return the float constants that a node reads."""
    tensors = [constants[name] for name in node.input if name in constants]
    return [value_of(tensor) for tensor in tensors if tensor.data_type == FLOAT]


def _undefined(
    node: onnx.NodeProto, domains: Mapping[str, int], types: Mapping[str, int], wanted: HalfType
) -> str:
    """Return why the operator does not support the type; empty if it does.

    ONNX Runtime's own operators are in graphs for fp16 alone.
    """
    import onnx

    if node.domain == MICROSOFT:
        return ""
    schema = onnx.defs.get_schema(node.op_type, domains[node.domain], node.domain)
    for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for place, name in enumerate(names):
            parameter = parameters[min(place, len(parameters) - 1)]  # the last may repeat
            if types.get(name) == FLOAT and wanted.type not in parameter.types:
                return f"{node.op_type} {schema.since_version} is not defined for {wanted.type}"
    return ""


def _without_form(numbers: list[NDArray[np.generic]], wanted: HalfType) -> str:
    """Return which constant has no 16-bit representation; empty if all have one."""
    for number in numbers:
        largest = np.abs(number[np.isfinite(number)]).max(initial=0.0)
        if largest > wanted.largest:
            return f"holds {largest:.3g}, beyond {wanted.largest:.3g}"
        if wanted.vanishes(number):
            return f"holds {largest:.3g}, below {wanted.smallest:.3g}"
    return ""


def _too_large(values: list[str], ranges: Mapping[str, float], wanted: HalfType) -> str:
    """Return which value comes too close to the end of the range; empty if none does."""
    for name in values:
        if not ranges.get(name, 0.0) * HEADROOM <= wanted.largest:
            return f"{name} reaches {ranges[name]:.3g} on calibration rows"
    return ""


MASKED = -1e4
"""Mask value: next to any score its exponential is exactly 0 in fp32, and fp16 can represent it."""

_MASK_INPUTS = {"Where": (1, 2), "Mul": (0, 1), "Add": (0, 1)}
"""Operators that insert the mask value, and the indices of the inputs that may hold it."""


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` in fp16 or bf16, with the inputs and outputs of `source`.

    `Recipe.kept` names groups of linear layers, or nodes. Without calibration rows in `feeds`, no
    node is excluded for an overflow.

    Returns:
        The record of the conversion. ``layers`` are the groups of linear layers; ``kept`` are the
        requested exclusions and the nodes that stay fp32 for the ``reasons``; ``ranges`` is by
        value.

    Raises:
        UserError: An excluded layer does not exist.
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
        notes.append("There are no calibration rows, so values that overflow fp16 are not known")
    return Conversion(
        layers=layers,
        excluded_layers=(*(name for name in recipe.kept if name not in reasons), *reasons),
        reasons=reasons,
        ranges=ranges,
        notes=tuple(notes),
        fp32_products=_products(halved.graph, asked | reasons.keys()),
    )


def halve_quantized(
    model: onnx.ModelProto, ranges: Mapping[str, float]
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a graph with Q/DQ layers whose other fp32 values are fp16.

    The second result are the matrix products that stay in fp32, as `Conversion.fp32_products`.
    Scales become fp16, too. TensorRT computes in the types of the graph: attention and the rest in
    fp32 would cost more than the quantized layers save. `ranges` are those of the fp32 graph, by
    value.
    """
    at_opset(model)
    _name_nodes(model.graph)
    _soften_masks(model)
    halved, reasons = _halve(model, "fp16", ranges, frozenset())
    return halved, _products(halved.graph, reasons)


def _products(graph: onnx.GraphProto, names: Container[str]) -> tuple[str, ...]:
    """Return the matrix products among the nodes with these names."""
    return tuple(n.name for n in graph.node if n.op_type in PRODUCTS and n.name in names)


def _halve(
    model: onnx.ModelProto, precision: str, ranges: Mapping[str, float], asked: Set[str]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the graph in 16 bits, and the reasons of the nodes that stay fp32.

    Nodes in `asked` have no reason.

    Args:
        model: An `onnx.ModelProto` with fp32 values and replaced mask values; it may be changed.
        precision: ``fp16`` or ``bf16``.
        ranges: Largest magnitude of values on calibration rows, if known.
        asked: Names of further nodes that stay fp32.
    """
    types = value_types(model)
    by_index = fp32_nodes(model, types, ranges, precision)
    reasons = {model.graph.node[index].name: reason for index, reason in by_index.items()}
    return _retyped(model, types, asked | reasons.keys(), precision), reasons


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a unique name; existing unique names do not change."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        taken.add(node.name)


def _soften_masks(model: onnx.ModelProto) -> int:
    """Replace mask values beyond fp16 with `MASKED`; return the number of replacements.

    PyTorch exports masks as the lowest fp32 number or as minus infinity. Both become minus infinity
    in 16 bits (the lowest fp32 number even in bf16), and a softmax over nothing else gives NaN.
    Only single numbers are replaced, because larger tensors are weights.
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


def _retyped(
    model: onnx.ModelProto, types: Mapping[str, int], fp32: Set[str], precision: str
) -> onnx.ModelProto:
    """Return the graph with every float in 16 bits, except inputs, outputs and nodes in `fp32`.

    `model` may be changed; its nodes have names, and `types` has the type of each value.
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
    converted: onnx.ModelProto = convert_float_to_float16(
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


def _split_constants(graph: onnx.GraphProto, fp32: Set[str]) -> None:
    """Give the nodes in `fp32` their own copies of float constants that other nodes read, too."""
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


def _cast_to(node: onnx.NodeProto) -> int:
    """Return the type that a Cast casts to; 0 for other nodes."""
    if node.op_type != "Cast":
        return 0
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _join(graph: onnx.GraphProto, own: Set[str]) -> None:
    """Remove added casts from fp32 to fp16 and back, and duplicate casts.

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
    # At most two steps: the value in front of an output's cast may be renamed, too.
    final = {old: renamed.get(new, new) for old, new in renamed.items()}
    nodes = [node for node in graph.node if id(node) not in dropped]
    for node in nodes:
        node.input[:] = [final.get(name, name) for name in node.input]
        node.output[:] = [final.get(name, name) for name in node.output]
    read = {name for node in nodes for name in node.input} | outputs
    set_nodes(graph, [node for node in nodes if node.name in own or node.output[0] in read])


def _to_bf16(graph: onnx.GraphProto, exact: Mapping[str, NDArray[np.generic]]) -> None:
    """Turn all fp16 into bf16; round constants from `exact`, their fp32 values by name."""
    import ml_dtypes
    import onnx

    def store(tensor: onnx.TensorProto, values: NDArray[np.generic]) -> None:
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
