"""Small graphs with what converters trip over, each from ``x`` to ``y`` as `precision_cases`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper

from precision_cases import WIDTH, matrix, node, vectors


class Odd(NamedTuple):
    """A graph, and how many of its products can be quantized."""

    nodes: list[Any]
    constants: Mapping[str, Any]
    layers: int


FIRST, LAST, BIAS = matrix(1), matrix(2), vectors(1)[0]
TWO = {"first": FIRST, "last": LAST}


def _clash(name: str) -> Odd:
    """A constant with a name that looks like one the converters make."""
    nodes = [
        node("MatMul", "x first", "a"),
        node("Mul", f"a {name}", "b"),
        node("MatMul", "b last", "y"),
    ]
    return Odd(nodes, {**TWO, name: np.float32(2)}, 2)


def _branches() -> Odd:
    """An If whose bodies read a product and a layer's weight."""
    kept = helper.make_tensor_value_info
    multiply = helper.make_graph(
        [node("MatMul", "x first", "again"), node("Add", "again a", "then")],
        "then",
        [],
        [kept("then", TensorProto.FLOAT, None)],
    )
    pass_on = helper.make_graph(
        [node("Identity", "a", "else")], "else", [], [kept("else", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("MatMul", "x first", "a"),
        node("Add", "a bias", "b"),
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater", "sum zero", "above"),
        node("If", "above", "d", then_branch=multiply, else_branch=pass_on),
        node("Add", "b d", "y"),
    ]
    return Odd(nodes, {"first": FIRST, "bias": BIAS, "zero": np.float32(0)}, 1)


ODD: Mapping[str, Odd] = {
    "one weight, two layers": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Relu", "a", "b"),
            node("MatMul", "b first", "y"),
        ],
        {"first": FIRST},
        2,
    ),
    "one weight, once transposed": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Relu", "a", "b"),
            node("Gemm", "b first", "y", transB=1),
        ],
        {"first": FIRST},
        2,
    ),
    "a head tied by a Transpose": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Transpose", "first", "turned", perm=[1, 0]),
            node("MatMul", "a turned", "y"),
        ],
        {"first": FIRST},
        1,
    ),
    "a weight that is looked up as well": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Gather", "first place", "row"),
            node("Add", "a row", "y"),
        ],
        {"first": FIRST, "place": np.array(3)},
        1,
    ),
    "a weight of three axes": Odd(
        [
            node("MatMul", "x whole", "a"),
            node("Squeeze", "a axis", "b"),
            node("MatMul", "b last", "y"),
        ],
        {"whole": FIRST[None], "axis": np.array([0]), "last": LAST},
        1,
    ),
    "a bias that is computed": Odd(
        [
            node("Relu", "bias", "positive"),
            node("Gemm", "x first positive", "a"),
            node("MatMul", "a last", "y"),
        ],
        {**TWO, "bias": BIAS},
        1,
    ),
    "a bias of one number": Odd(
        [node("MatMul", "x first", "a"), node("Add", "a one", "y")],
        {"first": FIRST, "one": np.ones(1, np.float32)},
        1,
    ),
    "a bias of two axes": Odd(
        [node("Gemm", "x first wide", "y")], {"first": FIRST, "wide": BIAS[None]}, 1
    ),
    "a bias left empty": Odd(
        [helper.make_node("Gemm", ["x", "first", ""], ["y"], name="gemm")], {"first": FIRST}, 1
    ),
    "a product added to itself": Odd(
        [node("MatMul", "x first", "a"), node("Add", "a a", "y")], {"first": FIRST}, 1
    ),
    "a bias added after another layer": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Relu", "x", "b"),
            node("MatMul", "b last", "c"),
            node("Add", "a bias", "d"),
            node("Add", "c d", "y"),
        ],
        {**TWO, "bias": BIAS},
        2,
    ),
    "an input that a later layer shares": Odd(
        [
            node("MatMul", "x first", "a"),
            node("Relu", "a", "b"),
            node("MatMul", "x last", "c"),
            node("Add", "b c", "y"),
        ],
        TWO,
        2,
    ),
    "a weight on the left": Odd(
        [
            node("Transpose", "x", "turned", perm=[1, 0]),
            node("MatMul", "first turned", "a"),
            node("Transpose", "a", "b", perm=[1, 0]),
            node("MatMul", "b last", "y"),
        ],
        TWO,
        1,
    ),
    "a layer too small to gain": Odd(
        [
            node("MatMul", "x narrow", "a"),
            node("MatMul", "a wide", "b"),
            node("MatMul", "b last", "y"),
        ],
        {"narrow": matrix(3, WIDTH, 4), "wide": matrix(4, 4, WIDTH), "last": LAST},
        1,
    ),
    "bodies that read it": _branches(),
    **{f"a constant named {name}": _clash(name) for name in ("x/scale", "int8/zero", "a//fp8")},
}
"""By what is odd about it."""
