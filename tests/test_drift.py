"""New traffic against that a pipeline was built for: read, compared, and what to do about it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TRAFFIC_ROWS, quiet, traffic_texts, write_pipeline
from test_capacity import SEARCH
from triptych.bench.metrics_page import read_metrics
from triptych.errors import UserError
from triptych.pipeline.slo import Slo
from triptych.pipeline.spec import load_spec
from triptych.pipeline.traffic import Lengths
from triptych.plan.plan import Layout, choose_edges, make_plan
from triptych.requests.inputs import PipelineInputs, read_inputs
from triptych.tune.capacity import MeasuredLoad
from triptych.tune.drift import Drift, check_drift, describe_drift
from triptych.tune.new_traffic import NewTraffic, count_page, read_lengths
from triptych.tune.proposal import tuned_diff

MAX_LENGTH = 256
EDGES = [4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 51, 64, 81, 102, 128, 161, 203, 255, 256]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PipelineInputs:
    folder = write_pipeline(tmp_path_factory.mktemp("drift") / "minilm")
    return read_inputs(load_spec(folder), quiet)


def built_for(inputs: PipelineInputs, lengths: Sequence[int], layout: Layout) -> PipelineInputs:
    """As if the pipeline's traffic had been of these lengths."""
    old = inputs.plan
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    plan = make_plan(old.spec, old.facts, old.task, old.parameters, counted, layout=layout)
    return replace(inputs, plan=plan, traffic=({"text": ""},) * len(lengths))


def exact(lengths: Sequence[int]) -> NewTraffic:
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    return NewTraffic("a test", counted, counted.mean)


def draw(mean: float, rows: int, seed: int) -> list[int]:
    """Lengths as texts have them: many short ones, a long tail."""
    chance = random.Random(seed)
    return [min(MAX_LENGTH, 3 + int(chance.expovariate(1 / mean))) for _ in range(rows)]


def page_of(
    lengths: Sequence[int], edges: Sequence[int] = EDGES, *, pipeline: str = "minilm"
) -> str:
    """The metrics page of a server that counted them, in no order, beside other metrics."""
    lines = [
        f'triptych_row_tokens_bucket{{le="{edge}",pipeline="{pipeline}"}} '
        f"{sum(length <= edge for length in lengths)}"
        for edge in edges
    ]
    lines += [
        f'triptych_row_tokens_bucket{{le="+Inf",pipeline="{pipeline}"}} {len(lengths)}',
        f'triptych_row_tokens_count{{pipeline="{pipeline}"}} {len(lengths)}',
        f'triptych_row_tokens_sum{{pipeline="{pipeline}"}} {sum(lengths)}',
        f'nv_inference_count{{model="{pipeline}",version="1"}} 7',
        "# TYPE triptych_row_tokens_bucket counter",
    ]
    random.Random(1).shuffle(lines)
    return "\n".join(lines) + "\n"


def verdict(
    inputs: PipelineInputs, old: Sequence[int], new: Sequence[int], layout: Layout
) -> Drift:
    found = check_drift(built_for(inputs, old, layout), exact(new))
    json.dumps(found.as_dict(), allow_nan=False)
    assert [line for line, _ in describe_drift(found)]
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
    assert any("so few rows" in note for note in found.notes)


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


# What the server counted


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
@pytest.mark.parametrize("mean", [30, 80])
def test_counted_rows_lead_to_what_the_rows_do(
    inputs: PipelineInputs, mean: float, layout: Layout
) -> None:
    pipeline = built_for(inputs, draw(30, 400, 0), layout)
    new = draw(mean, 3000, 1)
    edges = sorted({*EDGES, *pipeline.plan.bucket_edges})
    counted = count_page(pipeline.plan, read_metrics(page_of(new, edges)), "a page")
    assert counted.lengths.rows == 3000
    assert counted.mean == pytest.approx(sum(new) / 3000)
    by_rows, by_page = check_drift(pipeline, exact(new)), check_drift(pipeline, counted)
    assert by_page.work == pytest.approx(by_rows.work)
    assert by_page.distance == pytest.approx(by_rows.distance, abs=0.03)
    assert by_page.distance <= by_rows.distance
    assert by_page.now.at_limit_share == by_rows.now.at_limit_share
    assert by_page.excess == pytest.approx(by_rows.excess, abs=0.03)
    assert by_page.action == by_rows.action
    assert 0.15 < by_page.blur < 0.27
    for name in ("p50_tokens", "p99_tokens"):
        wanted = getattr(by_rows.now, name)
        assert abs(getattr(by_page.now, name) - wanted) <= by_page.blur * wanted + 1


def test_two_pages_count_what_lies_between(inputs: PipelineInputs, tmp_path: Path) -> None:
    old, new = draw(30, 500, 1), draw(80, 700, 2)
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(page_of(old))
    after.write_text(page_of([*old, *new]) + page_of([9] * 50, pipeline="another"))
    os.utime(before, (1000, 1000))
    os.utime(after, (1035, 1035))
    found = read_lengths(inputs, after, before=before)
    assert (found.lengths.rows, found.rows_per_s) == (700, 20.0)
    assert found.mean == pytest.approx(sum(new) / 700)
    assert read_lengths(inputs, after, before=before, seconds=7).rows_per_s == 100.0
    assert read_lengths(inputs, after).lengths.rows == 1200
    assert check_drift(inputs, found).rate_per_s == 20.0


def test_a_restart_between_the_pages_counts_from_there(inputs: PipelineInputs) -> None:
    before, after = (read_metrics(page_of(draw(30, rows, rows))) for rows in (900, 400))
    found = count_page(inputs.plan, after, "after", before=before, seconds=60)
    assert (found.lengths.rows, found.rows_per_s) == (400, None)
    assert "anew" in found.notes[0]


def test_servers_add_up_and_other_builds_are_named(inputs: PipelineInputs) -> None:
    one, two = draw(30, 100, 1), draw(30, 200, 2)
    page = page_of(one) + page_of(two)
    assert count_page(inputs.plan, read_metrics(page), "two").lengths.rows == 300
    longer = count_page(inputs.plan, read_metrics(page_of([300], [*EDGES, 384, 512])), "longer")
    assert longer.lengths.counts == {MAX_LENGTH: 1}
    assert "other numbers" in check_drift(inputs, longer).notes[-1]
    bucketed = built_for(inputs, [11, 22, 33] * 40, "bucketed")
    found = check_drift(bucketed, count_page(bucketed.plan, read_metrics(page_of(one)), "packed"))
    assert "other padded lengths" in found.notes[-1]


def damage(change: Callable[[str], str]) -> str:
    return change(page_of([9] * 20))


def without(word: str) -> Callable[[str], str]:
    return lambda page: "\n".join(line for line in page.splitlines() if word not in line)


PAGES = {
    "empty": "",
    "no text": "\x00\xff{}{}{ 1 2 3\n" * 50,
    "another pipeline's": page_of([9], pipeline="another"),
    "no +Inf": damage(without("+Inf")),
    "no sum": damage(without("_sum")),
    "only +Inf": damage(lambda page: without('le="')(page.replace('le="+Inf"', "le='x'"))),
    "no rows": page_of([]),
    "not a number": damage(lambda page: page.replace("} 20", "} NaN", 1)),
    "infinite": damage(lambda page: page.replace("} 20", "} +Inf")),
    "negative": damage(lambda page: page.replace("} 0", "} -4", 1)),
    "huge": damage(lambda page: page.replace("} 20", "} 1e300")),
    "falling": page_of([3] * 20).replace(
        'le="+Inf",pipeline="minilm"} 20', 'le="+Inf",pipeline="minilm"} 2'
    ),
    "odd end": damage(lambda page: page.replace('le="4"', 'le="four"')),
    "end that is no number": damage(lambda page: page.replace('le="4"', 'le="NaN"')),
    "too many tokens": damage(lambda page: page.replace("} 180", "} 18000000")),
    "two builds": page_of([9] * 3) + page_of([9] * 4, [*EDGES, 512]),
}


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_that_makes_no_sense_is_refused(
    inputs: PipelineInputs, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "page.txt"
    path.write_text(PAGES[kind], encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as refused:
        read_lengths(inputs, path)
    assert refused.value.field == str(path)
    assert refused.value.remedy


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_of_no_time_is_refused(inputs: PipelineInputs, seconds: float) -> None:
    with pytest.raises(UserError, match="must be above 0"):
        count_page(inputs.plan, read_metrics(page_of([9])), "page", seconds=seconds)


def test_a_page_saved_amid_a_flush_loses_no_row(inputs: PipelineInputs) -> None:
    after = read_metrics(page_of([3] * 10 + [60] * 10))
    torn = [
        (name, labels, 4.0 if labels.get("le") in ("+Inf", "256", "255") else 0.0)
        for name, labels, _ in read_metrics(page_of([3] * 4))
    ]
    found = count_page(inputs.plan, after, "after", before=torn)
    assert found.lengths.rows == 20


# A sample of requests


def write_sample(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_sample_is_tokenized_as_the_traffic_is(inputs: PipelineInputs, tmp_path: Path) -> None:
    found = read_lengths(
        inputs, write_sample(tmp_path / "new.jsonl", traffic_texts()[:TRAFFIC_ROWS])
    )
    assert found.lengths == inputs.plan.lengths
    assert check_drift(inputs, found).distance == 0
    cut = read_lengths(inputs, write_sample(tmp_path / "cut.jsonl", ["word " * 900, "word"]))
    assert cut.lengths == Lengths({3: 1, MAX_LENGTH: 1}, rows=2, truncated_rows=1)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("", "new.jsonl"),
        ("\n\n", "new.jsonl"),
        ('{"text": "fine"}\n{"text": 1}', "new.jsonl:2: text"),
        ("not json", "new.jsonl:1"),
        ('{"text": "a", "parameters": {"no_such": 1}}', "new.jsonl:1"),
        ('{"text": "a", "parameters": 1}', "new.jsonl:1: parameters"),
        (None, "new.jsonl"),
    ],
)
def test_a_bad_sample_is_refused(
    inputs: PipelineInputs, tmp_path: Path, content: str | None, where: str
) -> None:
    path = tmp_path / "new.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_lengths(inputs, path)
    assert refused.value.field.endswith(where)


def test_images_have_no_lengths(inputs: PipelineInputs, tmp_path: Path) -> None:
    images = replace(inputs, plan=replace(inputs.plan, lengths=None))
    for path in (write_sample(tmp_path / "new.jsonl", ["a"]), tmp_path / "page.txt"):
        path.write_text(page_of([9])) if path.suffix == ".txt" else None
        with pytest.raises(UserError, match="rows of tokens"):
            read_lengths(images, path)


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
    assert any("p99 about" in line for line, _ in describe_drift(found))
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
        text = "\n".join(line for line, _ in describe_drift(found))
        assert "proposed: a build with the new requests" in text
        if changes:  # padded to lengths of other rows
            assert proposal.core_work < 0.8
            assert proposal.capacity.highest_per_s > 1.1 * capacity.highest_per_s
            assert tuned_diff(proposal)[3:] == ("+set:", "+  core.bucket_count: 12")
            assert f"works {1 - proposal.core_work:.0%} less" in text
        else:
            assert proposal.core_work == pytest.approx(1.0)
            assert (proposal.capacity, tuned_diff(proposal)) == (capacity, ())
            assert "as much for a row" in text
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
    often = check_drift(built_for(inputs, old, "packed"), new, chance=1e-6)
    assert (once.distance, once.noise < often.noise) == (often.distance, True)
