"""New traffic against that a pipeline was built for: what moved, its cost, what to do about it."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from drift_cases import MAX_LENGTH, built_for, draw, exact, read_minilm
from triptych.core.inputs import PipelineInputs
from triptych.operate.tune.drift import Drift, check_drift, format_drift
from triptych.operate.tune.proposal import MeasuredLoad, diff_tuned
from triptych.spec.plan import Layout, choose_edges
from triptych.spec.slo import Slo
from triptych.spec.traffic import Lengths
from tune_cases import SEARCH


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PipelineInputs:
    return read_minilm(tmp_path_factory.mktemp("drift"))


def verdict(
    inputs: PipelineInputs, old: Sequence[int], new: Sequence[int], layout: Layout
) -> Drift:
    found = check_drift(built_for(inputs, old, layout), exact(new))
    json.dumps(found.as_dict(), allow_nan=False)
    assert [line for line, _ in format_drift(found)]
    return found


# What moved


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
@pytest.mark.parametrize("rows", [1, 3, 20, 200, 5000])
def test_samples_of_one_distribution_are_no_drift(
    inputs: PipelineInputs, rows: int, layout: Layout
) -> None:
    old = draw(30, 400, seed=0)
    for seed in range(1, 9):
        found = verdict(inputs, old, draw(30, rows, seed), layout)
        assert not found.drifted
        assert (found.action, found.command) == ("keep", "")


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
@pytest.mark.parametrize("mean", [12, 80])
def test_other_lengths_are_drift_and_change_the_work(
    inputs: PipelineInputs, mean: float, layout: Layout
) -> None:
    found = verdict(inputs, draw(30, 400, 0), draw(mean, 300, 1), layout)
    assert found.drifted
    assert found.action == "tune again"
    assert (found.work > 1) == (mean > 30)
    assert found.command == "triptych tune minilm"
    assert "traffic.jsonl" in found.first
    if layout == "packed":
        assert found.work == pytest.approx(found.now.mean_tokens / found.before.mean_tokens)


def test_a_few_rows_prove_nothing_however_different(inputs: PipelineInputs) -> None:
    found = verdict(inputs, draw(30, 400, 0), [MAX_LENGTH] * 2, "packed")
    assert not found.drifted
    assert any("with these few rows" in note for note in found.notes)


def test_traffic_that_is_all_cut_is_drift(inputs: PipelineInputs) -> None:
    found = verdict(inputs, draw(30, 400, 0), [900] * 40, "bucketed")
    assert found.drifted
    assert found.now.at_limit_share == 1.0
    assert found.best.bucket_edges == (MAX_LENGTH,)


# What the present settings cost


def test_edges_for_other_rows_cost_padding_and_a_build_mends_it(inputs: PipelineInputs) -> None:
    old = [10, 20, 30, 40, 50, 60] * 50
    new = [15, 25, 35, 45, 55, 21] * 50
    found = verdict(inputs, old, new, "bucketed")
    assert found.settings.bucket_edges == (10, 20, 30, 40, 60, MAX_LENGTH)
    best = choose_edges(Lengths.of(new, max_length=MAX_LENGTH), MAX_LENGTH, count=6)
    assert found.best.bucket_edges == best
    present, fewest = 20 + 30 + 40 + 60 + 60 + 30, 15 + 25 + 35 + 45 + 55 + 25
    assert found.excess == pytest.approx(present / fewest - 1)
    assert (found.action, found.command) == ("rebuild", "triptych build minilm")
    assert f"{found.excess:.1%}" in found.cost


def test_a_drift_that_costs_nothing_changes_nothing(inputs: PipelineInputs) -> None:
    old = [10] * 100 + [20] * 100
    found = verdict(inputs, old, [10] * 130 + [20] * 60, "bucketed")
    assert found.drifted
    assert found.excess == 0
    assert found.action == "keep"


def test_a_tail_beyond_the_warm_ups_asks_for_a_build(inputs: PipelineInputs) -> None:
    old = [20] * 300
    found = verdict(inputs, old, [15] * 280 + [90] * 20, "packed")
    assert found.drifted
    assert found.work == pytest.approx(1.0)
    assert found.action == "rebuild"
    assert found.best.warm_up_tokens == (15, 90)


# What becomes of the capacity


def test_a_promise_that_breaks_asks_for_tuning_even_without_drift(inputs: PipelineInputs) -> None:
    pipeline = built_for(inputs, draw(30, 400, 0), "packed")
    measured = MeasuredLoad.of((), SEARCH, Slo())
    same = exact(draw(30, 400, 0))
    fine = check_drift(pipeline, same, measured=measured, rate_per_s=150.0)
    assert (fine.action, fine.capacity is not None and fine.capacity.holds) == ("keep", True)
    found = check_drift(pipeline, same, measured=measured, rate_per_s=240.0)
    assert (found.action, found.first) == ("tune again", "")
    assert "240/s" in found.reason
    assert any("p99 about" in line for line, _ in format_drift(found))
    json.dumps(found.as_dict(), allow_nan=False)
    counted = replace(same, rows_per_s=240.0)
    assert check_drift(pipeline, counted, measured=measured).action == "tune again"


def test_without_the_steps_all_work_is_taken_to_be_the_core_s(inputs: PipelineInputs) -> None:
    measured = replace(MeasuredLoad.of((), SEARCH, Slo()), core_share=None)
    found = check_drift(inputs, exact(draw(30, 400, 0)), measured=measured, rate_per_s=10.0)
    assert any("was not measured" in note for note in found.notes)
    assert found.capacity is not None
    assert found.capacity.work == found.work


# What is proposed


def test_what_is_proposed_has_its_effect_and_its_diff(inputs: PipelineInputs) -> None:
    old, new = draw(15, 400, 0), draw(75, 300, 1)
    measured = MeasuredLoad.of((), SEARCH, Slo())
    cases: tuple[tuple[Layout, dict[str, int]], ...] = (
        ("bucketed", {"core.bucket_count": 12}),
        ("packed", {}),
    )
    for layout, changes in cases:
        pipeline = built_for(inputs, old, layout)
        found = check_drift(pipeline, exact(new), measured=measured, rate_per_s=40.0)
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
        json.dumps(found.as_dict(), allow_nan=False)
    assert check_drift(pipeline, exact(draw(15, 300, 2))).proposal is None
    slow = check_drift(pipeline, exact(new), measured=measured, rate_per_s=400.0).proposal
    assert slow is not None
    assert slow.servers is not None
    assert slow.servers > 400 / 200


def test_what_was_measured_may_have_been_another_build(inputs: PipelineInputs) -> None:
    """Rows of that load had half the tokens: the same rows now are no work that was not there."""
    rows = draw(30, 400, 0)
    pipeline = built_for(inputs, rows, "packed")
    assert pipeline.plan.lengths is not None
    half = replace(MeasuredLoad.of((), SEARCH, Slo()), row_tokens=pipeline.plan.lengths.mean / 2)
    found = check_drift(pipeline, exact(rows), measured=half, rate_per_s=10.0)
    assert found.capacity is not None
    assert found.capacity.work == pytest.approx(1 - 0.9 + 0.9 * 2)
    assert found.work == pytest.approx(1.0)


def test_a_look_every_hour_needs_more_to_call_it_drift(inputs: PipelineInputs) -> None:
    old, new = draw(30, 400, 0), exact(draw(36, 250, 1))
    once = check_drift(built_for(inputs, old, "packed"), new)
    often = check_drift(built_for(inputs, old, "packed"), new, significance=1e-6)
    assert (once.distance, once.noise < often.noise) == (often.distance, True)
