"""Linear layers of an ONNX graph, and the settings of a conversion."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.base.onnx_graph import FLOAT, initializers, readers
from triptych.spec.backends import Precision

if TYPE_CHECKING:
    import onnx

SMALLEST = 16
"""Minimum number of inputs and of outputs of a layer to quantize. Smaller layers gain nothing."""

_WRAPPERS = re.compile(r"^(?:compute\.)?(?:encoder\.)*(?=\w+\.)")
"""Prefix that this package's own modules put in front of the model's parameter names."""


@dataclass(frozen=True)
class Linear:
    """Linear layer ``y = x W + b``: one product node, and the node that adds the bias."""

    name: str  # Name of the torch module, if the graph has it; else the name of the node
    nodes: tuple[int, ...]  # Indices of the MatMul or Gemm, and of the Add of its bias
    input: str  # Name of x, FP32 ``[..., K]``
    output: str  # Name of y, FP32 ``[..., N]``
    weight: str  # Name of the weight's initializer
    transposed: bool  # Whether the initializer is ``[N, K]`` instead of ``[K, N]``
    bias: str  # Name of the bias' initializer; empty if there is no bias


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read the same value `input`, in the order of the graph.

    The layers of a group share the quantization of their input.
    """

    name: str
    input: str
    layers: tuple[Linear, ...]


def find_groups(graph: onnx.GraphProto) -> list[LinearGroup]:
    """Return the groups of linear layers of an `onnx.GraphProto`, in its order."""
    search = _Search(graph)
    found: dict[str, list[Linear]] = {}
    for index, node in enumerate(graph.node):
        linear = search.linear(index, node)
        if linear is not None:
            found.setdefault(linear.input, []).append(linear)
    groups: dict[str, LinearGroup] = {}
    for value, layers in found.items():
        name = _common_name([layer.name for layer in layers])
        while name in groups:  # the module runs twice
            name += "'"
        groups[name] = LinearGroup(name, value, tuple(layers))
    return list(groups.values())


class _Search:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._initializers = initializers(graph)
        self._readers = readers(graph)
        self._outputs = {output.name for output in graph.output}

    def linear(self, index: int, node: onnx.NodeProto) -> Linear | None:
        """Return the layer whose MatMul or Gemm is `node`; None if it is not one."""
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

    def _multiplies_a_weight(self, node: onnx.NodeProto) -> bool:
        """Check that the node multiplies by a stored FP32 matrix of sufficient size.

        A transposed embedding is not a stored matrix. It scores a vocabulary for few rows at a
        time, and a quantized copy of it would be stored in addition.
        """
        if node.op_type not in ("MatMul", "Gemm"):
            return False
        weight = self._initializers.get(node.input[1])
        if weight is None or weight.data_type != FLOAT:
            return False
        return len(weight.dims) == 2 and min(weight.dims) >= SMALLEST

    def _bias_adder(self, product: str) -> tuple[int, str] | None:
        """Return the node that adds a vector to `product`, and the vector.

        None if another node reads `product`.
        """
        users = self._readers.get(product, [])
        if len(users) != 1 or product in self._outputs:
            return None
        node = self._graph.node[users[0]]
        other = next((name for name in node.input if name in self._initializers), "")
        if node.op_type != "Add" or not other or len(self._initializers[other].dims) != 1:
            return None
        return users[0], other

    def _module(self, *parameters: str) -> str:
        """Return the module that one of `parameters` belongs to; empty if their names do not say.

        The exporter gives some initializers a number for a name, and merges equal ones.
        """
        for name in parameters:
            module, _, kind = name.rpartition(".")
            if kind in ("bias", "weight") and len(self._readers.get(name, ())) == 1:
                return _WRAPPERS.sub("", module)
        return ""


def _common_name(names: list[str]) -> str:
    """Return one name for several.

    ``a.query``, ``a.key`` and ``a.value`` give ``a.{query,key,value}``.
    """
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
    """Settings of a conversion."""

    precision: Precision  # Target precision
    # Layers that stay in higher precision, by the names of `Conversion.layers`.
    kept: tuple[str, ...] = ()
    backend: str = "onnxruntime"  # Triton's name of the backend that runs the graph
    device: str = "cpu"  # ``cpu`` or ``gpu``


def check_kept(recipe: Recipe, known: Collection[str]) -> None:
    """Raise a UserError unless every excluded layer of the recipe is in `known`."""
    unknown = [name for name in recipe.kept if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=3) or list(known)[:3]
        raise UserError(
            "core.precision",
            f"names a layer to exclude from {recipe.precision} that the graph does not have",
            given=unknown[0],
            remedy=f"Name one of its layers, such as {', '.join(near)}" if near else "Exclude none",
        )


def check_quantizable(recipe: Recipe, layers: Collection[str], feeds: Sequence[object]) -> None:
    """Check that a graph with these linear layers can be quantized with the recipe.

    Raises:
        UserError: There is no layer, no calibration row, or an excluded layer does not exist.
    """
    if not layers:
        raise UserError(
            "core.precision",
            "is not supported for this model",
            given=f"{recipe.precision}, but no linear layer has {SMALLEST} inputs and outputs",
            remedy="Set core.precision to fp16 or fp32",
        )
    if not feeds:
        raise UserError(
            "traffic.jsonl",
            f"has no rows left to calibrate {recipe.precision} with",
            given="all rows are used by the gate",
            remedy="Add real requests, or set core.precision to fp16 or fp32",
        )
    check_kept(recipe, layers)
