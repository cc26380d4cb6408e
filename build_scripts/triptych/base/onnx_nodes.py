"""Reading and editing the nodes, initializers and names of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

OPSET = 19
"""The first whose QuantizeLinear and DequantizeLinear know fp8, and scales of 16 bits."""

PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "Einsum", "Attention"))
"""Operators whose type decides accuracy and speed: nearly all work of a model is in them."""


class Initializer(Protocol):
    """What is read of an `onnx.TensorProto` without its values."""

    name: str
    dims: Sequence[int]
    data_type: int


Initializers = Mapping[str, Initializer]


def initializers(graph: Any) -> dict[str, Initializer]:
    """By name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def value_of(tensor: Initializer) -> NDArray[Any]:
    import onnx

    value: NDArray[Any] = onnx.numpy_helper.to_array(tensor)
    return value


def add_constant(graph: Any, name: str, value: Any) -> str:
    """Add an initializer, last; returns its name."""
    import onnx

    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return name


def copy_model(model: Any) -> Any:
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def set_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    """Replace all nodes of a graph."""
    del graph.node[:]
    graph.node.extend(nodes)


def at_opset(model: Any) -> Any:
    """The graph, which is at opset 18 at least, with the operators of `OPSET`; changed in place.

    From 18 to 19 operators gained types and settings, and what they had means the same, so that
    the number is all there is to change.
    """
    declared = next(one for one in model.opset_import if not one.domain)
    declared.version = max(declared.version, OPSET)
    return model


def bodies(node: Any) -> Iterator[Any]:
    """The subgraphs of an If, a Loop or a Scan."""
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def all_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes, each followed by those of its subgraphs."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def node_name(node: Any) -> str:
    """Its name, or that of its first output if it has none."""
    return str(node.name or next(iter(node.output), ""))


def reads(node: Any) -> Iterator[str]:
    """The values a node reads, with all that its subgraphs name."""
    yield from node.input
    for body in bodies(node):
        for inner in body.node:
            yield from reads(inner)
        yield from (output.name for output in body.output)


def readers(graph: Any) -> dict[str, list[int]]:
    """Value to the indices of the nodes that read it, each once."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for name in dict.fromkeys(reads(node)):
            found.setdefault(name, []).append(index)
    return found


def drop_unused(graph: Any) -> None:
    """Take out the initializers that nothing reads any more, in place."""
    used = {name for node in graph.node for name in reads(node)}
    used |= {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def free_mark(graph: Any) -> str:
    """A separator that no name in the graph contains: names built with it are free."""
    taken = list(_names(graph))
    mark = "/"
    while any(mark in name for name in taken):
        mark += "/"
    return mark


def _names(graph: Any) -> Iterator[str]:
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from node.output
        for body in bodies(node):
            yield from _names(body)
