"""The matrix products of a parsed network: in which type each computes, and whether it was asked.

A strongly typed network computes a product in the type of its operands. One whose operands both
come from a dequantisation is computed on what they were quantised to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from triptych.base.errors import UserError
from triptych.core.engine.graph import onnx_nodes
from triptych.core.engine.request import Request

NAMED = 5
"""Layers that an error names."""

_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM", "ATTENTION_INPUT")
_SEEN_THROUGH = ("SHUFFLE", "IDENTITY", "SQUEEZE", "UNSQUEEZE")
_PRECISIONS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}


def check_products(
    network: Any, request: Request, fp32_products: Collection[str]
) -> dict[str, int]:
    """Count the products of a strongly typed `INetworkDefinition` by precision.

    Args:
        network: as the parser made it of the request's graph.
        request: with the precision that was planned.
        fp32_products: nodes that stay in fp32 on purpose, whatever the precision.

    Raises:
        UserError: some compute in fp32 that nobody meant to, in another type than their nodes
            have, or none in the precision planned.
    """
    wanted, precision = request.graph.products, request.plan.precision
    found = _precisions(network, wanted)
    wrong = [
        f"{node} ({kind} instead of {wanted.get(node, precision)})"
        for node, kind in found.items()
        if kind != wanted.get(node, kind)
    ]
    wrong += [
        f"{node} (fp32 instead of {precision})"
        for node, kind in found.items()
        if kind == wanted.get(node, kind) == "fp32" != precision and node not in fp32_products
    ]
    counts = dict(sorted(Counter(found.values()).items()))
    if found and not wrong and precision not in counts:
        wrong = [f"none of {len(found)} products is in {precision}"]
    if wrong:
        rest = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise UserError(
            "core.precision",
            f"must be {precision} in every matrix product that is not kept in fp32 on purpose",
            given=", ".join(wrong[:NAMED]) + rest,
            remedy="Run `triptych build` again; else take another core.precision, and report it",
        )
    return counts


def _precisions(network: Any, nodes: Mapping[str, str]) -> dict[str, str]:
    """Product to its precision, by the ONNX node where the network tells, else by its layer."""
    layers = [network.get_layer(place) for place in range(network.num_layers)]
    makers = {
        layer.get_output(place).name: layer
        for layer in layers
        for place in range(layer.num_outputs)
    }
    found: dict[str, str] = {}
    for layer in layers:
        if layer.type.name not in _PRODUCTS:
            continue
        operands = [layer.get_input(place) for place in range(min(layer.num_inputs, 2))]
        kinds = {_precision(operand, makers) for operand in operands if operand is not None}
        if not kinds & {*_PRECISIONS.values()}:  # whole numbers: no precision to speak of
            continue
        names = (*onnx_nodes(layer.metadata or ""), layer.name)
        node = next((name for name in names if name in nodes), layer.name)
        kind = kinds.pop() if len(kinds) == 1 else _widest(operands)
        # A node may become several products, as that of attention does: the widest one counts.
        found[node] = "fp32" if found.get(node) == "fp32" else kind
    return found


def _precision(tensor: Any, makers: Mapping[str, Any]) -> str:
    """Of an operand: what it was quantised to, else its own type; empty if it is no such type."""
    name = tensor.name
    while (maker := makers.get(name)) is not None and maker.type.name in _SEEN_THROUGH:
        name = maker.get_input(0).name
    if maker is not None and maker.type.name == "DEQUANTIZE":
        return _PRECISIONS.get(maker.get_input(0).dtype.name, "")
    return _PRECISIONS.get(tensor.dtype.name, "")


def _widest(operands: list[Any]) -> str:
    """Where only one operand is quantised, or both differently: the type both come in."""
    kinds = [_PRECISIONS.get(operand.dtype.name, "") for operand in operands]
    return "fp32" if "fp32" in kinds else kinds[0]
