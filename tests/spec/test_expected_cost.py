"""The estimate that `layout: auto` goes by: it moves as arithmetic says, and no further."""

from pathlib import Path
from typing import Any

import pytest

from conftest import write_pipeline
from triptych.spec.engine_plan import RowCost, row_cost
from triptych.spec.model_info import ModelInfo
from triptych.spec.plan import make_plan
from triptych.spec.spec import load_spec
from triptych.spec.tasks.catalog import TEXT_EMBEDDING
from triptych.spec.traffic import Lengths

FACTS = ModelInfo(
    sha256="0", architecture="B", hidden_size=384, max_length=512, pad_token_id=0, layers=6
)
EVEN = Lengths.of([32] * 8, max_length=512)
MIXED = Lengths.of([4, 9, 16, 30, 70, 200], max_length=512)


def cost(lengths: Lengths = EVEN, edges: tuple[int, ...] = (32, 512), **more: Any) -> RowCost:
    given: dict[str, Any] = {
        "on_gpu": False,
        "rows": 32,
        "longest": 32.0,
        "graphs": False,
        **more,
    }
    return row_cost(FACTS, lengths, edges, **given)


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
    folder = write_pipeline(tmp_path / "a")
    for overrides, lengths, layout in (
        ([], Lengths.of(range(4, 200), max_length=512), "packed"),
        (["core.backend=tensorrt"], Lengths.of([500] * 9, max_length=512), "bucketed"),
    ):
        spec = load_spec(folder, ["core.layout=auto", *overrides])
        plan = make_plan(spec, FACTS, TEXT_EMBEDDING, {}, lengths)
        assert plan.cost is not None
        assert plan.layout == plan.cost.cheaper == layout
    spec = load_spec(folder, ["core.layout=auto"])
    plan = make_plan(spec, FACTS, TEXT_EMBEDDING, {}, MIXED, layout="bucketed")
    assert plan.layout == "bucketed"
