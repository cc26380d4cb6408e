"""A finished engine held against what was asked for: tensors, profiles, types of its products.

How the types are judged. Each product of matrices in the ONNX graph asks for a precision: that of
its operands, or what both were quantized to. The inspector names the kernels and, in their
metadata, the nodes each was built from. For a node:

- a kernel whose name spells its operand type (``…_f16f16_f16f32_…``) has that type;
- else a kernel that reads int8 or fp8 has that type, and one whose inputs all have one
  floating-point type has that, unless what it writes says that it converts on the way;
- a region fused around the node is a kernel like any other: tensors at its boundary prove a type
  if they agree, and nothing if they do not. fp32 all around proves nothing either where the region
  may convert within: one of Myelin's, or one with a Cast of the graph in it.

A node seen in another type than it asks for fails the build, and so does an engine in which none of
the products that ask for less than fp32 is seen in its type: an fp32 plan must not pass for a fast
one. Some not seen are no failure as long as others are: the network's types are binding (strong
typing, or on 8.6 constraints that the builder must obey). Where all are fused away, the plan's size
decides: nearer to the size of the graph's own weights than to that with the products' weights in
fp32, it cannot hold them as fp32. If it is not, the build fails.

The matrix products of a parsed network: in which type each computes, and whether it was asked.

A strongly typed network computes a product in the type of its operands. One whose operands both
come from a dequantization is computed on what they were quantized to.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from triptych.base.errors import UserError
from triptych.core.engine.graph import GraphValue, fused_layers, onnx_nodes
from triptych.core.engine.make import Request
from triptych.core.engine.runner import EngineTensor, OpenEngine
from triptych.spec.engine_plan import ShapeRange

NAMED = 5
"""Layers that an error names."""

_MOVING = ("reformat", "constant", "signal", "wait", "noop")
_TYPES = (
    (re.compile(r"bfloat16|bf16", re.I), "bf16"),
    (re.compile(r"fp8|e4m3|e5m2", re.I), "fp8"),
    (re.compile(r"fp16|half", re.I), "fp16"),
    (re.compile(r"fp32|float", re.I), "fp32"),
    (re.compile(r"(?<!u)int8", re.I), "int8"),
)
_OPERANDS = {
    **{"tf32": "tf32", "f32": "fp32", "f16": "fp16", "bf16": "bf16"},
    **{"i8": "int8", "s8": "int8", "e4m3": "fp8", "e5m2": "fp8"},
}
_PAIR = re.compile(r"(tf32|bf16|f32|f16|i8|s8|e4m3|e5m2)(?:f32|f16|bf16|i32|s32|i8|s8|e4m3|e5m2)")
_KERNEL = re.compile(r"gemm|matrix|matmul|conv|mha|attention|fullyconnected", re.I)
_REGION = re.compile(r"myelin|foreignnode", re.I)


class _InspectedLayer(TypedDict, total=False):
    """A layer in the inspector's JSON, as far as it is read here."""

    Name: str
    LayerType: str
    TacticName: str
    Metadata: str
    Inputs: list[Mapping[str, object]]
    Outputs: list[Mapping[str, object]]


@dataclass(frozen=True)
class Layer:
    """A layer of an engine, as the inspector describes it.

    Attributes:
        nodes: ONNX nodes it was built from.
        kernel: its type and its tactic.
        region: whether it is a region of many operators, which may convert types within.
        reads: floating-point and quantized types of its inputs, as `writes` of its outputs.
    """

    name: str
    nodes: tuple[str, ...]
    kernel: str
    region: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def precision(self) -> str:
        """The type its product is computed in; empty where that cannot be told."""
        pairs = [match[1] for part in self.kernel.split("_") if (match := _PAIR.fullmatch(part))]
        if pairs:
            return _OPERANDS[pairs[-1]]
        quantized = {kind for kind in self.reads if kind in ("int8", "fp8")}
        kinds = quantized or set(self.reads)
        if len(kinds) != 1:
            return ""
        (kind,) = kinds
        converts = self.region or set(self.writes) - {"fp32"}
        return "" if kind == "fp32" and converts else kind


@dataclass(frozen=True)
class Inspection:
    """What a finished engine is.

    Attributes:
        matmuls: precision to products seen in it, and ``unseen``.
        witness: what proves the precision: ``layers``, ``size``, or ``graph`` where it is fp32.
        profiles: as the engine has them, by input.
    """

    matmuls: Mapping[str, int]
    witness: str
    profiles: Sequence[Mapping[str, ShapeRange]]


def read_layers(information: str, casts: frozenset[str] = frozenset()) -> list[Layer]:
    """The layers in the JSON of `EngineInspector.get_engine_information`.

    8.6 and 10 describe a tensor by ``Format/Datatype``; 11 has ``Format`` and ``Datatype``.
    `casts` are the nodes of the graph that convert types.

    Raises:
        UserError: there are only names: the engine was not built with detailed information.
    """
    layers = json.loads(information).get("Layers", [])
    if not all(isinstance(layer, Mapping) for layer in layers):
        raise UserError(
            "model.plan",
            "must be built with detailed information on its layers",
            given="names of layers only",
            remedy="Build it with `triptych engine`",
        )
    return [
        _layer(layer, casts)
        for layer in layers
        if not str(layer.get("LayerType", "")).lower().startswith(_MOVING)
    ]


def inspect(opened: OpenEngine, request: Request, plan_bytes: int) -> Inspection:
    """Check an engine of a plan of `plan_bytes` bytes, on the release that built it.

    Raises:
        UserError: it is not what was asked for.
    """
    graph = request.graph
    _check_tensors("inputs", opened.inputs, graph.inputs)
    _check_tensors("outputs", opened.outputs, graph.outputs)
    _check_profiles(opened, request)
    inspector = opened.engine.create_engine_inspector()
    form = opened.trt.LayerInformationFormat.JSON
    layers = read_layers(inspector.get_engine_information(form), graph.casts)
    matmuls, witness = judge_products(layers, request, plan_bytes)
    return Inspection(matmuls, witness, opened.profiles)


def _check_tensors(
    kind: str, tensors: Iterable[EngineTensor], wanted: Mapping[str, GraphValue]
) -> None:
    """Names, types and shapes are those of the graph; TensorRT may know sizes that it does not."""
    found = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in tensors}
    right = {name: (value.dtype, value.dims) for name, value in wanted.items()}
    unlike = sorted(name for name in {*found, *right} if found.get(name) != right.get(name))
    known_sizes = set(found) == set(right) and all(
        found[name][0] == dtype
        and len(found[name][1]) == len(dims)
        and all(want in (-1, own) for own, want in zip(found[name][1], dims, strict=True))
        for name, (dtype, dims) in right.items()
    )
    if unlike and not known_sizes:
        name = unlike[0]
        raise UserError(
            "model.plan",
            f"must have the {kind} of model.onnx",
            given=f"{name}: {found.get(name)} instead of {right.get(name)}",
            remedy="Run `triptych build` and `triptych engine` again",
        )


def _check_profiles(opened: OpenEngine, request: Request) -> None:
    found, wanted = [dict(p) for p in opened.profiles], [dict(p) for p in request.plan.profiles]
    if found == wanted:
        return
    given = f"{len(found)} instead of {len(wanted)}"
    for place, (own, right) in enumerate(zip(found, wanted, strict=False)):
        unlike = [name for name in right if own.get(name) != right[name]]
        if unlike:
            given = f"profile {place}, {unlike[0]}: {own.get(unlike[0])}"
            break
    raise UserError(
        "model.plan",
        "must have the optimization profiles of the plan",
        given=given,
        remedy="Run `triptych engine` again; if that does not help, report it",
    )


def judge_products(
    layers: Iterable[Layer], request: Request, plan_bytes: int
) -> tuple[dict[str, int], str]:
    """Products by precision, and what proves it, as the module's docstring says.

    Raises:
        UserError: some have another precision than asked for, or nothing proves that they have it.
    """
    wanted = request.graph.products
    seen = _seen(layers, wanted)
    tf32 = bool(request.options["tf32"])
    wrong = [
        f"{node} ({kind} instead of {wanted[node]})"
        for node, kind in seen.items()
        if kind != wanted[node] and not (tf32 and (kind, wanted[node]) == ("tf32", "fp32"))
    ]
    if wrong:
        rest = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise UserError(
            "core.precision",
            "must be what the engine computes in",
            given=", ".join(wrong[:NAMED]) + rest,
            remedy="Take another precision or release of TensorRT; nothing was written",
        )
    counts = Counter("fp32" if kind == "tf32" else kind for kind in seen.values())
    matmuls = {kind: counts[kind] for kind in sorted({*wanted.values(), "fp32"})}
    matmuls["unseen"] = len(wanted) - len(seen)
    narrow = {node for node, kind in wanted.items() if kind != "fp32"}
    if not narrow:
        return matmuls, "graph"
    if narrow & set(seen):
        return matmuls, "layers"
    wide = request.graph.wide_bytes
    if wide and plan_bytes < request.graph.stored_bytes + wide / 2:
        return matmuls, "size"
    raise UserError(
        "core.precision",
        f"must be seen in the engine: none of {len(narrow)} matrix products shows its type",
        given=f"{request.plan.precision}; all are fused into regions with other types around them",
        remedy="Take another precision, or TensorRT 10 or newer",
    )


def _seen(layers: Iterable[Layer], wanted: Mapping[str, str]) -> dict[str, str]:
    """Node to the precision it is seen in; those whose layers do not tell are left out."""
    by_node: dict[str, list[tuple[bool, str]]] = {}
    for layer in layers:
        if layer.precision:
            multiplies = bool(_KERNEL.search(layer.kernel))
            for node in filter(wanted.__contains__, layer.nodes):
                by_node.setdefault(node, []).append((multiplies, layer.precision))
    seen = {}
    for node, kinds in by_node.items():
        # What only carries a node's name, as the kernel that adds its bias, counts for less.
        best = [kind for multiplies, kind in kinds if multiplies] or [kind for _, kind in kinds]
        seen[node] = next((kind for kind in best if kind != wanted[node]), wanted[node])
    return seen


def _layer(layer: _InspectedLayer, casts: frozenset[str]) -> Layer:
    name, kind = layer.get("Name", ""), layer.get("LayerType", "")
    nodes = tuple(dict.fromkeys((*onnx_nodes(layer.get("Metadata", "")), *fused_layers(name))))
    return Layer(
        name=name,
        nodes=nodes,
        kernel=f"{kind}_{layer.get('TacticName', '')}",
        region=bool(_REGION.search(f"{kind} {name}")) or bool(casts & set(nodes)),
        reads=_types(layer.get("Inputs", ())),
        writes=_types(layer.get("Outputs", ())),
    )


def _types(tensors: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """The types of tensors, without those that no product is computed in."""
    kinds = []
    for tensor in tensors:
        fields = {key.lower(): str(value) for key, value in tensor.items()}
        keys = ("datatype", "format/datatype", "format")
        said = next((fields[key] for key in keys if key in fields), "")
        kinds += [kind for pattern, kind in _TYPES if pattern.search(said)][:1]
    return tuple(kinds)


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
    """Of an operand: what it was quantized to, else its own type; empty if it is no such type."""
    name = tensor.name
    while (maker := makers.get(name)) is not None and maker.type.name in _SEEN_THROUGH:
        name = maker.get_input(0).name
    if maker is not None and maker.type.name == "DEQUANTIZE":
        return _PRECISIONS.get(maker.get_input(0).dtype.name, "")
    return _PRECISIONS.get(tensor.dtype.name, "")


def _widest(operands: list[Any]) -> str:
    """Where only one operand is quantized, or both differently: the type both come in."""
    kinds = [_PRECISIONS.get(operand.dtype.name, "") for operand in operands]
    return "fp32" if "fp32" in kinds else kinds[0]
