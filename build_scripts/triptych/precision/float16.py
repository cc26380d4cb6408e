"""fp32 graph -> fp16 or bf16 graph, with fp32 inputs and outputs.

ONNX Runtime's converter changes the types. Around it:

- the nodes it leaves in fp32 are chosen by `float_nodes`, with the ranges of real rows;
- it would round what passes from one such node to the next to fp16 and back, overflow and all:
  they are joined;
- a constant that both kinds of node read becomes two, or the fp32 ones would read it rounded;
- bf16 it does not know: its fp16 becomes bf16, and constants are rounded from fp32 once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from triptych.graph.files import read_model, write_model
from triptych.graph.opset import at_opset
from triptych.graph.value_types import value_types
from triptych.precision.float_nodes import FLOATS, fp32_nodes
from triptych.precision.linear import Group, find_groups
from triptych.precision.masks import MASKED, soften_masks
from triptych.precision.ranges import model_ranges
from triptych.precision.recipe import Recipe, check_kept
from triptych.repository.records import Conversion

Feed = Mapping[str, NDArray[Any]]
_FLOAT, _FLOAT16 = 1, 10


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx`` in fp16 or bf16, with the inputs and outputs of `source`.

    Args:
        source: an fp32 graph.
        target: folder to write into.
        recipe: ``fp16`` or ``bf16``; `Recipe.kept` names groups of linear layers or nodes.
        feeds: calibration rows. Without any, nothing is known to overflow.

    Returns:
        `Conversion.layers` are the groups of linear layers; ``kept`` are what was asked for and the
        nodes that stay fp32 for the ``reasons``; ``ranges`` is by value.

    Raises:
        UserError: a layer to keep does not exist.
    """
    model = read_model(source)
    name_nodes(model.graph)
    groups = find_groups(model.graph)
    layers = tuple(group.name for group in groups)
    check_kept(recipe, [*layers, *(node.name for node in model.graph.node)])
    asked = {model.graph.node[index].name for index in _asked(model.graph, groups, recipe.kept)}
    softened = soften_masks(model)
    ranges = model_ranges(model, feeds) if feeds else {}
    halved, reasons = halve(model, recipe.precision, ranges, asked)
    write_model(halved, target)
    return Conversion(
        layers=layers,
        kept=(*(name for name in recipe.kept if name not in reasons), *reasons),
        reasons=reasons,
        ranges=ranges,
        notes=_notes(softened, recipe.precision, ranges),
    )


def halve(
    model: Any, precision: str, ranges: Mapping[str, float], asked: Set[str] = frozenset()
) -> tuple[Any, dict[str, str]]:
    """The graph in 16 bits, but for what has to stay fp32.

    Args:
        model: an `onnx.ModelProto` with fp32 values whose masks are softened; it may be changed.
        precision: ``fp16`` or ``bf16``.
        ranges: largest magnitude of values on calibration rows, where it is known.
        asked: names of more nodes that stay fp32.

    Returns:
        The graph, and the nodes that stay fp32 to why, but for those that were asked for.
    """
    types = value_types(model)
    by_index = fp32_nodes(model, types, ranges, precision)
    reasons = {model.graph.node[index].name: reason for index, reason in by_index.items()}
    return retyped(model, types, asked | reasons.keys(), precision), reasons


def halve_quantised(model: Any, ranges: Mapping[str, float]) -> Any:
    """A graph with Q/DQ layers whose fp32 values become fp16, scales with them.

    TensorRT computes what is not quantised as the graph says: attention and the rest in fp32 would
    cost more than the quantised layers gain.

    Args:
        model: an `onnx.ModelProto`, changed in place.
        ranges: as `halve` takes them; values of the fp32 graph keep their names.
    """
    at_opset(model)
    name_nodes(model.graph)
    soften_masks(model)
    return halve(model, "fp16", ranges)[0]


def _asked(graph: Any, groups: Sequence[Group], kept: Sequence[str]) -> set[int]:
    """Indices of the nodes that `kept` names, a group or a node each."""
    of_groups = {
        index
        for group in groups
        if group.name in kept
        for layer in group.layers
        for index in layer.nodes
    }
    return of_groups | {index for index, node in enumerate(graph.node) if node.name in kept}


def _notes(softened: int, precision: str, ranges: Mapping[str, float]) -> tuple[str, ...]:
    notes = []
    if softened:
        notes.append(f"{softened} mask constants beyond fp16 became {MASKED:g}")
    if not ranges and precision == "fp16":
        notes.append("No calibration rows: what overflows fp16 is not known")
    return tuple(notes)


def name_nodes(graph: Any) -> None:
    """Give every node a name of its own; those that have one keep it."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        taken.add(node.name)


def retyped(model: Any, types: Mapping[str, int], fp32: Set[str], precision: str) -> Any:
    """The graph with every float in 16 bits but inputs, outputs and the nodes named in `fp32`.

    Args:
        model: an fp32 `onnx.ModelProto` whose nodes have names; it may be changed.
        types: as `value_types` gives them.
        fp32: names of nodes.
        precision: ``fp16`` or ``bf16``.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    graph = model.graph
    _split_constants(graph, fp32)
    # The converter tells floats by these.
    del graph.value_info[:]
    made = {name for node in graph.node for name in node.output}
    shown = made - {value.name for value in graph.output}
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, types[name], None) for name in sorted(shown - {""})
    )
    own = {node.name for node in graph.node}
    exact = {t.name: t for t in graph.initializer if precision == "bf16" and t.data_type == _FLOAT}
    exact = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in exact.items()}
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
    import onnx

    constants = {t.name: t for t in graph.initializer if t.data_type == _FLOAT}
    shared = {name for node in graph.node if node.name not in fp32 for name in node.input}
    copied = set()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if node.name in fp32 and name in constants and name in shared:
                node.input[place] = f"{name}_fp32"
                copied.add(name)
    for name in sorted(copied):
        copy = onnx.TensorProto()
        copy.CopyFrom(constants[name])
        copy.name = f"{name}_fp32"
        graph.initializer.append(copy)


def _cast_to(node: Any) -> int:
    """The type a Cast makes; 0 for other nodes."""
    if node.op_type != "Cast":
        return 0
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _join(graph: Any, own: Set[str]) -> None:
    """Take out casts down to fp16 and up again, and casts made twice, that are not the graph's own.

    Args:
        graph: as the converter left it; changed in place.
        own: names of the nodes it had before.
    """
    added = [node for node in graph.node if node.name not in own]
    behind = {node.output[0]: node.input[0] for node in added if _cast_to(node) == _FLOAT16}
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    made: set[str] = set()
    dropped = set()
    for node in added:
        if _cast_to(node) != _FLOAT:
            continue
        before = behind.get(node.input[0])
        if before is not None and node.output[0] in outputs:
            renamed[before] = node.output[0]
        elif before is not None:
            renamed[node.output[0]] = before
        if before is not None or node.output[0] in made:
            dropped.add(id(node))
        made.add(node.output[0])
    # Two steps at most: a value behind an output's cast may have been renamed itself.
    final = {old: renamed.get(new, new) for old, new in renamed.items()}
    nodes = [node for node in graph.node if id(node) not in dropped]
    for node in nodes:
        node.input[:] = [final.get(name, name) for name in node.input]
        node.output[:] = [final.get(name, name) for name in node.output]
    read = {name for node in nodes for name in node.input} | outputs
    idle = {id(node) for node in nodes if node.name not in own and node.output[0] not in read}
    kept = [node for node in nodes if id(node) not in idle]
    del graph.node[:]
    graph.node.extend(kept)


def _to_bf16(graph: Any, exact: Mapping[str, NDArray[Any]]) -> None:
    """Make bf16 of all fp16; constants are rounded from `exact`, their fp32 values by name."""
    import ml_dtypes
    import onnx

    bf16 = FLOATS["bf16"].number
    for tensor in graph.initializer:
        if tensor.data_type == _FLOAT16:
            rounded = exact[tensor.name].astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(rounded, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == _FLOAT16:
                attribute.i = bf16
            if attribute.HasField("t") and attribute.t.data_type == _FLOAT16:
                value = onnx.numpy_helper.to_array(attribute.t).astype(ml_dtypes.bfloat16)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(value, attribute.t.name))
