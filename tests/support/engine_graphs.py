"""The graphs that `build` ships for TensorRT, and what NVIDIA's parser and builder make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest

import architectures
from conftest import quiet, share_export_registry
from precision_cases import export
from task_conversions import CONVERT, traffic_of
from triptych.base.onnx_graph import MODEL_FILE, all_nodes, value_types
from triptych.core.engine.api import USUAL_CAPABILITY, RtxApi
from triptych.core.engine.dry_run import dry_build
from triptych.core.engine.inspection import check_products
from triptych.core.engine.make import make_engine, make_request
from triptych.core.export.to_onnx import export_model
from triptych.core.inputs import read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.core.precision.linear import Recipe
from triptych.repository.records import Conversion
from triptych.spec.engine_plan import EnginePlan, ShapeRange
from triptych.spec.fields import Precision
from triptych.spec.spec import load_spec

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "fp8")
NOTHING = Conversion(())
OPTIONS = {
    **dict.fromkeys(("workspace_mib", "optimization_level")),
    **dict.fromkeys(("version_compatible", "refit", "weight_streaming", "tf32"), False),
    "hardware": "none",
}
BY_VALUES = frozenset(("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringNormalizer"))
"""Operators whose results have as many elements as the values of their inputs say."""
SIZED_BY: Mapping[str, slice] = {
    **dict.fromkeys(("ConstantOfShape", "Range"), slice(0, None)),
    **dict.fromkeys(("Reshape", "Expand", "Tile", "TopK", "Split"), slice(1, 2)),
    **dict.fromkeys(("OneHot", "CenterCropPad"), slice(1, 2)),
    **dict.fromkeys(("Slice", "Pad", "Resize"), slice(1, None)),
}
"""Operators to the inputs whose values decide the shape of the result."""


class Graph(NamedTuple):
    """A graph and the plan of its engine; `fp32_products` stay in fp32 on purpose."""

    name: str
    path: Path
    plan: EnginePlan
    fp32_products: Sequence[str] = ()


def of_pipeline(
    name: str, task: str, model: Path, layout: str, precisions: Sequence[Precision], folder: Path
) -> Iterator[Graph]:
    """The core of a pipeline in each precision, nothing kept; none where it cannot be packed."""
    core: dict[str, Any] = {"backend": "tensorrt", "max_batch_size": 16, "bucket_count": 2}
    spec: dict[str, Any] = {"task": task, "model": {"source": str(model)}, "core": core}
    if layout != "fixed":
        core["layout"] = layout
    if task == "zero-shot-classification":
        spec["parameters"] = {"candidate_labels": ["billing", "a delivery"]}
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    rows = "\n".join(map(json.dumps, traffic_of(task, folder)))
    (folder / "traffic.jsonl").write_text(rows, encoding="utf-8")
    share_export_registry()
    inputs = read_inputs(load_spec(folder), quiet)
    exported = export_model(inputs.plan, inputs.model_folder, quiet)
    assert inputs.plan.engine is not None
    for precision in precisions if not exported.refusal else ():
        path, conversion = exported.file, NOTHING
        if precision != "fp32":
            converter = CoreConverter(inputs, exported.file, exported.key, precision, quiet)
            stage, _, conversion = converter.converted(())
            path = stage.folder / MODEL_FILE
        plan = replace(inputs.plan.engine, precision=precision)
        yield Graph(f"{name}_{layout}_{precision}", path, plan, conversion.fp32_products)


def of_architecture(
    case: tuple[str, str, str], precisions: Sequence[Precision], base: Path
) -> Iterator[Graph]:
    """The core of a random model of `architectures`, as `test_architectures` exports it."""
    name, head, layout = case
    exported = export(name, head, "packed for TensorRT" if layout == "packed" else layout)
    for precision in precisions:
        path, conversion = exported.path, NOTHING
        if precision != "fp32":
            folder = base / "_".join((*case, precision))
            recipe = Recipe(precision, backend="tensorrt", device="gpu")
            conversion = CONVERT[precision](exported.path, folder, recipe, exported.feeds())
            path = folder / MODEL_FILE
        plan = EnginePlan(precision, (_profile(packed=exported.packed),), (), OPTIONS)
        yield Graph("_".join((*case, precision)), path, plan, conversion.fp32_products)


def _profile(*, packed: bool, rows: int = 8, tokens: int = 64) -> dict[str, ShapeRange]:
    column = ShapeRange((1, 1), (rows, 1), (rows, 1))
    profile = {tensor.name: column for tensor in architectures.INPUTS}
    if packed:
        every = ShapeRange((1,), (tokens,), (rows * tokens,))
        made = {
            "row_offset": column,
            "row_stride": ShapeRange((1,), (rows,), (rows,)),
            "longest": ShapeRange((1,), (tokens,), (tokens + rows,)),
        }
        return {**profile, **made, "input_ids": every, "row_span": every}
    return {**profile, "input_ids": ShapeRange((1, tokens), (rows, tokens), (rows, tokens))}


class _Parsed(Exception):
    """Ends the building of an engine once its graph is parsed."""


def parse(graph: Graph) -> None:
    """Parse a graph and check its products; raises a `UserError` that says what is wrong."""
    api = RtxApi(USUAL_CAPABILITY)
    request = make_request(graph.path, graph.plan, api)

    def look(network: Any) -> None:
        check_products(network, request, graph.fp32_products)
        raise _Parsed

    with pytest.raises(_Parsed):
        make_engine(api, request, timing_file=None, tell=lambda _: None, look=look)


def build(graph: Graph) -> dict[str, Any]:
    """Dry-build a graph in this process; raises a `UserError` that says what is wrong."""
    asked = {
        "onnx": str(graph.path),
        "plan": graph.plan.as_dict(),
        "fp32_products": graph.fp32_products,
        "compute_capability": USUAL_CAPABILITY,
    }
    return dry_build(asked)


def sized_by_values(path: Path) -> list[str]:
    """The nodes of a graph whose results have shapes that depend on values, or that branch."""
    graph = onnx.load(path, load_external_data=False).graph
    computed = {value.name for value in graph.input}
    found = []
    for node in all_nodes(graph.node):
        sizes = node.input[SIZED_BY.get(node.op_type, slice(0))]
        held = any(attribute.HasField("g") for attribute in node.attribute)
        if node.op_type in BY_VALUES or held or computed.intersection(sizes):
            found.append(f"{node.op_type} {node.name}")
        if node.op_type not in ("Shape", "Size") and computed.intersection(node.input):
            computed.update(node.output)
    return found


def operators(path: Path) -> set[tuple[str, int]]:
    """The operators of a graph with the types of what they make."""
    model = onnx.load(path, load_external_data=False)
    types = value_types(model)
    return {(node.op_type, types[node.output[0]]) for node in model.graph.node}


def fewest(graphs: Sequence[Graph], of: Callable[[Path], set[Any]]) -> list[Graph]:
    """So few of the graphs that what `of` finds in any is in one of them."""
    parts = {graph.name: of(graph.path) for graph in graphs}
    left = set().union(*parts.values())
    chosen = []
    while left:
        best = max(graphs, key=lambda graph: len(parts[graph.name] & left))
        left -= parts[best.name]
        chosen.append(best)
    return chosen
