"""The plan: padded lengths, costs of both layouts, shapes of GPU cores, memory of a batch."""

import itertools
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.plan_cases import facts
from tests.support.project import LAYOUTS, write_pipeline
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.requests import core_feed
from triptych.models.info import ImageInfo
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.spec.engine_plan import MAX_GRAPHS, EnginePlan, RowCost, row_cost
from triptych.spec.padded_lengths import bucket_of, choose_edges
from triptych.spec.plan import Plan, batch_mib, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths
from triptych.tasks.catalog import image_classification, reranking, text_embedding

LENGTHS = Lengths.of([5, 9, 12, 17, 30, 31, 60, 200], max_length=256)
EVEN = Lengths.of([32] * 8, max_length=512)
MIXED = Lengths.of([4, 9, 16, 30, 70, 200], max_length=512)
TENSORRT = ("core.backend=tensorrt", "core.precision=fp16")


def plan_of(
    folder: Path, *overrides: str, lengths: Lengths = LENGTHS, layout: Any = None, **info: Any
) -> Plan:
    """Return the plan of a new pipeline."""
    spec = load_spec(write_pipeline(folder / "a"), overrides)
    return make_plan(spec, facts(**info), text_embedding.TASK, {}, lengths, layout=layout)


def engine_of(plan: Plan) -> EnginePlan:
    assert plan.engine is not None
    return plan.engine


def padded_tokens(lengths: Lengths, edges: tuple[int, ...]) -> int:
    return sum(bucket_of(length, edges) * rows for length, rows in lengths.counts.items())


def test_edges_equal_those_of_an_exhaustive_search() -> None:
    longest = 14
    for seed, multiple in itertools.product(range(25), (1, 4)):
        chance = random.Random(seed)
        count = chance.randint(1, 4)
        rows = [chance.randint(1, longest) for _ in range(chance.randint(1, 30))]
        lengths = Lengths.of(rows, max_length=longest)
        inner = [edge for edge in range(1, longest) if edge % multiple == 0]
        best = min(
            padded_tokens(lengths, (*choice, longest))
            for size in range(count)
            for choice in itertools.combinations(inner, size)
        )
        edges = choose_edges(lengths, longest, count=count, multiple=multiple)
        assert padded_tokens(lengths, edges) == best, (seed, multiple)
        assert len(edges) <= count
        assert list(edges) == sorted(set(edges))
        assert all(edge % multiple == 0 for edge in edges[:-1])


def test_the_plan_follows_from_its_inputs_alone(tmp_path: Path) -> None:
    two = ("core.layout=bucketed", "core.bucket_count=2")
    lengths = Lengths.of([3, 9, 9, 40, 70], max_length=64)
    first = plan_of(tmp_path / "a", *two, lengths=lengths, max_length=64)
    assert make_plan(first.encoder_spec, first.info, first.task, {}, lengths) == first
    assert first.bucket_edges[-1] == first.max_length == 64
    assert 0 < first.padding_share < 1
    assert [w.tokens for w in first.warm_ups] == list(first.bucket_edges)
    packed = plan_of(tmp_path / "b", "tokenizer.max_length=16", lengths=lengths, max_length=64)
    assert (packed.max_length, packed.bucket_edges, packed.padding_share) == (16, (), 0)
    # Padded lengths on a GPU suit tensor cores.
    lengths = Lengths.of([3, 9, 11, 21, 40, 50], max_length=64)
    on_gpu = ("core.layout=bucketed", "core.device=gpu")
    plan = plan_of(tmp_path / "c", *on_gpu, lengths=lengths, max_length=64)
    assert all(edge % 8 == 0 for edge in plan.bucket_edges)


def cost(lengths: Lengths = EVEN, edges: tuple[int, ...] = (32, 512), **more: Any) -> RowCost:
    given: dict[str, Any] = {"on_gpu": False, "rows": 32, "longest": 32.0, "graphs": False, **more}
    return row_cost(facts(max_length=512), lengths, edges, **given)


def test_padding_runs_and_long_neighbors_cost_what_they_compute() -> None:
    found = cost()
    assert found.packed == pytest.approx(found.bucketed)  # rows of one length
    assert cost(edges=(64, 512)).bucketed == pytest.approx(2 * found.bucketed, rel=0.05)
    figures = [cost(longest=tokens).packed for tokens in (32.0, 1000.0, 16_000.0)]
    assert figures == sorted(figures)
    assert figures[-1] > 3 * figures[0]
    # Starting a run counts on a GPU, and graphs start faster.
    plain, graphs = (cost(MIXED, (8, 32, 512), on_gpu=True, graphs=each) for each in (False, True))
    assert graphs.bucketed < plain.bucketed
    assert graphs.packed == plain.packed
    few = cost(MIXED, (512,), on_gpu=True, rows=4).bucketed
    one_length = cost(Lengths.of([512] * 6, max_length=512), (512,), on_gpu=True, rows=4)
    assert few == pytest.approx(one_length.bucketed)


def test_auto_takes_the_cheaper_layout_unless_it_was_proven_impossible(tmp_path: Path) -> None:
    for backend, lengths, layout in (
        ("onnxruntime", Lengths.of(range(4, 200), max_length=512), "packed"),
        ("tensorrt", Lengths.of([500] * 9, max_length=512), "bucketed"),
    ):
        wanted = ("core.layout=auto", f"core.backend={backend}")
        plan = plan_of(tmp_path / backend, *wanted, lengths=lengths, max_length=512)
        assert plan.cost is not None
        assert plan.layout == plan.cost.cheaper == layout
    forced = plan_of(tmp_path / "forced", "core.layout=auto", lengths=MIXED, layout="bucketed")
    assert forced.layout == "bucketed"


def test_every_batch_of_every_length_has_one_graph(tmp_path: Path) -> None:
    wanted = ("core.layout=bucketed", "core.bucket_count=4", "core.max_batch_size=24")
    plan = plan_of(tmp_path / "a", *TENSORRT, *wanted)
    assert len(engine_of(plan).graph_specs) == MAX_GRAPHS
    for edge in plan.bucket_edges:
        specs = [s for s in engine_of(plan).graph_specs if s.inputs["input_ids"] == (edge,)]
        for rows in range(1, 25):
            fitting = [s for s in specs if s.lowest_batch_size <= rows <= s.batch_size]
            assert len(fitting) == 1
            assert fitting[0].batch_size < 2 * rows or rows > 16
        assert {spec.inputs["row_length"] for spec in specs} == {(1,)}


def test_of_many_shapes_the_frequent_and_small_ones_have_a_graph(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "a", *TENSORRT, "core.layout=bucketed", "core.bucket_count=8")
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
    for case in itertools.product(LAYOUTS, ("fp32", "fp16"), sizes):
        layout, precision, max_length = case
        wanted = [f"core.{name}" for name in (f"precision={precision}", f"layout={layout}")]
        wanted += ["core.max_batch_size=1024", "core.max_batch_mib=500"]
        folder = tmp_path / "-".join(map(str, case))
        plan = plan_of(folder, *TENSORRT, *wanted, max_length=max_length)
        rows, element = plan.max_batch_size, 4 if precision == "fp32" else 2
        measure = partial(batch_mib, plan.info, plan.spec.core, tokens=max_length)
        each = measure(rows=1)
        # Four tensors of scores of 12 heads, or the feed-forward part, are alive at once.
        assert each * 2**20 > element * max_length * max(48 * max_length, 3 * 1536), case
        own = measure(rows=rows, packed=layout == "packed")
        assert plan.batch_mib == pytest.approx(own), case
        assert own <= rows * each, case
        assert rows == 1024 or each > 500 or rows * each <= 500 < (rows + 1) * each, case
        assert (rows == 1) == (each > 250), case
        assert plan.request_rows == rows, case


def test_images_have_one_profile_and_graphs(tmp_path: Path) -> None:
    image = ImageInfo.__new__(ImageInfo)
    for name, value in {"height": 8, "width": 6, "channels": 3}.items():
        object.__setattr__(image, name, value)
    spec = load_spec(write_pipeline(tmp_path / "a"), [*TENSORRT, "core.max_batch_size=4"])
    pictured = facts(image=image, labels=("a", "b"))
    plan = make_plan(spec, pictured, image_classification.TASK, {"top_k": 1}, None)
    (profile,) = engine_of(plan).profiles
    assert profile["pixels"].minimum == (1, 8, 6, 3)
    assert profile["pixels"].maximum == (4, 8, 6, 3)
    assert [g.batch_size for g in engine_of(plan).graph_specs] == [1, 2, 4]
    assert plan.cost is None


def test_kernels_are_chosen_for_as_many_rows_as_asked(tmp_path: Path) -> None:
    wanted = ("core.layout=bucketed", "core.max_batch_size=16")
    for asked, best in ((4, 4), (64, 16)):
        plan = plan_of(
            tmp_path / str(asked), *TENSORRT, *wanted, f"core.engine.opt_batch_size={asked}"
        )
        assert {p["row_length"].optimum for p in engine_of(plan).profiles} == {(best, 1)}


def test_pairs_have_their_first_segment_in_every_shape_and_the_lock_keeps_all(
    tmp_path: Path,
) -> None:
    folder = write_pipeline(tmp_path / "a", task="reranking")
    for layout in LAYOUTS:
        spec = load_spec(folder, [*TENSORRT, f"core.layout={layout}"])
        plan = make_plan(spec, facts(segments=2, labels=("a",)), reranking.TASK, {}, LENGTHS)
        engine = engine_of(plan)
        assert all("first_segment" in profile for profile in engine.profiles)
        assert all("first_segment" in graph.inputs for graph in engine.graph_specs)
        assert EnginePlan.from_dict(json.loads(json.dumps(engine.as_dict()))) == engine


RUN = """
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from triptych.repository.config import session_parameters
from triptych.spec.fields import SessionOptions


def status_mib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
parameters = session_parameters(SessionOptions())
options.enable_mem_pattern = parameters["enable_mem_pattern"] != "0"
shrinkage = "memory.enable_memory_arena_shrinkage"
run_options.add_run_config_entry(shrinkage, parameters[shrinkage])
session = onnxruntime.InferenceSession(sys.argv[1], options)
feed = dict(np.load(sys.argv[2]))
session.run(None, feed, run_options)  # the first run allocates what later ones keep
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status_mib("VmRSS")
session.run(None, feed, run_options)
print(status_mib("VmHWM") - before, status_mib("VmRSS") - before)
"""
"""Prints the MiB by which a process grows at most while it computes a batch, and afterwards."""


@pytest.mark.server  # it takes the repository that the tests of servers share
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_takes_the_memory_that_was_predicted_and_returns_it(
    layout: str, minilm_repository: Path, tmp_path: Path
) -> None:
    """Half of the largest batch, for which the prediction is a half, takes less time.

    With a fixed threshold, glibc returns each large block when it is freed. Without it, glibc
    raises the threshold and sometimes keeps a fifth of a batch, which ONNX Runtime has released.
    """
    name = f"minilm_{layout}"
    plan = read_manifest(minilm_repository, name, CompiledManifest).plan
    assert plan.batch_mib is not None
    row = TokenRow(tuple(range(1000, 1000 + plan.max_length)), plan.max_length)
    inputs = (INPUT_IDS, ROW_LENGTH, *([ROW_OFFSET] if layout == "packed" else []))
    rows = [row] * (plan.max_batch_size // 2)
    np.savez(tmp_path / "feed.npz", **core_feed(rows, inputs, pad_token_id=0))
    artifact = minilm_repository / f"{name}_core/1/model.onnx"
    command: list[str | Path] = [sys.executable, "-c", RUN, artifact, tmp_path / "feed.npz"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    peak_mib, kept_mib = map(float, done.stdout.split())
    assert 0.9 <= peak_mib / (plan.batch_mib / 2) <= 1.2
    assert kept_mib < 0.2 * peak_mib
