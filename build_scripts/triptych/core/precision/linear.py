"""Finds the linear layers of a graph: what a quantizer works on, and the names to speak of them.

What a conversion to any precision is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from triptych.base.errors import UserError
from triptych.base.onnx_graph import FLOAT, initializers, readers
from triptych.spec.fields import Precision

SMALLEST = 16
"""Fewest inputs and outputs of a layer worth quantizing: below, no kernel gains from it."""

_WRAPPERS = re.compile(r"^(?:compute\.)?(?:encoder\.)*(?=\w+\.)")
"""What our own modules put before the name that the model itself gives."""


@dataclass(frozen=True)
class Linear:
    """``y = x W + b``, as one node of the graph and the one that adds the bias.

    Attributes:
        name: of the module it comes from, as far as the graph knows it.
        nodes: the MatMul or Gemm, and the Add of its bias, by their indices.
        input: name of x, ``[..., K]``.
        output: name of y.
        weight: name of the initializer.
        transposed: whether the initializer is ``[N, K]``.
        bias: name of the bias' initializer; empty where there is none.
    """

    name: str
    nodes: tuple[int, ...]
    input: str
    output: str
    weight: str
    transposed: bool
    bias: str


@dataclass(frozen=True)
class LinearGroup:
    """The linear layers that read one value, `input`, in the order of the graph.

    They share its quantization.
    """

    name: str
    input: str
    layers: tuple[Linear, ...]


def find_groups(graph: Any) -> list[LinearGroup]:
    """The groups of linear layers of an `onnx.GraphProto`, in its order."""
    search = _Search(graph)
    found: dict[str, list[Linear]] = {}
    for index, node in enumerate(graph.node):
        linear = search.linear(index, node)
        if linear is not None:
            found.setdefault(linear.input, []).append(linear)
    groups: dict[str, LinearGroup] = {}
    for value, layers in found.items():
        name = _common_name([layer.name for layer in layers])
        while name in groups:  # a module that runs twice
            name += "'"
        groups[name] = LinearGroup(name, value, tuple(layers))
    return list(groups.values())


class _Search:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._initializers = initializers(graph)
        self._readers = readers(graph)
        self._outputs = {output.name for output in graph.output}

    def linear(self, index: int, node: Any) -> Linear | None:
        """The layer whose MatMul or Gemm `node` is; None where it is not one."""
        if not self._multiplies_a_weight(node):
            return None
        settings = {attribute.name: attribute for attribute in node.attribute}
        if any(settings[name].f != 1 for name in ("alpha", "beta") if name in settings):
            return None
        if "transA" in settings and settings["transA"].i:
            return None
        nodes: tuple[int, ...] = (index,)
        output, bias = node.output[0], ""
        if len(node.input) > 2:
            bias = node.input[2]
        elif (adder := self._bias_adder(output)) is not None:
            place, bias = adder
            nodes, output = (index, place), self._graph.node[place].output[0]
        if bias and bias not in self._initializers:
            return None
        return Linear(
            name=self._module(bias, node.input[1]) or str(node.name or node.output[0]),
            nodes=nodes,
            input=node.input[0],
            output=output,
            weight=node.input[1],
            transposed="transB" in settings and bool(settings["transB"].i),
            bias=bias,
        )

    def _multiplies_a_weight(self, node: Any) -> bool:
        """Whether the node multiplies by a stored matrix of a size worth it.

        A transposed embedding is not stored as one: it scores a vocabulary, few rows at a time,
        and would be stored a second time.
        """
        if node.op_type not in ("MatMul", "Gemm"):
            return False
        weight = self._initializers.get(node.input[1])
        if weight is None or weight.data_type != FLOAT:
            return False
        return len(weight.dims) == 2 and min(weight.dims) >= SMALLEST

    def _bias_adder(self, product: str) -> tuple[int, str] | None:
        """The node that adds a vector to `product`, and the vector, where nothing else reads it."""
        users = self._readers.get(product, [])
        if len(users) != 1 or product in self._outputs:
            return None
        node = self._graph.node[users[0]]
        other = next((name for name in node.input if name in self._initializers), "")
        if node.op_type != "Add" or not other or len(self._initializers[other].dims) != 1:
            return None
        return users[0], other

    def _module(self, *parameters: str) -> str:
        """The module that one of `parameters` belongs to; empty where their names do not tell.

        The exporter gives some initializers a number for a name, and merges equal ones.
        """
        for name in parameters:
            module, _, kind = name.rpartition(".")
            if kind in ("bias", "weight") and len(self._readers.get(name, ())) == 1:
                return _WRAPPERS.sub("", module)
        return ""


def _common_name(names: list[str]) -> str:
    """``a.query``, ``a.key`` and ``a.value`` as ``a.{query,key,value}``."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shared = next(
        (place for place, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1), 0
    )
    ends = ",".join(".".join(part[shared:]) for part in parts)
    return ".".join([*parts[0][:shared], f"{{{ends}}}"])


@dataclass(frozen=True)
class Recipe:
    """How to convert a graph.

    Attributes:
        precision: wanted.
        kept: layers that stay in higher precision, by the names `Conversion.layers` gives.
        backend: Triton's name of what will run the graph.
        device: where.
    """

    precision: Precision
    kept: tuple[str, ...] = ()
    backend: str = "onnxruntime"
    device: str = "cpu"


def check_kept(recipe: Recipe, known: Collection[str]) -> None:
    """Raise a UserError unless all that the recipe keeps is among the names in `known`."""
    unknown = [name for name in recipe.kept if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=3) or list(known)[:3]
        raise UserError(
            "core.precision",
            f"{recipe.precision} can only keep layers that the graph has",
            given=unknown[0],
            remedy=f"Name one of its layers, such as {', '.join(near)}" if near else "Keep none",
        )


def check_quantizable(recipe: Recipe, layers: Collection[str], feeds: Sequence[object]) -> None:
    """Check that a graph with these linear layers can be quantized as the recipe asks.

    Raises:
        UserError: there is no layer, no calibration row, or no such layer to keep.
    """
    if not layers:
        raise UserError(
            "core.precision",
            "must suit the model",
            given=f"{recipe.precision} for a graph without linear layers of a size worth it",
            remedy="Take fp16 or fp32",
        )
    if not feeds:
        raise UserError(
            "traffic.jsonl",
            f"must have rows to calibrate on for {recipe.precision}",
            given="no calibration rows beside those of the gate",
            remedy="Add real requests, or take fp16 or fp32",
        )
    check_kept(recipe, layers)
