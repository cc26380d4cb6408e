"""New traffic against that a pipeline was built for: what moved, its cost, what to do about it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drift_cases import MAX_LENGTH, built_for, draw, exact, read_minilm
from triptych.core.inputs import PipelineInputs
from triptych.operate.tune.drift import Drift, check_drift, format_drift
from triptych.operate.tune.new_traffic import NewTraffic
from triptych.operate.tune.proposal import MeasuredLoad, diff_tuned
from triptych.spec.plan import Layout, choose_edges
from triptych.spec.slo import Slo
from triptych.spec.traffic import Lengths
from tune_cases import SEARCH

LAYOUTS: tuple[Layout, ...] = ("packed", "bucketed")
USUAL = draw(30, 400, 0)
MEASURED = MeasuredLoad.of((), SEARCH, Slo())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PipelineInputs:
    return read_minilm(tmp_path_factory.mktemp("drift"))


def checked(pipeline: PipelineInputs, new: NewTraffic, **options: Any) -> Drift:
    """The verdict, which is written as JSON and as text."""
    found = check_drift(pipeline, new, **options)
    json.dumps(found.as_dict(), allow_nan=False)
    assert [line for line, _ in format_drift(found)]
    return found


def verdict(
    inputs: PipelineInputs, old: Sequence[int], new: Sequence[int], layout: Layout
) -> Drift:
    return checked(built_for(inputs, old, layout), exact(new))


def test_rows_drift_if_chance_cannot_explain_them(inputs: PipelineInputs) -> None:
    for layout in LAYOUTS:
        for rows in (1, 3, 20, 200, 5000):
            for seed in range(1, 9):
                same = verdict(inputs, USUAL, draw(30, rows, seed), layout)
                assert not same.drifted, (layout, rows, seed)
                assert (same.action, same.command) == ("keep", "")
        for mean in (12, 80):
            found = verdict(inputs, USUAL, draw(mean, 300, 1), layout)
            assert found.drifted
            assert (found.action, found.command) == ("tune again", "triptych tune minilm")
            assert (found.work > 1) == (mean > 30)
            assert "traffic.jsonl" in found.first
            if layout == "packed":
                ratio = found.now.mean_tokens / found.before.mean_tokens
                assert found.work == pytest.approx(ratio)
    few = verdict(inputs, USUAL, [MAX_LENGTH] * 2, "packed")
    assert not few.drifted
    assert any("with these few rows" in note for note in few.notes)
    cut = verdict(inputs, USUAL, [900] * 40, "bucketed")
    assert cut.drifted
    assert cut.now.at_limit_share == 1.0
    assert cut.best.bucket_edges == (MAX_LENGTH,)
    # A look every hour needs more to call it drift.
    new = exact(draw(36, 250, 1))
    once = checked(built_for(inputs, USUAL, "packed"), new)
    often = checked(built_for(inputs, USUAL, "packed"), new, significance=1e-6)
    assert (once.distance, once.noise < often.noise) == (often.distance, True)


def test_a_build_is_asked_for_where_the_present_settings_cost(inputs: PipelineInputs) -> None:
    new = [15, 25, 35, 45, 55, 21] * 50
    found = verdict(inputs, [10, 20, 30, 40, 50, 60] * 50, new, "bucketed")
    assert found.settings.bucket_edges == (10, 20, 30, 40, 60, MAX_LENGTH)
    best = choose_edges(Lengths.of(new, max_length=MAX_LENGTH), MAX_LENGTH, count=6)
    assert found.best.bucket_edges == best
    present, fewest = 20 + 30 + 40 + 60 + 60 + 30, 15 + 25 + 35 + 45 + 55 + 25
    assert found.excess == pytest.approx(present / fewest - 1)
    assert (found.action, found.command) == ("rebuild", "triptych build minilm")
    assert f"{found.excess:.1%}" in found.cost
    # A drift that costs nothing changes nothing.
    found = verdict(inputs, [10] * 100 + [20] * 100, [10] * 130 + [20] * 60, "bucketed")
    assert (found.drifted, found.excess, found.action) == (True, 0, "keep")
    # A tail beyond the warm-ups needs a build.
    found = verdict(inputs, [20] * 300, [15] * 280 + [90] * 20, "packed")
    assert (found.drifted, found.action) == (True, "rebuild")
    assert found.work == pytest.approx(1.0)
    assert found.best.warm_up_tokens == (15, 90)


def test_a_promise_that_breaks_asks_for_tuning_even_without_drift(inputs: PipelineInputs) -> None:
    pipeline, same = built_for(inputs, USUAL, "packed"), exact(USUAL)
    fine = checked(pipeline, same, measured=MEASURED, rate_per_s=150.0)
    assert (fine.action, fine.capacity is not None and fine.capacity.holds) == ("keep", True)
    found = checked(pipeline, same, measured=MEASURED, rate_per_s=240.0)
    assert (found.action, found.first) == ("tune again", "")
    assert "240/s" in found.reason
    assert any("p99 about" in line for line, _ in format_drift(found))
    counted = replace(same, rows_per_s=240.0)
    assert checked(pipeline, counted, measured=MEASURED).action == "tune again"
    # Without the steps all work is taken to be the core's.
    bare = replace(MEASURED, core_share=None)
    found = checked(inputs, same, measured=bare, rate_per_s=10.0)
    assert any("was not measured" in note for note in found.notes)
    assert found.capacity is not None
    assert found.capacity.work == found.work
    # Rows of that load had half the tokens: the same rows now are no work that was not there.
    assert pipeline.plan.lengths is not None
    half = replace(MEASURED, row_tokens=pipeline.plan.lengths.mean / 2)
    found = checked(pipeline, same, measured=half, rate_per_s=10.0)
    assert found.capacity is not None
    assert found.capacity.work == pytest.approx(1 - 0.9 + 0.9 * 2)
    assert found.work == pytest.approx(1.0)


def test_what_is_proposed_has_its_effect_and_its_diff(inputs: PipelineInputs) -> None:
    old, new = draw(15, 400, 0), draw(75, 300, 1)
    cases: tuple[tuple[Layout, dict[str, int]], ...] = (
        ("bucketed", {"core.bucket_count": 12}),
        ("packed", {}),
    )
    for layout, changes in cases:
        pipeline = built_for(inputs, old, layout)
        found = checked(pipeline, exact(new), measured=MEASURED, rate_per_s=40.0)
        proposal, capacity = found.proposal, found.capacity
        assert proposal is not None
        assert proposal.capacity is not None
        assert capacity is not None
        assert proposal.changes == changes
        text = "\n".join(line for line, _ in format_drift(found))
        assert "proposed: a build with the new requests" in text
        if changes:  # padded to lengths of other rows
            assert proposal.core_work < 0.8
            assert proposal.capacity.highest_per_s > 1.1 * capacity.highest_per_s
            assert diff_tuned(proposal)[3:] == ("+set:", "+  core.bucket_count: 12")
            assert f"{1 - proposal.core_work:.0%} less work" in text
        else:
            assert proposal.core_work == pytest.approx(1.0)
            assert (proposal.capacity, diff_tuned(proposal)) == (capacity, ())
            assert "the same work of the core per row" in text
    assert checked(pipeline, exact(draw(15, 300, 2))).proposal is None
    slow = checked(pipeline, exact(new), measured=MEASURED, rate_per_s=400.0).proposal
    assert slow is not None
    assert slow.servers is not None
    assert slow.servers > 400 / 200
