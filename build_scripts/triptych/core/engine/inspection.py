"""Check a finished engine against the request: tensors, profiles, types of its matrix products.

Each matrix product in the ONNX graph requires a precision: that of its operands, or the type that
both were quantized to. TensorRT's inspector lists kernels and, in their metadata, the ONNX nodes
each was built from. The precision of a node is found as follows:

- A kernel whose name contains its operand type (``…_f16f16_f16f32_…``) has that type.
- Otherwise a kernel that reads int8 or fp8 has that type. A kernel whose inputs all have one
  floating-point type has that type, unless its outputs show that it converts in between.
- A region fused around the node is treated like a kernel: the tensors at its boundary prove a type
  if they agree. fp32 at the whole boundary proves nothing if the region may convert types inside:
  a region of Myelin's, or one with a Cast of the graph.

The build fails if a node has another type than it requires. It also fails if none of the products
that require less than fp32 is found in its type, so that an fp32 plan is not mistaken for a fast
one. A product that is not found does not fail as long as others are found, because the network is
strongly typed. If all products are fused away, the size
of the plan decides: a plan closer in size to the graph's own weights than to fp32 weights cannot
hold them as fp32.

`check_products` checks the products of a parsed network before the build. A strongly typed network
computes a product in the type of its operands, or in the type that both operands were quantized to.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from triptych.base.errors import UserError
from triptych.core.engine.graph import GraphValue, fused_layers, onnx_nodes
from triptych.core.engine.make import Request
from triptych.core.engine.runner import EngineTensor, OpenEngine
from triptych.spec.engine_plan import ShapeRange

if TYPE_CHECKING:
    import tensorrt as trt

NAMED = 5
"""Maximum number of layers that an error lists."""

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
    """A layer in the inspector's JSON, as far as it is read."""

    Name: str
    LayerType: str
    TacticName: str
    Metadata: str
    Inputs: list[Mapping[str, object]]
    Outputs: list[Mapping[str, object]]


@dataclass(frozen=True)
class Layer:
    """A layer of an engine, as the inspector describes it."""

    name: str
    nodes: tuple[str, ...]  # ONNX nodes that it was built from
    kernel: str  # Type and tactic of the layer
    region: bool  # Whether it is a region of many operators, which may convert types inside
    reads: tuple[str, ...]  # Floating-point and quantized types of its inputs
    writes: tuple[str, ...]  # Floating-point and quantized types of its outputs

    @property
    def precision(self) -> str:
        """Type that the layer's product is computed in; empty if the layer does not show it."""
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
    """Properties of a finished engine."""

    matmuls: Mapping[str, int]  # Number of products by precision, and ``unseen``
    witness: str  # Proof of the precision: ``layers``, ``size``, or ``graph`` if it is fp32
    profiles: Sequence[Mapping[str, ShapeRange]]  # Profiles of the engine, by input


def read_layers(information: str, casts: frozenset[str] = frozenset()) -> list[Layer]:
    """Return the layers in the JSON of `EngineInspector.get_engine_information`.

    10 describes a tensor by ``Format/Datatype``; 11 has ``Format`` and ``Datatype``. `casts`
    are the nodes of the graph that convert types.

    Raises:
        UserError: The engine was built without detailed information, so there are only names.
    """
    layers = json.loads(information).get("Layers", [])
    if not all(isinstance(layer, Mapping) for layer in layers):
        raise UserError(
            "model.plan",
            "was built without detailed information on its layers",
            given="only names of layers",
            remedy="Build it with `triptych engine`",
        )
    return [
        _layer(layer, casts)
        for layer in layers
        if not str(layer.get("LayerType", "")).lower().startswith(_MOVING)
    ]


def inspect(opened: OpenEngine, request: Request, plan_bytes: int) -> Inspection:
    """Check an engine whose plan has `plan_bytes` bytes, with the release that built it.

    Raises:
        UserError: The engine differs from the request.
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
    """Check that names, types and shapes are those of the graph.

    TensorRT may know sizes that the graph does not have.
    """
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
            f"has other {kind} than model.onnx",
            given=f"{name}: {found.get(name)} instead of {right.get(name)}",
            remedy="Run `triptych build` and `triptych engine` again",
        )


def _check_profiles(opened: OpenEngine, request: Request) -> None:
    found, wanted = [dict(p) for p in opened.profiles], [dict(p) for p in request.plan.profiles]
    if found == wanted:
        return
    given = f"{len(found)} instead of {len(wanted)}"
    for index, (own, right) in enumerate(zip(found, wanted, strict=False)):
        unlike = [name for name in right if own.get(name) != right[name]]
        if unlike:
            given = f"profile {index}, {unlike[0]}: {own.get(unlike[0])}"
            break
    raise UserError(
        "model.plan",
        "has other optimization profiles than the plan",
        given=given,
        remedy="Run `triptych engine` again; if that does not help, report it",
    )


def judge_products(
    layers: Iterable[Layer], request: Request, plan_bytes: int
) -> tuple[dict[str, int], str]:
    """Return the fields `matmuls` and `witness` of an `Inspection`; see the module's docstring.

    Raises:
        UserError: A product has another precision than required, or nothing proves that it has it.
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
        raise UserError(
            "core.precision",
            "differs from what the engine computes in",
            given=_listed(wrong),
            remedy="Set another precision or use another release of TensorRT; nothing was written",
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
        f"cannot be verified: none of {len(narrow)} matrix products shows its type",
        given=f"{request.plan.precision}; all are fused into regions with other types around them",
        remedy="Set another precision, or use another release of TensorRT",
    )


def _listed(wrong: Sequence[str]) -> str:
    rest = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return ", ".join(wrong[:NAMED]) + rest


def _seen(layers: Iterable[Layer], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the precision in which each node was found; nodes without evidence are missing."""
    by_node: dict[str, list[tuple[bool, str]]] = {}
    for layer in layers:
        if layer.precision:
            multiplies = bool(_KERNEL.search(layer.kernel))
            for node in filter(wanted.__contains__, layer.nodes):
                by_node.setdefault(node, []).append((multiplies, layer.precision))
    seen = {}
    for node, kinds in by_node.items():
        # A kernel that only has the node's name, such as the one that adds its bias, counts less.
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
    """Return the types of tensors, without types that no product is computed in."""
    kinds = []
    for tensor in tensors:
        fields = {key.lower(): str(value) for key, value in tensor.items()}
        keys = ("datatype", "format/datatype", "format")
        said = next((fields[key] for key in keys if key in fields), "")
        kinds += [kind for pattern, kind in _TYPES if pattern.search(said)][:1]
    return tuple(kinds)


_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM", "ATTENTION_INPUT")
_SEEN_THROUGH = ("SHUFFLE", "IDENTITY", "SQUEEZE", "UNSQUEEZE")
_PRECISIONS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}


def check_products(
    network: trt.INetworkDefinition, request: Request, fp32_products: Collection[str]
) -> dict[str, int]:
    """Return the number of products of a strongly typed `INetworkDefinition`, by precision.

    Args:
        network: Network that the parser made of the request's graph.
        request: Request with the planned precision.
        fp32_products: Nodes that stay in fp32 on purpose, whatever the precision.

    Raises:
        UserError: Products compute in fp32 unintentionally, in another type than their nodes have,
            or none computes in the planned precision.
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
        raise UserError(
            "core.precision",
            f"is not {precision} in every matrix product that should be",
            given=_listed(wrong),
            remedy="Run `triptych build` again; else set another core.precision, and report it",
        )
    return counts


def _precisions(network: trt.INetworkDefinition, nodes: Mapping[str, str]) -> dict[str, str]:
    """Return the precision of each product, by its ONNX node if known, else by its layer."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {
        layer.get_output(index).name: layer
        for layer in layers
        for index in range(layer.num_outputs)
    }
    found: dict[str, str] = {}
    for layer in layers:
        if layer.type.name not in _PRODUCTS:
            continue
        operands = [layer.get_input(index) for index in range(min(layer.num_inputs, 2))]
        kinds = {_precision(operand, makers) for operand in operands if operand is not None}
        if not kinds & {*_PRECISIONS.values()}:  # products of integers have no precision
            continue
        names = (*onnx_nodes(layer.metadata or ""), layer.name)
        node = next((name for name in names if name in nodes), layer.name)
        kind = kinds.pop() if len(kinds) == 1 else _widest(operands)
        # A node may become several products, as in attention: the widest one counts.
        found[node] = "fp32" if found.get(node) == "fp32" else kind
    return found


def _precision(tensor: trt.ITensor, makers: Mapping[str, trt.ILayer]) -> str:
    """Return the type an operand was quantized to, else its own type; empty for other types."""
    name = tensor.name
    while (maker := makers.get(name)) is not None and maker.type.name in _SEEN_THROUGH:
        name = maker.get_input(0).name
    if maker is not None and maker.type.name == "DEQUANTIZE":
        return _PRECISIONS.get(maker.get_input(0).dtype.name, "")
    return _PRECISIONS.get(tensor.dtype.name, "")


def _widest(operands: list[trt.ITensor]) -> str:
    """Return the type of both operands if only one is quantized, or both differently."""
    kinds = [_PRECISIONS.get(operand.dtype.name, "") for operand in operands]
    return "fp32" if "fp32" in kinds else kinds[0]
