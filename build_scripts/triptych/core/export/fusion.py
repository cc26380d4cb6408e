"""Fewer and larger operators for ONNX Runtime, some of them its own (com.microsoft).

onnxscript joins an addition with the normalization or GELU behind it. The rest is about what the
packed layout has and such tools do not know: linear layers that read the same value become one,
padded rows are gathered once for queries, keys and values, embeddings of padded rows are looked up,
added and normalized at once, and the axis of size 1 in front of the tokens is left out.

Each step is exact or changes the order of additions. It applies where all of its conditions hold,
and leaves the rest of the graph as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.onnx_graph import (
    MICROSOFT,
    add_constant,
    drop_unused,
    initializers,
    readers,
    set_nodes,
    value_of,
)
from triptych.core.export.places import PADDED_IDS, POSITIONS, SPREAD

if TYPE_CHECKING:
    import onnx
    from onnxscript import ir

    from triptych.base.arrays import Array

_INDICES = (PADDED_IDS.name, POSITIONS.name)
_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Identity"))
_BY_TOKEN = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "Less", "Equal", "And"),
        *("Erf", "Tanh", "Sigmoid", "Sqrt", "Neg", "Cast", "Gelu", "BiasGelu", "FastGelu"),
        *("MatMul", "LayerNormalization", "SkipLayerNormalization", "Relu", "Softmax"),
        *("RMSNormalization", "SimplifiedLayerNormalization"),
    }
)
"""Operators that compute each token for itself, along the last axis."""


def join_operators(model: ir.Model) -> None:
    """Join additions with the normalizations and GELUs behind them, in place.

    Args:
        model: An `onnx_ir.Model` with the shapes of its values.
    """
    from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
    from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
    from onnxscript.rewriter.ort_fusions.gelu import fuse_gelu
    from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization

    for fuse in (fuse_skip_layer_normalization, fuse_erfgelu, fuse_gelu, fuse_bias_gelu):
        fuse(model)


def sizes_of_values(model: ir.Model) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes of the values of an `onnx_ir.Model`.

    One that varies is a text, and one that is not known a text of its own.
    """
    return {
        value.name: tuple(
            size if isinstance(size, int) else str(size.value or f"{value.name}.{axis}")
            for axis, size in enumerate(value.shape)
        )
        for node in model.graph
        for value in node.outputs
        if value.shape is not None
    }


class RewrittenGraph:
    """Graph that is rewritten in place.

    Args:
        proto: An `onnx.GraphProto`.
        shapes: Sizes of values by name; an axis that varies is a string.
    """

    def __init__(self, proto: onnx.GraphProto, shapes: Mapping[str, Sequence[int | str]]) -> None:
        self.proto = proto
        self.shapes = dict(shapes)
        for value in proto.input:
            axes = value.type.tensor_type.shape.dim
            self.shapes[value.name] = tuple(axis.dim_param or axis.dim_value for axis in axes)

    def update(self) -> None:
        """Find producers and readers again, and remove nodes that nothing reads."""
        outputs = {value.name for value in self.proto.output}
        while True:
            self.constants = initializers(self.proto)
            self.shapes |= {name: tuple(one.dims) for name, one in self.constants.items()}
            self.readers = readers(self.proto)
            read = outputs | self.readers.keys()
            nodes = [node for node in self.proto.node if read.intersection(node.output)]
            if len(nodes) == len(self.proto.node):
                break
            set_nodes(self.proto, nodes)
        self.producers = {name: node for node in self.proto.node for name in node.output if name}

    def rank(self, name: str) -> int:
        """Return the number of axes of a value; -1 if it is not known."""
        shape = self.shapes.get(name)
        return -1 if shape is None else len(shape)

    def constant(self, name: str) -> Array:
        """Return the value of an initializer."""
        return value_of(self.constants[name])

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that alone reads a value; None if there are others, or none."""
        places = self.readers.get(name, [])
        if len(places) != 1 or name in {value.name for value in self.proto.output}:
            return None
        node: onnx.NodeProto = self.proto.node[places[0]]
        return node

    def behind_views(self, name: str) -> str:
        """Return the value of which `name` is the same elements in another shape."""
        while (node := self.producers.get(name)) is not None and node.op_type in _VIEWS:
            name = node.input[0]
        return name

    def replace(self, changes: Mapping[int, Sequence[onnx.NodeProto]]) -> None:
        """Replace nodes by others; the key is the `id` of a node."""
        nodes: list[onnx.NodeProto] = []
        for node in list(self.proto.node):
            nodes += changes.get(id(node), [node])
        set_nodes(self.proto, [_copy(node) for node in nodes])


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def rewrite(proto: onnx.GraphProto, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Rewrite the graph of a core with gathered rows for ONNX Runtime, in place.

    Args:
        proto: An `onnx.ModelProto` with the nodes of `places.compute_places`.
        shapes: Sizes of values by name; an axis that varies is a string.
    """
    graph = RewrittenGraph(proto.graph, shapes)
    steps = (
        _drop_unread_outputs,
        _drop_views,
        _use_indices,
        _use_one_row,
        _embed,
        merge_linears,
        _gather_once,
        _drop_first_axis,
        _pool,
    )
    for step in steps:
        graph.update()
        step(graph)
    graph.update()
    drop_unused(proto.graph)


def _drop_unread_outputs(graph: RewrittenGraph) -> None:
    """Leave out optional results that nothing reads: kernels compute those that are named."""
    for node in graph.proto.node:
        if node.domain == MICROSOFT:
            while len(node.output) > 1 and node.output[-1] not in graph.readers:
                node.output.pop()
            for place, name in enumerate(node.output):
                if place and name not in graph.readers:
                    node.output[place] = ""


def _drop_views(graph: RewrittenGraph) -> None:
    """Read a value directly where several changes of its shape restore it."""
    for node in graph.proto.node:
        for place, name in enumerate(node.input):
            shape, source = graph.shapes.get(name), name
            while (made := graph.producers.get(source)) is not None and made.op_type in _VIEWS:
                source = made.input[0]
                if shape is not None and _is_same(shape, graph.shapes.get(source, ())):
                    node.input[place] = source
        if node.op_type == "Less" and graph.rank(node.input[1]) == 2:
            made = graph.producers.get(node.input[0])
            if made is not None and _is_view(graph, made, "Unsqueeze", 0):
                node.input[0] = made.input[0]  # the operator adds axes in front by itself


def _is_same(shape: Sequence[int | str], other: Sequence[int | str]) -> bool:
    """Check that two shapes of the same elements are equal: then at most one size is unknown."""
    return len(shape) == len(other) and sum(map(operator.ne, shape, other)) <= 1


def _use_indices(graph: RewrittenGraph) -> None:
    """Look up by the INT32 indices of `places` themselves."""
    for node in graph.proto.node:
        made = graph.producers.get(node.input[1]) if node.op_type == "Gather" else None
        source = made.input[0] if made is not None and made.op_type == "Cast" else ""
        if graph.behind_views(source) in _INDICES:
            node.input[1] = source


def _use_one_row(graph: RewrittenGraph) -> None:
    """Add one row of a table of embeddings where all indices are one number."""
    numbers: dict[str, int] = {}
    for node in graph.proto.node:
        first = node.input[0] if node.input else ""
        if node.op_type == "Expand" and graph.rank(first) == 0 and first in graph.constants:
            numbers[node.output[0]] = int(graph.constant(first))
        elif node.op_type in _VIEWS and first in numbers:
            numbers[node.output[0]] = numbers[first]
        number = numbers.get(node.input[1]) if node.op_type == "Gather" else None
        if number is None or first not in graph.constants or graph.rank(first) != 2:
            continue
        row = add_constant(graph.proto, f"{node.output[0]}.row", graph.constant(first)[number])
        for place in graph.readers.get(node.output[0], []):
            reader = graph.proto.node[place]
            if reader.op_type == "Add":
                reader.input[:] = [row if name == node.output[0] else name for name in reader.input]


def _embed(graph: RewrittenGraph) -> None:
    """Look up, add and normalize the embeddings of padded rows by one node."""
    from onnx import helper

    changes = {}
    for node in graph.proto.node:
        if node.op_type != "LayerNormalization" or len(node.input) < 3:
            continue
        found: dict[str, str] = {}
        terms = _terms(graph, node.input[0])
        for leaf in terms:
            made = graph.producers.get(leaf)
            if leaf in graph.constants and graph.rank(leaf) == 1:
                found["row"] = leaf
            elif made is not None and made.op_type == "Gather" and made.input[0] in graph.constants:
                found[graph.behind_views(made.input[1])] = made.input[0]
            else:
                found["other"] = leaf
        if found.keys() - {"row"} != set(_INDICES) or len(found) < len(terms):
            continue
        table = found[POSITIONS.name]
        if "row" in found:
            both = graph.constant(table) + graph.constant(found["row"])
            table = add_constant(graph.proto, f"{table}.sum", both)
        inputs = [PADDED_IDS.name, "", found[PADDED_IDS.name], table, "", *node.input[1:3]]
        epsilon = {a.name: a.f for a in node.attribute if a.name == "epsilon"}
        changes[id(node)] = [
            helper.make_node(
                "EmbedLayerNormalization",
                inputs,
                [*node.output[:1], f"{node.output[0]}.mask"],
                name=node.name,
                domain=MICROSOFT,
                **epsilon,
            )
        ]
    graph.replace(changes)


def _terms(graph: RewrittenGraph, name: str) -> list[str]:
    """Return the terms of a sum whose parts nothing else reads."""
    node = graph.producers.get(name)
    if node is None or node.op_type != "Add" or graph.only_reader(name) is None:
        return [name]
    return [term for part in node.input for term in _terms(graph, part)]


def merge_linears(graph: RewrittenGraph) -> None:
    """Compute linear layers that read the same value by one product, whose columns are split."""
    from onnx import helper

    groups: dict[str, list[tuple[onnx.NodeProto, onnx.NodeProto | None]]] = {}
    for node in graph.proto.node:
        weight = graph.constants.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or len(weight.dims) != 2:
            continue
        adder = graph.only_reader(node.output[0])
        if adder is not None and graph.shapes.get(_bias(graph, adder)) != (weight.dims[1],):
            adder = None
        groups.setdefault(node.input[0], []).append((node, adder))
    changes: dict[int, list[onnx.NodeProto]] = {}
    for value, layers in groups.items():
        with_bias = [adder for _, adder in layers if adder is not None]
        if len(layers) < 2 or len(with_bias) not in (0, len(layers)):
            continue
        weights = [graph.constant(node.input[1]) for node, _ in layers]
        ends = [(adder or node).output[0] for node, adder in layers]
        name = layers[0][0].output[0]
        columns = np.array([weight.shape[1] for weight in weights], np.int64)
        joined = add_constant(graph.proto, f"{name}.joined", np.concatenate(weights, 1))
        sizes = add_constant(graph.proto, f"{name}.columns", columns)
        shape = graph.shapes.get(ends[0])
        product = f"{name}.product"
        nodes = [helper.make_node("MatMul", [value, joined], [product], name=product)]
        if with_bias:
            biases = [graph.constant(_bias(graph, adder)) for adder in with_bias]
            bias = add_constant(graph.proto, f"{name}.biases", np.concatenate(biases))
            nodes.append(helper.make_node("Add", [product, bias], [f"{name}.sum"], f"{name}.sum"))
        result = nodes[-1].output[0]
        nodes.append(helper.make_node("Split", [result, sizes], ends, f"{name}.split", axis=-1))
        if shape is not None:
            for new in (product, result):
                graph.shapes[new] = (*shape[:-1], int(columns.sum()))
        for node, adder in layers:
            changes |= {id(one): [] for one in (node, adder) if one is not None}
        changes[id(layers[0][0])] = nodes
    graph.replace(changes)


def _bias(graph: RewrittenGraph, adder: onnx.NodeProto) -> str:
    """Return the vector of weights that an addition adds; empty if it adds something else."""
    found = [name for name in adder.input if name in graph.constants]
    is_vector = adder.op_type == "Add" and len(found) == 1 and graph.rank(found[0]) == 1
    return found[0] if is_vector else ""


def _gather_once(graph: RewrittenGraph) -> None:
    """Gather padded rows of queries, keys and values before they are split; add biases within."""
    from onnx import helper

    changes: dict[int, list[onnx.NodeProto]] = {}
    for node in graph.proto.node:
        if node.op_type != "MultiHeadAttention":
            continue
        split = _split_of(graph, node.input[:3])
        if split is None:
            continue
        value, bias = split.input[0], ""
        adder = graph.producers.get(value)
        if adder is not None and graph.only_reader(value) is not None:
            bias = _bias(graph, adder)
            value = next((name for name in adder.input if bias and name != bias), value)
        flat, rows = f"{value}.tokens", f"{value}.rows"
        axes = add_constant(graph.proto, f"{value}.axis", np.array([0], np.int64))
        parts = [f"{value}.{part}" for part in "qkv"]
        node.input[:3] = parts
        if bias:
            node.input[3] = bias
        changes[id(node)] = [
            helper.make_node("Squeeze", [value, axes], [flat], flat),
            helper.make_node("Gather", [flat, SPREAD.name], [rows], rows, axis=0),
            helper.make_node("Split", [rows, split.input[1]], parts, f"{rows}.split", axis=-1),
            _copy(node),
        ]
        graph.shapes[flat] = graph.shapes[value][1:]
    graph.replace(changes)


def _split_of(graph: RewrittenGraph, names: Sequence[str]) -> onnx.NodeProto | None:
    """Return the Split whose results, in order, are gathered into these padded rows; else None."""
    sources = []
    for name in names:
        node = graph.producers.get(name)
        if node is None or node.op_type != "Gather" or node.input[1] != SPREAD.name:
            return None
        source = graph.behind_views(node.input[0])
        if graph.rank(node.input[0]) != 2:
            return None
        if graph.shapes[node.input[0]][-1:] != graph.shapes.get(source, ())[-1:]:
            return None
        sources.append(source)
    split = graph.producers.get(sources[0])
    is_all = split is not None and split.op_type == "Split" and list(split.output) == sources
    return split if is_all else None


class _Shortening:
    """Leaves out the axis of size 1 in front of packed tokens, where nodes compute by token."""

    def __init__(self, graph: RewrittenGraph) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []
        self._axes = add_constant(graph.proto, "shortened.axes", np.array([0], np.int64))
        self._short: dict[str, str] = {}
        self._made: set[str] = set()
        """Values that the graph has without their first axis alone, so far."""

    def has_axis(self, name: str) -> bool:
        """Check that a computed value has an axis of size 1 in front of at least two others."""
        shape = self.graph.shapes.get(name, ())
        return len(shape) > 2 and shape[0] == 1 and name not in self.graph.constants

    def applies(self, node: onnx.NodeProto) -> bool:
        """Check that a node computes the same without the first axis of its values."""
        if node.op_type not in _BY_TOKEN or not self.has_axis(node.output[0]):
            return False
        return all(
            not name
            or self.has_axis(name)
            or (name in self.graph.constants and self.graph.rank(name) <= 2)
            for name in node.input
        )

    def shorten(self, node: onnx.NodeProto) -> None:
        """Add a node that computes without the first axis."""
        new = _copy(node)
        new.input[:] = [self._shortened(name) for name in node.input]
        for place, name in enumerate(node.output):
            if name:
                new.output[place] = self._short[name] = f"{name}.short"
                self._made.add(name)
        self.nodes.append(new)

    def _shortened(self, name: str) -> str:
        from onnx import helper

        if not self.has_axis(name):
            return name
        if name not in self._short:
            made = self.graph.producers.get(name)
            if made is not None and _is_view(self.graph, made, "Unsqueeze", 0):
                self._short[name] = made.input[0]
            else:
                short = self._short[name] = f"{name}.short"
                self.nodes.append(helper.make_node("Squeeze", [name, self._axes], [short]))
        return str(self._short[name])

    def keep(self, node: onnx.NodeProto) -> None:
        """Add a node as it is, with the values that it reads."""
        from onnx import helper

        first = node.input[0] if node.input else ""
        if first in self._short and _is_view(self.graph, node, "Squeeze", 0):
            pair = [self._short[first]], list(node.output)
            self.nodes.append(helper.make_node("Identity", *pair))
            return
        for name in self._made.intersection(node.input):
            self._made.remove(name)
            pair = [self._short[name], self._axes], [name]
            self.nodes.append(helper.make_node("Unsqueeze", *pair))
        self.nodes.append(_copy(node))


def _drop_first_axis(graph: RewrittenGraph) -> None:
    """Leave out the axis of size 1 in front of packed tokens where nodes compute token by token."""
    shortening = _Shortening(graph)
    for node in graph.proto.node:
        if shortening.applies(node):
            shortening.shorten(node)
        else:
            shortening.keep(node)
    same = {n.output[0]: n.input[0] for n in shortening.nodes if n.op_type == "Identity"}
    for node in shortening.nodes:
        node.input[:] = [same.get(name, name) for name in node.input]
    set_nodes(graph.proto, shortening.nodes)


def _is_view(graph: RewrittenGraph, node: onnx.NodeProto, operator: str, axis: int) -> bool:
    """Check that a node adds or removes one axis of size 1, this one."""
    if node.op_type != operator or not graph.constants.keys() & node.input[1:]:
        return False
    return bool(np.ravel(graph.constant(node.input[1])).tolist() == [axis])


def _pool(graph: RewrittenGraph) -> None:
    """Sum the weighted tokens of padded rows by one node."""
    from onnx import helper

    changes: dict[int, list[onnx.NodeProto]] = {}
    for node in graph.proto.node:
        made = graph.producers.get(node.input[0]) if node.op_type == "MatMul" else None
        if made is None or not _is_view(graph, made, "Unsqueeze", 1):
            continue
        select = graph.only_reader(node.output[0])
        if graph.rank(made.input[0]) != 2 or select is None or select.op_type != "Gather":
            continue
        if select.input[1] not in graph.constants:
            continue
        index = graph.constant(select.input[1])
        axis = [a.i for a in select.attribute if a.name == "axis"]
        if index.ndim or index != 0 or axis != [1]:
            continue
        equation = helper.make_node(
            "Einsum",
            [made.input[0], node.input[1]],
            list(select.output),
            name=node.name,
            equation="bl,blh->bh",
        )
        changes |= {id(node): [], id(select): [equation]}
    graph.replace(changes)
