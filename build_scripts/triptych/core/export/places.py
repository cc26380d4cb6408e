"""Sizes and index tensors that a packed core computes once, as nodes in front of its graph.

See `packing` for the terms, and `packed_batch` for the sizes (`PackedBatch`) and the index tensors
(`GatheredBatch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.base.onnx_graph import drop_unused, set_nodes
from triptych.base.tensors import LONGEST, Tensor
from triptych.runtime.packing_spans import MULTIPLE

if TYPE_CHECKING:
    import onnx

    from triptych.base.arrays import Array

PADDED_IDS = Tensor("padded_ids", "INT32", ("rows", "longest"))
POSITIONS = Tensor("positions_in_row", "INT32", ("longest",))
SPREAD = Tensor("token_of_slot", "INT32", ("rows", "longest"))
WHERE = Tensor("slot_of_token", "INT64", ("row_tokens", 2))
PLACE_OF_TOKEN = Tensor("place_of_token", "INT64", ("row_tokens", 1))
PLACES = (PADDED_IDS, POSITIONS, SPREAD, WHERE, PLACE_OF_TOKEN)
"""Arguments of `packing.GatheredCore` after the lengths of the rows, with all their axes."""


Step = tuple[str, list[str], str, dict[str, Any]]
"""Operator, names of its operands and of its result, and its attributes."""


def compute_places(model: onnx.ModelProto) -> None:
    """Compute `PLACES` from the inputs of a packed core.

    A row without tokens gets a pad token, which its request or the next one has in its place.
    Numbers that count from the end of the tokens need no size of the batch: the sum of all strides
    from a row on is the distance of its first token from the end.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
    """
    constants: dict[str, Array] = {
        "zero": np.array(0, np.int32),
        "one": np.array(1, np.int32),
        "second_axis": np.array([1], np.int64),
        "axis": np.array(0, np.int64),
    }
    steps: list[Step] = [
        ("Max", ["row_length", "one"], "lengths", {}),
        ("CumSum", ["row_stride", "axis"], "strides_from_row", {"reverse": 1}),
        ("Unsqueeze", ["strides_from_row", "second_axis"], "strides_column", {}),
        ("Sub", ["row_offset", "strides_column"], "start", {}),
        ("ReduceMax", ["lengths"], "most", {"keepdims": 0}),
        ("Range", ["zero", "most", "one"], POSITIONS.name, {}),
        ("Add", ["start", POSITIONS.name], "place_of_slot", {}),
        ("Gather", ["input_ids", "place_of_slot"], PADDED_IDS.name, {}),
        ("Less", [POSITIONS.name, "lengths"], "inside", {}),
        ("NonZero", ["inside"], "found", {}),
        ("Transpose", ["found"], WHERE.name, {}),
        ("Cast", ["place_of_slot"], "wide_place", {"to": 7}),
        ("GatherND", ["wide_place", WHERE.name], "place", {}),
        ("Unsqueeze", ["place", "second_axis"], PLACE_OF_TOKEN.name, {}),
        ("CumSum", ["lengths", "axis"], "tokens_from_row", {"reverse": 1}),
        ("Sub", [POSITIONS.name, "tokens_from_row"], SPREAD.name, {}),
    ]
    _compute(model, "places", steps, constants, PLACES)
    drop_unused(model.graph)


TILE = Tensor("tile", "INT32", ("tile",))
TILES = Tensor("tiles", "INT32", ("tiles",))
SIZES = (LONGEST, TILE, TILES)

TILE_OVERHEAD = 16
"""Time to gather the keys and values of a tile, as a number of queries. Measured on a CPU with
AVX-512: gathering a key of 384 elements takes 0.3 to 0.4 us, and each query 25 ns."""

TENSORRT_TILE = 64
"""Number of queries in a tile for TensorRT, which cannot choose it for each batch."""


def compute_from_values(model: onnx.ModelProto, max_length: int) -> None:
    """Compute the sizes from the values of ``row_length``, for ONNX Runtime.

    The candidates for W are powers of two and the longest row. For each, N is the sum over the rows
    of ``ceil(length / W)``, and the estimated time is ``N * (W + TILE_OVERHEAD)``. The candidate
    with the smallest time is used: one long row among many short ones is cut into tiles of their
    length.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
        max_length: Maximum number of tokens of a row.
    """
    from onnx import numpy_helper

    sizes = [MULTIPLE]
    while sizes[-1] * 2 < max_length:
        sizes.append(sizes[-1] * 2)
    constants: dict[str, Array] = {
        "one": np.array([1], np.int32),
        "less": np.array([MULTIPLE - 1], np.int32),
        "multiple": np.array([MULTIPLE], np.int32),
        "powers": np.array(sizes, np.int32),
        "overhead": np.array([TILE_OVERHEAD], np.int32),
        "first_axis": np.array([0], np.int64),
    }
    steps: list[Step] = [
        ("ReduceMax", ["row_length"], "most", {"keepdims": 0}),
        ("Max", ["most", "one"], "most_or_one", {}),
        ("Add", ["most_or_one", "less"], "raised", {}),
        ("Div", ["raised", "multiple"], "blocks", {}),
        ("Mul", ["blocks", "multiple"], "longest_size", {}),
        ("Min", ["powers", "longest_size"], "powers_within", {}),
        ("Concat", ["powers_within", "longest_size"], "choices", {"axis": 0}),
        ("Sub", ["choices", "one"], "choices_less_one", {}),
        ("Max", ["row_length", "one"], "row_or_one", {}),
        ("Add", ["row_or_one", "choices_less_one"], "raised_rows", {}),
        ("Div", ["raised_rows", "choices"], "tiles_of_rows", {}),
        ("ReduceSum", ["tiles_of_rows", "first_axis"], "tiles_of_choices", {"keepdims": 0}),
        ("Add", ["choices", "overhead"], "time_of_tile", {}),
        ("Mul", ["tiles_of_choices", "time_of_tile"], "time", {}),
        ("ArgMin", ["time"], "best", {"axis": 0, "keepdims": 1}),
        ("Gather", ["choices", "best"], "tile_size", {}),
        ("Gather", ["tiles_of_choices", "best"], "tiles_size", {}),
    ]
    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    for tensor in SIZES:
        wide = f"{tensor.name}_shape"
        steps += [
            ("Cast", [f"{tensor.name}_size"], wide, {"to": 7}),
            ("ConstantOfShape", [wide], tensor.name, {"value": nothing}),
        ]
    _compute(model, "sizes", steps, constants, SIZES)


def compute_from_shapes(model: onnx.ModelProto) -> None:
    """Compute the sizes from the shapes of inputs, for TensorRT.

    ``longest`` stays an input, which Triton provides. W is `TENSORRT_TILE`. N is ``T // W + B``,
    which is at least the number of tiles that the rows need.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
    """
    from onnx import numpy_helper

    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    constants = {"tile_size": np.array([TENSORRT_TILE], np.int64)}
    steps: list[Step] = [
        ("Shape", ["input_ids"], "tokens", {}),
        ("Shape", ["row_length"], "rows", {"start": 0, "end": 1}),
        ("Div", ["tokens", "tile_size"], "whole_tiles", {}),
        ("Add", ["whole_tiles", "rows"], "tiles_size", {}),
        ("ConstantOfShape", ["tile_size"], TILE.name, {"value": nothing}),
        ("ConstantOfShape", ["tiles_size"], TILES.name, {"value": nothing}),
    ]
    _compute(model, "sizes", steps, constants, (TILE, TILES))


def _compute(
    model: onnx.ModelProto,
    prefix: str,
    steps: Sequence[Step],
    constants: Mapping[str, Array],
    results: Sequence[Tensor],
) -> None:
    """Insert steps before all other nodes; values that they compute are no inputs any more.

    Names but those of inputs and results get a prefix.
    """
    from onnx import helper, numpy_helper

    known = {value.name for value in model.graph.input} | {tensor.name for tensor in results}
    names = {name for _, operands, result, _ in steps for name in (*operands, result)}
    inside = {name: name if name in known else f"{prefix}.{name}" for name in names}
    nodes = [
        helper.make_node(
            operator,
            [inside[name] for name in operands],
            [inside[result]],
            name=f"{prefix}.{index}.{operator}",
            **attributes,
        )
        for index, (operator, operands, result, attributes) in enumerate(steps)
    ]
    graph = model.graph
    computed = {name for node in nodes for name in node.output}
    inputs = [value for value in graph.input if value.name not in computed]
    del graph.input[:]
    graph.input.extend(inputs)
    set_nodes(graph, [*nodes, *list(graph.node)])
    graph.initializer.extend(
        numpy_helper.from_array(value, inside[name]) for name, value in constants.items()
    )
