"""What the ONNX parser of a TensorRT takes, so that a graph is refused before a GPU is touched.

``operators.json`` records the parser's own support matrix, by major version of TensorRT: operators,
the element types each one is documented for, and the newest opset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.base.onnx_graph import all_nodes, node_name

_DATA = Path(__file__).with_name("operators.json")
_STANDARD = ("", "ai.onnx")
# TensorRT's name of an ONNX element type, where ONNX calls it otherwise.
_TYPE_NAMES = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "DOUBLE": "FP64",
    "FLOAT8E4M3FN": "FP8",
    "FLOAT4E2M1": "FP4",
}
# The input whose type an operator is documented by, where it is not the first.
_TYPED_INPUT = {"Where": 1, "OneHot": 2}
# Operators that are documented by the type they make.
_TYPED_BY_OUTPUT = ("Constant", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomUniform")
# A type of inputs and outputs alone, and what may read it there.
_EDGE_TYPE, _TAKE_EDGE_TYPE = "UINT8", ("Cast", "Shape", "Size")
# Quantization is symmetric: a zero point of other than zero is refused.
_QUANTIZATION = ("DequantizeLinear", "QuantizeLinear")
# Their outputs have other types than the input that they are documented by.
_CHECKED_OUTPUT = ("Cast", "DequantizeLinear", "QuantizeLinear")


@dataclass(frozen=True)
class Support:
    """What the parser of one major version takes.

    Attributes:
        tensorrt: the recorded release.
        opset: the newest opset it is documented for.
        types: element types that this TensorRT has.
        narrowed: element types that it turns into smaller ones.
        operators: operator to the element types it is documented for.
    """

    tensorrt: str
    opset: int
    types: frozenset[str]
    narrowed: Mapping[str, str]
    operators: Mapping[str, frozenset[str]]
    source: str


@dataclass(frozen=True)
class Refusal:
    """Something in a graph that a parser does not take.

    Attributes:
        node: name of the node, input or output; ``opset`` for the graph itself.
        operator: of the node; empty for the others.
        certain: the parser refuses it; else it is beyond what its documentation promises.
    """

    node: str
    operator: str
    reason: str
    certain: bool


@cache
def support_of(major: int) -> Support:
    """The record of one major version of TensorRT; a UserError where there is none."""
    records = json.loads(_DATA.read_text(encoding="utf-8"))
    if str(major) not in records:
        raise UserError(
            "tensorrt",
            "must be a major version whose parser is known",
            given=major,
            remedy=f"Known are {', '.join(records)}",
        )
    record = records[str(major)]
    operators = {
        operator: frozenset(types.split())
        for types, operators in record["operators"].items()
        for operator in operators.split()
    }
    types = frozenset(record["types"].split())
    return Support(**{**record, "types": types, "operators": operators})


def unsupported(model_path: Path, major: int) -> list[Refusal]:
    """What in the graph at `model_path` the parser of TensorRT `major` does not take.

    Element types are found by shape inference; a value without one is not judged.

    Raises:
        UserError: no parser of that major version is known.
    """
    import onnx

    support = support_of(major)
    model = onnx.load(str(model_path), load_external_data=False)
    functions = {(function.domain, function.name) for function in model.functions}
    refused = [*_opset_refusals(model, support), *_edge_refusals(model.graph, support)]
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    types = _value_types(model)
    # Constants stored in the file that are not zero throughout.
    shifted = {t.name for t in model.graph.initializer if any(t.int32_data) or any(t.raw_data)}
    for node in (node for body in bodies for node in all_nodes(body)):
        if (node.domain, node.op_type) not in functions:
            refused += _node_refusals(node, types, support)
            if node.op_type in _QUANTIZATION and shifted & {*node.input[2:]}:
                reason = "a zero point is not zero: quantization must be symmetric"
                refused.append(Refusal(node_name(node), node.op_type, reason, certain=True))
    return refused


def _opset_refusals(model: Any, support: Support) -> Iterator[Refusal]:
    opset = max((o.version for o in model.opset_import if o.domain in _STANDARD), default=0)
    if opset > support.opset:
        reason = f"opset {opset}, TensorRT {support.tensorrt} is documented up to {support.opset}"
        yield Refusal("opset", "", reason, certain=False)
    if model.functions and support.tensorrt.startswith("8."):
        names = ", ".join(sorted(function.name for function in model.functions))
        yield Refusal(names, "", "local functions need TensorRT 10", certain=True)


def _edge_refusals(graph: Any, support: Support) -> Iterator[Refusal]:
    """Inputs and outputs keep their type, or the config would no longer name it."""
    weights = {tensor.name for tensor in graph.initializer}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            held = _type_name(value.type.tensor_type.elem_type)
            if value.name in weights or held in support.types:
                continue
            smaller = support.narrowed.get(held)
            fate = f"becomes {smaller}" if smaller else "does not exist"
            yield Refusal(
                value.name, "", f"{kind} {held} {fate} in TensorRT {support.tensorrt}", certain=True
            )


def _node_refusals(node: Any, types: Mapping[str, str], support: Support) -> Iterator[Refusal]:
    name = node_name(node)
    allowed = support.operators.get(node.op_type) if node.domain in _STANDARD else None
    if allowed is None:
        operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        reason = f"operator {operator} is not in TensorRT {support.tensorrt}"
        yield Refusal(name, node.op_type, reason, certain=True)
        return
    found = [types.get(value, "") for value in _typed_values(node)]
    lacking = sorted(
        {held for held in found if held and not {held, support.narrowed.get(held)} & support.types}
    )
    if lacking:
        reason = f"type {', '.join(lacking)} does not exist in TensorRT {support.tensorrt}"
        yield Refusal(name, node.op_type, reason, certain=True)
        return
    judged = support.narrowed.get(found[0], found[0]) if found else ""
    if judged == _EDGE_TYPE and node.op_type not in _TAKE_EDGE_TYPE:
        reason = f"{_EDGE_TYPE} is for inputs and outputs in TensorRT {support.tensorrt}"
        yield Refusal(name, node.op_type, f"{reason}: cast it before {node.op_type}", certain=True)
    elif judged and judged not in allowed:
        reason = (
            f"{node.op_type} of {judged} is beyond what is documented for TensorRT "
            f"{support.tensorrt}: {', '.join(sorted(allowed))}"
        )
        yield Refusal(name, node.op_type, reason, certain=False)


def _typed_values(node: Any) -> list[str]:
    """The value an operator is documented by, then others whose type must exist at all."""
    place = _TYPED_INPUT.get(node.op_type, 0)
    by_output = node.op_type in _TYPED_BY_OUTPUT or len(node.input) <= place
    first = node.output[0] if by_output else node.input[place]
    return [first, *(node.output if node.op_type in _CHECKED_OUTPUT else ())]


def _value_types(model: Any) -> dict[str, str]:
    """Element type of every value that has one, by name."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {tensor.name: _type_name(tensor.data_type) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        found[value.name] = _type_name(value.type.tensor_type.elem_type)
    return found


def _type_name(elem_type: int) -> str:
    """TensorRT's name of an ONNX element type; empty when it is not known."""
    import onnx

    if not elem_type or elem_type not in onnx.TensorProto.DataType.values():
        return ""
    name = str(onnx.TensorProto.DataType.Name(elem_type))
    return _TYPE_NAMES.get(name, name)
