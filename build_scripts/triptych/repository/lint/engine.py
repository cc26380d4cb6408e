"""Checks of TensorRT cores: the engine exists, and the target release can load it.

`EngineCore` has the profiles, the build record and the rows that a core receives. `unsupported`
lists the operators and element types of a graph that the ONNX parser of a TensorRT release does not
support, so that such graphs are rejected without a GPU. ``operators.json`` records the parser's own
support matrix, by major version of TensorRT: operators, the element types each one is documented
for, and the newest opset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import sha256_of as hash_file
from triptych.base.errors import UserError
from triptych.base.onnx_graph import all_nodes, node_name
from triptych.base.releases import TENSORRT_VERSIONS, Release, releases_with, tensorrt_major
from triptych.container.machine import version_numbers
from triptych.repository.lint.ensemble import Wiring, wirings
from triptych.repository.lint.snapshot import Flaw, Model, Repository, enum_name, error, names
from triptych.spec.engine_plan import Dims, EnginePlan, ShapeRange

if TYPE_CHECKING:
    import onnx
    from tritonclient.grpc.model_config_pb2 import ModelOptimizationPolicy

_DATA = Path(__file__).with_name("operators.json")
_STANDARD = ("", "ai.onnx")
# TensorRT's name of an ONNX element type, if it differs from ONNX's.
_TYPE_NAMES = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "DOUBLE": "FP64",
    "FLOAT8E4M3FN": "FP8",
    "FLOAT4E2M1": "FP4",
}
# The input whose type the documentation of an operator refers to, if not the first.
_TYPED_INPUT = {"Where": 1, "OneHot": 2}
# Operators whose documentation refers to the type of their output.
_TYPED_BY_OUTPUT = ("Constant", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomUniform")
# A type that only inputs and outputs can have, and the operators that may read it.
_EDGE_TYPE, _TAKE_EDGE_TYPE = "UINT8", ("Cast", "Shape", "Size")
# Quantization must be symmetric: the parser rejects zero points other than zero.
_QUANTIZATION = ("DequantizeLinear", "QuantizeLinear")
# Operators whose output has another type than the documented input.
_CHECKED_OUTPUT = ("Cast", "DequantizeLinear", "QuantizeLinear")


@dataclass(frozen=True)
class Support:
    """Support matrix of the parser of one major version."""

    tensorrt: str  # Recorded release
    opset: int  # Newest opset it is documented for
    types: frozenset[str]  # Element types that this TensorRT has
    narrowed: Mapping[str, str]  # Smaller type that it converts an element type to
    operators: Mapping[str, frozenset[str]]  # Element types that each operator is documented for
    source: str


@dataclass(frozen=True)
class Refusal:
    """Part of a graph that a parser does not support."""

    node: str  # Name of the node, input or output; ``opset`` for the graph itself
    operator: str  # Operator of the node; empty otherwise
    reason: str
    certain: bool  # Whether the parser rejects it; otherwise it is only undocumented


@cache
def support_of(major: int) -> Support:
    """Return the record of a major version of TensorRT; raise a UserError if there is none."""
    records = json.loads(_DATA.read_text(encoding="utf-8"))
    if str(major) not in records:
        raise UserError(
            "tensorrt",
            "is a major version whose parser is not known",
            given=major,
            remedy=f"Use one of {', '.join(records)}",
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
    """Return the parts of the graph at `model_path` that TensorRT `major` does not support.

    Shape inference finds element types; a value without one is not checked.

    Raises:
        UserError: The parser of that major version is not known.
    """
    import onnx

    support = support_of(major)
    model = onnx.load(str(model_path), load_external_data=False)
    functions = {(function.domain, function.name) for function in model.functions}
    refused = [*_opset_refusals(model, support), *_edge_refusals(model.graph, support)]
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    types = _value_types(model)
    # Constants stored in the file that are not all zero.
    shifted = {t.name for t in model.graph.initializer if any(t.int32_data) or any(t.raw_data)}
    for node in (node for body in bodies for node in all_nodes(body)):
        if (node.domain, node.op_type) not in functions:
            refused += _node_refusals(node, types, support)
            if node.op_type in _QUANTIZATION and shifted & {*node.input[2:]}:
                reason = "a zero point is not zero: quantization must be symmetric"
                refused.append(Refusal(node_name(node), node.op_type, reason, certain=True))
    return refused


def _opset_refusals(model: onnx.ModelProto, support: Support) -> Iterator[Refusal]:
    opset = max((o.version for o in model.opset_import if o.domain in _STANDARD), default=0)
    if opset > support.opset:
        reason = f"opset {opset}, TensorRT {support.tensorrt} is documented up to {support.opset}"
        yield Refusal("opset", "", reason, certain=False)
    if model.functions and support.tensorrt.startswith("8."):
        names = ", ".join(sorted(function.name for function in model.functions))
        yield Refusal(names, "", "local functions need TensorRT 10", certain=True)


def _edge_refusals(graph: onnx.GraphProto, support: Support) -> Iterator[Refusal]:
    """Yield inputs and outputs whose type TensorRT would change.

    The config would then name another type.
    """
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


def _node_refusals(
    node: onnx.NodeProto, types: Mapping[str, str], support: Support
) -> Iterator[Refusal]:
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


def _typed_values(node: onnx.NodeProto) -> list[str]:
    """Return the value that an operator's documentation refers to, then others to check."""
    place = _TYPED_INPUT.get(node.op_type, 0)
    by_output = node.op_type in _TYPED_BY_OUTPUT or len(node.input) <= place
    first = node.output[0] if by_output else node.input[place]
    return [first, *(node.output if node.op_type in _CHECKED_OUTPUT else ())]


def _value_types(model: onnx.ModelProto) -> dict[str, str]:
    """Return the element type of every value that has one, by name."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {tensor.name: _type_name(tensor.data_type) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        found[value.name] = _type_name(value.type.tensor_type.elem_type)
    return found


def _type_name(elem_type: int) -> str:
    """Return TensorRT's name of an ONNX element type; empty if unknown."""
    import onnx

    if not elem_type or elem_type not in onnx.TensorProto.DataType.values():
        return ""
    name = str(onnx.TensorProto.DataType.Name(elem_type))
    return _TYPE_NAMES.get(name, name)


# The server makes inputs of these kinds with one entry per row.
_BY_ROW = ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")
_MAX_REFUSALS = 3
Shapes = Mapping[str, Dims]
"""Shape of each input, with the batch dimension."""


@dataclass(frozen=True)
class SentRows:
    """Rows that the step `source` sends to the core."""

    source: str
    padded: tuple[int, ...]  # Lengths that it pads rows to; empty if it does not pad
    longest: int | None  # Maximum number of tokens of a row; None if unknown


class EngineCore:
    """A model with backend tensorrt.

    Attributes:
        pipeline: Pipeline that built it; empty if no build manifest names it.
        manifest_file: Build manifest of that pipeline, relative to the repository.
        profiles: Profiles of its engine; none if unknown.
        record: Record of the finished engine; empty if no build manifest has it.
        rows: Rows that the steps before it send.
    """

    def __init__(self, model: Model) -> None:
        every = wirings(model.repository)
        users = [w for w in every if any(step.model is model for step in w.steps)]
        self.model, self.config, self.where = model, model.config, model.where
        plans = ((user.ensemble, _plan_of(user.ensemble.manifest)) for user in users)
        owner, plan = next(((owner, plan) for owner, plan in plans if plan), (None, None))
        record = owner.manifest.get("engine") if owner is not None else None
        self.pipeline = owner.name if owner is not None else ""
        self.manifest_file = owner.manifest_file if owner is not None else ""
        self.profiles: tuple[Mapping[str, ShapeRange], ...] = plan.profiles if plan else ()
        self.record: Mapping[str, object] = record if isinstance(record, dict) else {}
        self.rows = tuple(rows for user in users for rows in _rows_sent(user, model))

    @cached_property
    def row_inputs(self) -> set[str]:
        """Inputs whose first dimension is the number of rows of a batch."""
        if self.config.max_batch_size < 1:
            return set()
        added = [each for each in self.config.batch_input if enum_name(each, "kind") in _BY_ROW]
        rows = {tensor.name for tensor in self.config.input if not tensor.allow_ragged_batch}
        return rows | {name for each in added for name in each.target_name}

    def fits(self, shapes: Shapes) -> bool:
        """Return whether some profile allows these shapes, whatever the number of rows."""
        return any(
            all(
                between(profile[name].minimum[skip:], dims[skip:], profile[name].maximum[skip:])
                for name, dims in shapes.items()
                if name in profile
                for skip in [int(name in self.row_inputs)]
            )
            for profile in self.profiles
        )

    def row(self, tokens: int) -> Shapes:
        """Return the dims of a row of `tokens` tokens."""
        inputs = self.config.input
        return {t.name: tuple(tokens if dim == -1 else dim for dim in t.dims) for t in inputs}

    def joined(self, rows: int, dims: Shapes) -> Shapes:
        """Return the shapes of a batch of `rows` equal rows, from the dims of one."""
        ragged = {name: (rows * prod(dims[name]),) for name in self.model.ragged & dims.keys()}
        return {**{name: self._batched(rows, each) for name, each in dims.items()}, **ragged}

    def spec_shapes(
        self, rows: int, inputs: Mapping[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape]
    ) -> Shapes:
        """Return the shapes in a `graph_spec`, which has ragged and added inputs after joining."""
        as_given = {n: tuple(s.dim) for n, s in inputs.items()}
        joined = self.model.ragged | self.model.added
        return {n: d if n in joined else self._batched(rows, d) for n, d in as_given.items()}

    def _batched(self, rows: int, dims: Dims) -> Dims:
        return (rows, *dims) if self.config.max_batch_size > 0 else dims


def engine_cores(repository: Repository) -> Iterator[EngineCore]:
    """Yield every TensorRT model, with data from the build manifests of its ensembles."""
    for model in repository.executed():
        if model.backend == "tensorrt":
            yield EngineCore(model)


def between(low: Dims, dims: Dims, high: Dims) -> bool:
    """Return whether a shape is between two others of its rank."""
    trios = zip(low, dims, high, strict=False)
    return len(low) == len(dims) == len(high) and all(a <= b <= c for a, b, c in trios)


def _plan_of(manifest: object) -> EnginePlan | None:
    plan = manifest.get("plan") if isinstance(manifest, dict) else None
    try:
        return EnginePlan.from_dict(plan["engine"]) if isinstance(plan, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def _rows_sent(wiring: Wiring, core: Model) -> Iterator[SentRows]:
    """Yield the rows of the steps that make an input of variable length."""
    for producer in {p.index: p for p in wiring.feeding(core, core.varying)}.values():
        if producer.model is not None:
            edges: Any = producer.model.settings.get("bucket_edges")
            longest = producer.model.settings.get("max_length")
            padded = tuple(edges) if _are_sizes(edges) else ()
            yield SentRows(producer.model.name, padded, longest if _are_sizes([longest]) else None)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v > 0 for v in values)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex; empty if the file cannot be read."""
    try:
        return hash_file(path)
    except OSError:
        return ""


def engine_built(core: EngineCore) -> Iterator[Flaw]:
    """Check that the engine of a TensorRT core exists."""
    model = core.model
    if model.waits_for_engine:
        pipeline = core.pipeline or model.name.removesuffix("_core")
        yield error(
            "must have its engine built: the tensorrt backend cannot load a graph",
            "model.onnx alone",
            f"triptych engine {pipeline}, in the image and on the GPU that serve it",
            f"{model.name}/{model.served_versions[0]}/{model.model_file}",
        )


def engine_version(core: EngineCore) -> Iterator[Flaw]:
    """Check that the engine belongs to its graph, and that the target release can load it."""
    repository, record = core.model.repository, core.record
    if not record or core.model.waits_for_engine:
        return
    wanted, built = record.get("onnx_sha256"), record.get("tensorrt")
    for graph in core.model.graphs:
        if isinstance(wanted, str) and sha256_of(repository.root / graph.file) != wanted:
            yield error(
                "must be the graph that the engine was built from",
                f"another graph than {core.manifest_file} records",
                f"triptych engine {core.pipeline}",
                graph.file,
            )
    if not isinstance(built, str) or not re.fullmatch(r"\d+(\.\d+)+", built):
        return
    compatible = record.get("version_compatible") is True
    obstacle = _obstacle(built, repository.triton, compatible=compatible)
    if repository.is_exact and obstacle:
        fitting = releases_with(built)
        also = f", or target Triton {names(fitting)}" if fitting else ""
        yield error(
            f"must have an engine that the TensorRT of Triton {repository.triton} loads",
            f"an engine of TensorRT {built}; {obstacle}",
            f"triptych engine {core.pipeline} in the image of that release{also}",
            core.manifest_file,
        )


def _obstacle(built: str, triton: Release, *, compatible: bool) -> str:
    """Return why the image of `triton` cannot load an engine of TensorRT `built`.

    Empty if it may be able to.
    """
    exact, major = TENSORRT_VERSIONS.get(triton), tensorrt_major(triton)
    if major is None or (exact is not None and _same(exact, built)):
        return ""
    there, newer = f"Triton {triton} has {exact}", "none loads one of a newer release"
    if exact is not None and version_numbers(built) > version_numbers(exact):
        return f"{there}, and {newer}"
    if exact is not None and not compatible:
        return f"{there}, and it is not version compatible"
    own, there = version_numbers(built)[0], f"Triton {triton} has TensorRT {major}"
    if own > major:
        return f"{there}, and {newer}"
    if own < major and not compatible:
        return f"{there}, and it is not version compatible"
    return f"{there}, and it is from too far back" if (own, major) == (8, 11) else ""


def _same(one: str, other: str) -> bool:
    """Return whether two versions agree as far as both are known: ``11.2.1`` and ``11.2.1.2``."""
    return all(a == b for a, b in zip(version_numbers(one), version_numbers(other), strict=False))


def engine_operators(core: EngineCore) -> Iterator[Flaw]:
    """Check that the target's TensorRT supports all operators and element types of the graph."""
    repository = core.model.repository
    major = tensorrt_major(repository.triton)
    for graph in core.model.graphs:
        if graph.problem or major is None:
            continue
        try:
            refused = unsupported(repository.root / graph.file, major)
        except Exception as problem:  # shape inference raises its own errors
            yield error(
                "must be a graph whose types can be inferred",
                f"{type(problem).__name__}: {problem!s:.200}",
                "Build the pipeline again",
                graph.file,
            )
            continue
        nodes: dict[str, list[str]] = {}
        for refusal in refused:
            if refusal.certain:
                nodes.setdefault(refusal.reason, []).append(refusal.node)
        for reason, (first, *others) in list(nodes.items())[:_MAX_REFUSALS]:
            more = f" and {len(others)} more" if others else ""
            yield error(
                f"must hold only what TensorRT {support_of(major).tensorrt} supports",
                f"{first}{more}: {reason}",
                "Build with another precision, or for a Triton with a newer TensorRT than that of "
                f"{repository.triton}",
                graph.file,
            )
