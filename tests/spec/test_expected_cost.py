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


def test_rows_of_one_length_cost_the_same_in_both_layouts() -> None:
    found = cost()
    assert found.packed == pytest.approx(found.bucketed)


def test_padding_costs_what_it_computes() -> None:
    assert cost(edges=(64, 512)).bucketed == pytest.approx(2 * cost().bucketed, rel=0.05)


def test_a_longer_row_in_the_packed_batch_costs_the_others_more() -> None:
    figures = [cost(longest=tokens).packed for tokens in (32.0, 1000.0, 16_000.0)]
    assert figures == sorted(figures)
    assert figures[-1] > 3 * figures[0]


def test_starting_a_run_counts_on_a_gpu_and_graphs_start_faster() -> None:
    plain, graphs = (cost(MIXED, (8, 32, 512), on_gpu=True, graphs=each) for each in (False, True))
    assert graphs.bucketed < plain.bucketed
    assert graphs.packed == plain.packed


def test_more_lengths_make_more_runs_of_the_same_batch() -> None:
    few = cost(MIXED, (512,), on_gpu=True, rows=4).bucketed
    one_length = cost(Lengths.of([512] * 6, max_length=512), (512,), on_gpu=True, rows=4)
    assert few == pytest.approx(one_length.bucketed)


@pytest.mark.parametrize(
    ("overrides", "lengths", "layout"),
    [
        ([], Lengths.of(range(4, 200), max_length=512), "packed"),
        (["core.backend=tensorrt"], Lengths.of([500] * 9, max_length=512), "bucketed"),
    ],
)
def test_auto_takes_the_cheaper_layout(
    tmp_path: Path, overrides: list[str], lengths: Lengths, layout: str
) -> None:
    spec = load_spec(write_pipeline(tmp_path / "a"), ["core.layout=auto", *overrides])
    plan = make_plan(spec, FACTS, TEXT_EMBEDDING, {}, lengths)
    assert plan.cost is not None
    assert plan.layout == plan.cost.cheaper == layout


def test_a_layout_that_was_proven_impossible_is_not_chosen_again(tmp_path: Path) -> None:
    spec = load_spec(write_pipeline(tmp_path / "a"), ["core.layout=auto"])
    plan = make_plan(spec, FACTS, TEXT_EMBEDDING, {}, MIXED, layout="bucketed")
    assert plan.layout == "bucketed"
