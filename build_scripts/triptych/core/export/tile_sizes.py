"""Sizes that a packed graph computes for each batch: longest row, queries per tile, tiles.

The model is exported with three inputs ``longest [L]``, ``tile [W]`` and ``tiles [N]``, of which
the graph only reads the shapes (see `packing`). This module turns them into outputs of a few
operators at the graph's beginning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.base.tensors import LONGEST, Tensor
from triptych.runtime.packed_rows import MULTIPLE

TILE = Tensor("tile", "INT32", ("tile",))
TILES = Tensor("tiles", "INT32", ("tiles",))
SIZES = (LONGEST, TILE, TILES)

TILE_OVERHEAD = 16
"""Time to gather the keys and values of a tile, as a number of queries. Measured on a CPU with
AVX-512: gathering a key of 384 elements takes 0.3 to 0.4 us, and each query 25 ns."""

TENSORRT_TILE = 64
"""Number of queries in a tile for TensorRT, which cannot choose it for each batch."""


def compute_from_values(model: Any, max_length: int) -> None:
    """Compute the sizes from the values of ``row_length``, for ONNX Runtime.

    The candidates for W are powers of two and the longest row. For each, N is the sum over the rows
    of ``ceil(length / W)``, and the estimated time is ``N * (W + TILE_OVERHEAD)``. The candidate
    with the smallest time is used: one long row among many short ones is cut into tiles of their
    length.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
        max_length: Maximum number of tokens of a row.
    """
    from onnx import helper, numpy_helper

    sizes = [MULTIPLE]
    while sizes[-1] * 2 < max_length:
        sizes.append(sizes[-1] * 2)
    constants = {
        "one": np.array([1], np.int32),
        "less": np.array([MULTIPLE - 1], np.int32),
        "multiple": np.array([MULTIPLE], np.int32),
        "powers": np.array(sizes, np.int32),
        "overhead": np.array([TILE_OVERHEAD], np.int32),
        "first_axis": np.array([0], np.int64),
    }
    steps: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
        ("ReduceMax", ["row_length"], ["most"], {"keepdims": 0}),
        ("Max", ["most", "one"], ["most_or_one"], {}),
        ("Add", ["most_or_one", "less"], ["raised"], {}),
        ("Div", ["raised", "multiple"], ["blocks"], {}),
        ("Mul", ["blocks", "multiple"], ["longest_size"], {}),
        ("Min", ["powers", "longest_size"], ["powers_within"], {}),
        ("Concat", ["powers_within", "longest_size"], ["choices"], {"axis": 0}),
        ("Sub", ["choices", "one"], ["choices_less_one"], {}),
        ("Max", ["row_length", "one"], ["row_or_one"], {}),
        ("Add", ["row_or_one", "choices_less_one"], ["raised_rows"], {}),
        ("Div", ["raised_rows", "choices"], ["tiles_of_rows"], {}),
        ("ReduceSum", ["tiles_of_rows", "first_axis"], ["tiles_of_choices"], {"keepdims": 0}),
        ("Add", ["choices", "overhead"], ["time_of_tile"], {}),
        ("Mul", ["tiles_of_choices", "time_of_tile"], ["time"], {}),
        ("ArgMin", ["time"], ["best"], {"axis": 0, "keepdims": 1}),
        ("Gather", ["choices", "best"], ["tile_size"], {}),
        ("Gather", ["tiles_of_choices", "best"], ["tiles_size"], {}),
    ]
    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    for tensor in SIZES:
        wide = f"{tensor.name}_shape"
        steps += [
            ("Cast", [f"{tensor.name}_size"], [wide], {"to": 7}),
            ("ConstantOfShape", [wide], [tensor.name], {"value": nothing}),
        ]
    known = {value.name for value in model.graph.input} | {tensor.name for tensor in SIZES}
    inside = {name: f"sizes.{name}" for name in constants}
    inside |= {name: f"sizes.{name}" for _, _, outputs, _ in steps for name in outputs}
    inside |= {name: name for name in known}
    nodes = [
        helper.make_node(
            operator,
            [inside[name] for name in inputs],
            [inside[name] for name in outputs],
            name=f"sizes.{index}.{operator}",
            **attributes,
        )
        for index, (operator, inputs, outputs, attributes) in enumerate(steps)
    ]
    _prepend(model, nodes, {inside[name]: value for name, value in constants.items()})


def compute_from_shapes(model: Any) -> None:
    """Compute the sizes from the shapes of inputs, for TensorRT.

    ``longest`` stays an input, which Triton provides. W is `TENSORRT_TILE`. N is ``T // W + B``,
    which is at least the number of tiles that the rows need.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
    """
    from onnx import helper, numpy_helper

    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    constants = {"sizes.tile": np.array([TENSORRT_TILE], np.int64)}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Shape", ["input_ids"], "sizes.tokens", {}),
        ("Shape", ["row_length"], "sizes.rows", {"start": 0, "end": 1}),
        ("Div", ["sizes.tokens", "sizes.tile"], "sizes.whole_tiles", {}),
        ("Add", ["sizes.whole_tiles", "sizes.rows"], "sizes.tiles", {}),
        ("ConstantOfShape", ["sizes.tile"], TILE.name, {"value": nothing}),
        ("ConstantOfShape", ["sizes.tiles"], TILES.name, {"value": nothing}),
    ]
    nodes = [
        helper.make_node(operator, inputs, [output], name=f"node.{output}", **attributes)
        for operator, inputs, output, attributes in steps
    ]
    _prepend(model, nodes, constants)


def _prepend(model: Any, nodes: list[Any], constants: dict[str, Any]) -> None:
    """Insert nodes before all others; values that the nodes compute are removed from the inputs."""
    from onnx import numpy_helper

    graph = model.graph
    computed = {name for node in nodes for name in node.output}
    inputs = [value for value in graph.input if value.name not in computed]
    old = list(graph.node)
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
