"""Every task and architecture in every precision, put through NVIDIA's own parser and builder.

The graphs are those that `build` ships for TensorRT.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest

from tests.support import architectures
from tests.support.engine_networks import OPTIONS, count_products
from tests.support.precision_cases import CONVERT, export
from tests.support.project import LAYOUTS, quiet, share_export_registry, traffic_texts
from tests.support.served_models import SERVED, save
from tests.support.task_models import MODELS
from tests.support.task_pipelines import traffic_of, write_task
from triptych.base.errors import UserError
from triptych.base.onnx_graph import MODEL_FILE, all_nodes, value_types
from triptych.core.engine.api import USUAL_CAPABILITY, RtxApi
from triptych.core.engine.dry_run import dry_build
from triptych.core.engine.make import make_request
from triptych.core.export.to_onnx import export_model
from triptych.core.inputs import read_inputs
from triptych.core.precision.layer_exclusion import CoreConverter
from triptych.core.precision.linear import Recipe
from triptych.repository.records import Conversion
from triptych.spec.backends import Precision
from triptych.spec.engine_plan import EnginePlan, ShapeRange
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

PARSED: Sequence[tuple[str, str, str]] = (
    ("bert", "embedding", "bucketed"),
    ("roberta", "logits", "bucketed"),
    ("mpnet", "embedding", "bucketed"),
    ("deberta-v3", "spans", "bucketed"),
)
"""Architectures that `test_export` exports in the same way: bucketed ones."""
OTHERS = ("bart_labels", "t5_vectors", "albert_tags")
"""Pipelines of `SERVED` whose architectures `test_export` does not export; the code of
`bart_labels` picks tokens by a NonZero."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "fp8")
NOTHING = Conversion(())
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


def of_pipeline(folder: Path, layout: str, precisions: Sequence[Precision]) -> Iterator[Graph]:
    """Yield the core of a pipeline in each precision; none if it cannot be packed."""
    overrides = ["core.backend=tensorrt", "core.max_batch_size=16", "core.bucket_count=2"]
    if layout != "fixed":
        overrides.append(f"core.layout={layout}")
    share_export_registry()
    inputs = read_inputs(load_spec(folder, overrides), quiet)
    exported = export_model(inputs.plan, inputs.model_folder, quiet)
    assert inputs.plan.engine is not None
    for precision in precisions if not exported.refusal else ():
        path, conversion = exported.file, NOTHING
        if precision != "fp32":
            converter = CoreConverter(inputs, exported.file, exported.key, precision, quiet)
            stage, _, conversion = converter.converted(())
            path = stage.folder / MODEL_FILE
        plan = replace(inputs.plan.engine, precision=precision)
        yield Graph(f"{folder.name}_{layout}_{precision}", path, plan, conversion.fp32_products)


def of_architecture(
    case: tuple[str, str, str], precisions: Sequence[Precision], base: Path
) -> Iterator[Graph]:
    """Yield the core of a random model of `architectures`, as `test_export` exports it."""
    name, head, layout = case
    exported = export(name, head, "packed for TensorRT" if layout == "packed" else layout)
    for precision in precisions:
        path, conversion = exported.path, NOTHING
        if precision != "fp32":
            folder = base / "_".join((*case, precision))
            recipe = Recipe(precision, backend="tensorrt", device="gpu")
            conversion = CONVERT[precision](exported.path, folder, recipe, exported.feeds())
            path = folder / MODEL_FILE
        plan = EnginePlan(precision, (_profile(packed=layout == "packed"),), (), OPTIONS)
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


def parse(graph: Graph) -> None:
    """Parse a graph and check its products; raise a `UserError` if anything is wrong."""
    request = make_request(graph.path, graph.plan, RtxApi(USUAL_CAPABILITY))
    count_products(request, graph.fp32_products)


def build(graph: Graph) -> None:
    """Make a dry run in this process; raise a `UserError` if anything is wrong."""
    asked = {"onnx": str(graph.path), "plan": graph.plan.as_dict()}
    asked |= {"fp32_products": graph.fp32_products, "compute_capability": USUAL_CAPABILITY}
    dry_build(asked)


def sized_by_values(path: Path) -> list[str]:
    """Return the nodes whose results have shapes that depend on values, or that branch."""
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
    """Return the operators of a graph, each with the type of its first result."""
    model = onnx.load(path, load_external_data=False)
    types = value_types(model)
    return {(node.op_type, types[node.output[0]]) for node in model.graph.node}


def covering(graphs: Sequence[Graph]) -> list[Graph]:
    """Return a few of the graphs that have all `operators` of all graphs."""
    parts = {graph.name: operators(graph.path) for graph in graphs}
    left = set().union(*parts.values())
    chosen = []
    while left:
        best = max(graphs, key=lambda graph: len(parts[graph.name] & left))
        left -= parts[best.name]
        chosen.append(best)
    return chosen


def write_served(base: Path, name: str) -> Path:
    """Write a pipeline of `SERVED`; returns its folder."""
    folder = base / "pipelines" / name
    folder.mkdir(parents=True)
    task, model = SERVED[name].task, save(SERVED[name], base / "models" / name)
    spec: dict[str, Any] = {"task": task, "model": {"source": str(model)}}
    if task == "zero-shot-classification":
        spec["parameters"] = {"candidate_labels": ["billing", "a delivery"]}
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    rows = "\n".join(map(json.dumps, traffic_of(task, traffic_texts()[:40], folder)))
    (folder / "traffic.jsonl").write_text(rows, encoding="utf-8")
    return folder


def check(built: Sequence[Graph], parsed: Sequence[Graph]) -> None:
    """Build some graphs and parse others; each that is refused is named with the reason."""
    refused = {}
    for use, graphs in ((build, built), (parse, parsed)):
        for graph in graphs:
            try:
                use(graph)
            except UserError as error:
                refused[graph.name] = error.message
    assert refused == {}
    sized = {graph.name: sized_by_values(graph.path) for graph in (*built, *parsed)}
    assert {name: nodes for name, nodes in sized.items() if nodes} == {}


def test_a_core_of_every_kind_is_built(tmp_path: Path, minilm_folder: Path) -> None:
    tags, images = (write_task(tmp_path, name, minilm_folder) for name in ("tags", "images"))
    built = [*of_pipeline(tags, "packed", ["int8"]), *of_pipeline(images, "fixed", ["fp16"])]
    built += of_architecture(PARSED[0], ("bf16",), tmp_path)
    parsed: list[Graph] = []
    for case in PARSED:
        parsed += of_architecture(case, ("fp32", "fp16", "fp8"), tmp_path)
    assert (len(built), len(parsed)) == (3, 12)
    check(built, parsed)


@pytest.mark.long
def test_the_whole_matrix_is_parsed_and_each_operator_in_it_is_built(
    tmp_path: Path, minilm_folder: Path
) -> None:
    graphs: list[Graph] = []
    for name in MODELS:
        folder = write_task(tmp_path, name, minilm_folder)
        for layout in ("fixed",) if name == "images" else LAYOUTS:
            graphs += of_pipeline(folder, layout, PRECISIONS)
    for name in OTHERS:
        folder = write_served(tmp_path, name)
        graphs += of_pipeline(folder, SERVED[name].layout, PRECISIONS)
    cases = (*architectures.SHARED, *architectures.OTHERS)
    for case in cases:
        graphs += of_architecture(case, ["fp16"], tmp_path)
    of_pipelines = len(PRECISIONS) * (2 * len(MODELS) - 1 + len(OTHERS))
    assert len(graphs) == of_pipelines + len(cases)
    check(covering(graphs), graphs)
