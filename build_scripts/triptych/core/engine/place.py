"""Where in the model a node of its graph is, told by the parameters around it.

Exported nodes have numbers for names, but weights keep those of the modules they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from triptych.base.onnx_nodes import initializers, node_name, readers, reads


def place_of(graph: Any, node: str) -> str:
    """``after layer.3.output.dense``, or ``before`` it, of an `onnx.GraphProto`'s node.

    Named is the module of the nearest parameter that the node depends on, else of the nearest that
    comes after it; empty where there is none.
    """
    start = next((one for one in graph.node if node_name(one) == node), None)
    if start is None:
        return ""
    modules = {name: _module(name) for name in initializers(graph)}
    makers = {name: one for one in graph.node for name in one.output}
    users = readers(graph)

    def back(one: Any) -> Iterable[Any]:
        return (makers[name] for name in reads(one) if name in makers)

    def onwards(one: Any) -> Iterable[Any]:
        return (graph.node[place] for name in one.output for place in users.get(name, ()))

    for word, step in (("after", back), ("before", onwards)):
        if found := _nearest(start, step, modules):
            return f"{word} {found}"
    return ""


def _nearest(start: Any, step: Callable[[Any], Iterable[Any]], modules: Mapping[str, str]) -> str:
    """The module of the first parameter met, going from node to node, breadth first."""
    seen, front = {node_name(start)}, [start]
    while front:
        following = []
        for node in front:
            if found := next(filter(None, (modules.get(name) for name in reads(node))), ""):
                return found
            following += [one for one in step(node) if node_name(one) not in seen]
            seen |= {node_name(one) for one in following}
        front = following
    return ""


def _module(parameter: str) -> str:
    """Of ``a.b.weight``: ``a.b``; empty where the exporter named it by a number."""
    module, _, kind = parameter.rpartition(".")
    return module if kind in ("weight", "bias") else ""
