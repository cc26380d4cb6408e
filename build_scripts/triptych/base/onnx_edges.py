"""Change the user's ONNX graph at its inputs and outputs into the form that a core has."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.base.onnx_graph import add_constant, all_nodes, bodies, free_mark, set_nodes


def to_served(model: Any) -> bool:
    """Change a graph in place, so that its inputs and outputs are those of a core.

    One number per row, ``[batch]``, becomes ``[batch, 1]``, as Triton has no batch of tensors
    without an axis.

    Args:
        model: An `onnx.ModelProto`.

    Returns:
        Whether the graph was changed.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    mark, changed = free_mark(graph), False
    for value in (*inputs, *graph.output):
        tensor = value.type.tensor_type
        if len(tensor.shape.dim) == 1:
            _add_axis(graph, value, mark, is_input=value in inputs)
            changed = True
    return changed


def _add_axis(graph: Any, value: Any, mark: str, *, is_input: bool) -> None:
    """Add an axis of size 1 to an input or output of one axis."""
    import onnx

    inner = f"{value.name}{mark}inner"
    _rename(graph, value.name, inner)
    names = (value.name, inner) if is_input else (inner, value.name)
    shape = add_constant(graph, f"{inner}/shape", np.array([-1] if is_input else [-1, 1]))
    node = onnx.helper.make_node("Reshape", [names[0], shape], [names[1]], name=f"{inner}/reshape")
    set_nodes(graph, [node, *graph.node] if is_input else [*graph.node, node])
    value.type.tensor_type.shape.dim.add().dim_value = 1


def _rename(graph: Any, old: str, new: str) -> None:
    """Rename a value in all nodes and subgraphs, but not among the inputs and outputs."""
    for node in all_nodes(graph.node):
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
        for value in (value for body in bodies(node) for value in body.output):
            if value.name == old:
                value.name = new
