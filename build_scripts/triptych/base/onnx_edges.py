"""Change the user's ONNX graph at its inputs and outputs into the form that a core has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.onnx_graph import (
    FLOAT,
    HALVES,
    add_constant,
    all_nodes,
    bodies,
    free_mark,
    initializers,
    reads,
    set_nodes,
    value_of,
)

if TYPE_CHECKING:
    import onnx

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "stash_type", "softmax_precision")
LABELS = "triptych_labels"
"""Entry of the metadata of a graph: the texts of the labels of each output, as JSON."""
_NUMBERED = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
"""Attribute with the labels of a classifier, if they are numbers."""
_PASSED_ON = ("Identity", "Reshape", "Cast")
"""Operators between the labels and the output to which they belong."""
_BATCH = "batch"
"""Part of the name of an axis that is the batch, wherever it stands."""


def to_served(model: onnx.ModelProto) -> bool:
    """Change a graph in place, so that its inputs and outputs are those of a core.

    Numbers of 16 bits become FP32, in which the graph then computes. The batch becomes the first
    axis. One number per row, ``[batch]``, becomes ``[batch, 1]``, as Triton has no batch of tensors
    without an axis. The maps of a ZipMap become its scores, in the order of its labels. Labels of
    a classifier that are texts become their numbers; the texts are in the metadata, as `LABELS`.

    Args:
        model: An `onnx.ModelProto`, with or without the weights in a file beside it.

    Returns:
        Whether the graph was changed.
    """
    graph = model.graph
    changed = _drop_maps(graph) | _number_labels(model) | _widen(model)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    mark = free_mark(graph)
    if changed:
        set_nodes(graph, _sorted(graph))
    for value in (*inputs, *graph.output):
        names = [axis.dim_param.lower() for axis in value.type.tensor_type.shape.dim]
        place = next((index for index, name in enumerate(names) if _BATCH in name), 0)
        if len(names) == 1 or place:
            _change(graph, value, mark, place, is_input=value in inputs)
            changed = True
    return changed


def _change(
    graph: onnx.GraphProto, value: onnx.ValueInfoProto, mark: str, place: int, *, is_input: bool
) -> None:
    """Move the batch of an input or output to the front, or add an axis to a batch alone."""
    import onnx

    axes = value.type.tensor_type.shape.dim
    inner = f"{value.name}{mark}inner"
    _rename(graph, value.name, inner)
    source, target = (value.name, inner) if is_input else (inner, value.name)
    more = {"name": f"{inner}/edge"}
    if place:
        # From [batch, a, b] to [a, batch, b], or back.
        moved = [place, *(index for index in range(len(axes)) if index != place)]
        perm = np.argsort(moved) if is_input else moved
        node = onnx.helper.make_node("Transpose", [source], [target], perm=list(perm), **more)
        sizes = [type(axes[index]).FromString(axes[index].SerializeToString()) for index in moved]
        del axes[:]
        axes.extend(sizes)
    else:
        shape = add_constant(graph, f"{inner}/shape", np.array([-1] if is_input else [-1, 1]))
        node = onnx.helper.make_node("Reshape", [source, shape], [target], **more)
        axes.add().dim_value = 1
    set_nodes(graph, [node, *graph.node] if is_input else [*graph.node, node])


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value in all nodes and subgraphs, but not among the inputs and outputs."""
    for node in all_nodes(graph.node):
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
        for value in (value for body in bodies(node) for value in body.output):
            if value.name == old:
                value.name = new


def _drop_maps(graph: onnx.GraphProto) -> bool:
    """Replace each ZipMap by its scores; return whether there is one."""
    import onnx

    outputs, nodes = {value.name: value for value in graph.output}, list(graph.node)
    for index, node in enumerate(nodes):
        if node.op_type == "ZipMap":
            (name,) = node.output
            labels = max(len(each.ints) + len(each.strings) for each in node.attribute)
            nodes[index] = onnx.helper.make_node("Identity", node.input, [name], name=node.name)
            scores = onnx.helper.make_tensor_value_info(name, FLOAT, [_BATCH, labels])
            outputs[name].CopyFrom(scores)
    changed = nodes != list(graph.node)
    if changed:
        set_nodes(graph, nodes)
    return changed


def read_labels(metadata: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the texts of the labels of each output whose values are their numbers."""
    labels: dict[str, list[str]] = json.loads(metadata.get(LABELS, "{}"))
    return labels


def _number_labels(model: onnx.ModelProto) -> bool:
    """Replace labels that are texts by their numbers; return whether there are any."""
    import onnx

    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    constants = initializers(graph)
    labels = {}
    for value in graph.output:
        node, passed = makers.get(value.name), list[onnx.NodeProto]()
        while node is not None and node.op_type in _PASSED_ON:
            passed.append(node)
            node = makers.get(node.input[0])
        if value.type.tensor_type.elem_type != onnx.TensorProto.STRING or node is None:
            continue
        texts = next((each for each in node.attribute if each.name == "classlabels_strings"), None)
        table = constants.get(node.input[0])
        if texts is not None and node.op_type in _NUMBERED:
            found = list(texts.strings)
            node.attribute.remove(texts)
            numbered = onnx.helper.make_attribute(_NUMBERED[node.op_type], [*range(len(found))])
            node.attribute.append(numbered)
        elif node.op_type == "ArrayFeatureExtractor" and table is not None and table.string_data:
            found = list(table.string_data)
            numbers = np.arange(len(found)).reshape(tuple(table.dims))
            table.CopyFrom(onnx.numpy_helper.from_array(numbers, table.name))
        else:
            continue
        labels[value.name] = [text.decode() for text in found]
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
        for each in passed:
            for attribute in each.attribute:
                if each.op_type == "Cast" and attribute.name == "to":
                    attribute.i = onnx.TensorProto.INT64
        del graph.value_info[:]  # types of values between them
    if labels:
        model.metadata_props.add(key=LABELS, value=json.dumps(labels))
    return bool(labels)


def _widen(model: onnx.ModelProto) -> bool:
    """Make all numbers of 16 bits FP32; return whether there are any."""
    import onnx.inliner

    if len(model.functions):
        model.CopyFrom(onnx.inliner.inline_local_functions(model))
    changed = False
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            if tensor.elem_type in HALVES:
                tensor.elem_type, changed = FLOAT, True
        attributes = [each for node in graph.node for each in node.attribute]
        for each in attributes:
            if each.name in _TYPE_ATTRIBUTES and each.i in HALVES:
                each.i, changed = FLOAT, True
        for tensor in (*graph.initializer, *(each.t for each in attributes)):
            if tensor.data_type in HALVES:
                changed = True
                if onnx.external_data_helper.uses_external_data(tensor):
                    tensor.data_type = FLOAT  # the numbers were not read
                else:
                    wide = value_of(tensor).astype(np.float32)
                    tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
    return changed


def _sorted(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes after those whose results they read; converters append casts at the end."""
    # An output that is left out has an empty name.
    made = {name for node in graph.node for name in node.output if name}
    nodes: list[onnx.NodeProto] = []
    rest = list(graph.node)
    while rest:
        waiting = []
        for node in rest:
            if made.intersection(reads(node)):
                waiting.append(node)
            else:
                nodes.append(node)
                made.difference_update(node.output)
        if len(waiting) == len(rest):
            return [*nodes, *rest]  # a cycle, which the check of the graph reports
        rest = waiting
    return nodes


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those in its nodes."""
    yield graph
    for node in all_nodes(graph.node):
        yield from bodies(node)
