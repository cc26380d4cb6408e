"""What a GPU core is planned with: profiles, CUDA graphs, limits; all from one traffic."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conftest import write_pipeline
from plan_cases import facts
from triptych.spec.engine_plan import MAX_GRAPHS, EnginePlan
from triptych.spec.model_info import ImageInfo
from triptych.spec.plan import Plan, batch_mib, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.tasks.catalog import IMAGE_CLASSIFICATION, RERANKING, TEXT_EMBEDDING
from triptych.spec.traffic import Lengths

LENGTHS = Lengths.of([5, 9, 12, 17, 30, 31, 60, 200], max_length=256)
TENSORRT = ("core.backend=tensorrt", "core.precision=fp16")


def plan_of(folder: Path, *overrides: str, **more: Any) -> Plan:
    spec = load_spec(write_pipeline(folder / "a"), [*TENSORRT, *overrides])
    return make_plan(spec, facts(**more), TEXT_EMBEDDING, {}, LENGTHS)


def engine_of(plan: Plan) -> EnginePlan:
    assert plan.engine is not None
    return plan.engine


def test_every_batch_of_every_length_has_one_graph(tmp_path: Path) -> None:
    wanted = ("core.layout=bucketed", "core.bucket_count=4", "core.max_batch_size=24")
    plan = plan_of(tmp_path, *wanted)
    assert len(engine_of(plan).graph_specs) == MAX_GRAPHS
    for edge in plan.bucket_edges:
        specs = [s for s in engine_of(plan).graph_specs if s.inputs["input_ids"] == (edge,)]
        for rows in range(1, 25):
            fitting = [s for s in specs if s.lowest_batch_size <= rows <= s.batch_size]
            assert len(fitting) == 1
            assert fitting[0].batch_size < 2 * rows or rows > 16
        assert {spec.inputs["row_length"] for spec in specs} == {(1,)}


def test_of_many_shapes_the_frequent_and_small_ones_have_a_graph(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "core.layout=bucketed", "core.bucket_count=8")
    specs = engine_of(plan).graph_specs
    shapes = [(spec.inputs["input_ids"][0], spec.batch_size) for spec in specs]
    every = [(edge, 1 << power) for edge in plan.bucket_edges for power in range(6)]
    assert (len(specs), len(set(shapes))) == (MAX_GRAPHS, MAX_GRAPHS)
    assert set(shapes) < set(every)
    assert plan.reasons["cuda_graphs"].startswith(f"24 of {len(every)} shapes")
    sizes = {edge: [rows for e, rows in shapes if e == edge] for edge in plan.bucket_edges}
    for rows in sizes.values():  # of a length, the smallest batches, without a gap
        assert rows == [1 << power for power in range(len(rows))]
    assert sizes[256] == []  # no row of the traffic is padded to the longest length
    assert len(sizes[32]) > len(sizes[200]) > 0  # of two rows in eight, and of one


def test_a_batch_has_as_many_rows_as_its_memory_allows(tmp_path: Path) -> None:
    sizes = (64, 256, 512, 8192)
    for case in product(("packed", "bucketed"), ("fp32", "fp16"), sizes):
        layout, precision, max_length = case
        wanted = [f"core.{name}" for name in (f"precision={precision}", f"layout={layout}")]
        wanted += ["core.max_batch_size=1024", "core.max_batch_mib=500"]
        plan = plan_of(tmp_path / "-".join(map(str, case)), *wanted, max_length=max_length)
        rows, element = plan.max_batch_size, 4 if precision == "fp32" else 2
        shapes: dict[str, Any] = {"tokens": max_length, "precision": precision, "on_gpu": True}
        each = batch_mib(plan.info, rows=1, packed=False, **shapes)
        # Four tensors of scores of 12 heads, or the feed-forward part, are alive at once.
        assert each * 2**20 > element * max_length * max(48 * max_length, 3 * 1536), case
        own = batch_mib(plan.info, rows=rows, packed=layout == "packed", **shapes)
        assert plan.batch_mib == pytest.approx(own), case
        assert own <= rows * each, case
        assert rows == 1024 or each > 500 or rows * each <= 500 < (rows + 1) * each, case
        assert (rows == 1) == (each > 250), case
        assert plan.request_rows == rows, case


def test_pairs_have_their_first_segment_in_every_shape(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a", task="reranking")
    for layout in ("packed", "bucketed"):
        spec = load_spec(folder, [*TENSORRT, f"core.layout={layout}"])
        plan = make_plan(spec, facts(segments=2, labels=("a",)), RERANKING, {}, LENGTHS)
        assert all("first_segment" in profile for profile in engine_of(plan).profiles)
        assert all("first_segment" in graph.inputs for graph in engine_of(plan).graph_specs)


def test_images_have_one_profile_and_graphs(tmp_path: Path) -> None:
    image = ImageInfo.__new__(ImageInfo)
    for name, value in {"height": 8, "width": 6, "channels": 3}.items():
        object.__setattr__(image, name, value)
    spec = load_spec(write_pipeline(tmp_path / "a"), [*TENSORRT, "core.max_batch_size=4"])
    pictured = facts(image=image, labels=("a", "b"))
    plan = make_plan(spec, pictured, IMAGE_CLASSIFICATION, {"top_k": 1}, None)
    (profile,) = engine_of(plan).profiles
    assert profile["pixels"].minimum == (1, 8, 6, 3)
    assert profile["pixels"].maximum == (4, 8, 6, 3)
    assert [g.batch_size for g in engine_of(plan).graph_specs] == [1, 2, 4]
    assert plan.cost is None


def test_kernels_are_chosen_for_as_many_rows_as_asked(tmp_path: Path) -> None:
    wanted = ("core.layout=bucketed", "core.max_batch_size=16")
    for asked, best in ((4, 4), (64, 16)):
        plan = plan_of(tmp_path / str(asked), *wanted, f"core.engine.opt_batch_size={asked}")
        assert {p["row_length"].optimum for p in engine_of(plan).profiles} == {(best, 1)}


def test_a_plan_comes_back_from_the_lock_as_it_was(tmp_path: Path) -> None:
    for layout in ("packed", "bucketed"):
        engine = engine_of(plan_of(tmp_path / layout, f"core.layout={layout}"))
        assert EnginePlan.from_dict(json.loads(json.dumps(engine.as_dict()))) == engine
