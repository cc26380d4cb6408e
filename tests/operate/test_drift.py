"""New traffic: what is read of it, what moved since the build, its cost, what to do about it."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer

from conftest import TRAFFIC_ROWS, quiet, traffic_texts, write_pipeline
from mistakes import check_refused, refusal
from plan_cases import facts
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.operate.tune.drift import Drift, check_drift, format_drift
from triptych.operate.tune.new_traffic import NewTraffic, count_page, read_lengths
from triptych.operate.tune.proposal import MeasuredLoad, diff_tuned
from triptych.serving.bench.resources import read_metrics
from triptych.spec.plan import Layout, choose_edges, make_plan
from triptych.spec.slo import Slo
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths
from tune_cases import SEARCH

LAYOUTS: tuple[Layout, ...] = ("packed", "bucketed")
MAX_LENGTH = 256
EDGES = [4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 51, 64, 81, 102, 128, 161, 203, 255, 256]
MEASURED = MeasuredLoad.of((), SEARCH, Slo())


def draw(mean: float, rows: int, seed: int) -> list[int]:
    """Lengths as texts have them: many short ones, a long tail."""
    chance = random.Random(seed)
    return [min(MAX_LENGTH, 3 + int(chance.expovariate(1 / mean))) for _ in range(rows)]


USUAL = draw(30, 400, 0)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> PipelineInputs:
    """MiniLM with the traffic of tests, read without transformers.

    Pure tests have no torch, which transformers asks for before it reads a tokenizer.
    """
    folder = tmp_path_factory.mktemp("drift")
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    known = facts(mask_token="[MASK]"), folder / "tokenizer.json"
    with mock.patch("triptych.core.inputs.read_model", return_value=known):
        return read_inputs(load_spec(write_pipeline(folder / "minilm")), quiet)


def built_for(inputs: PipelineInputs, lengths: Sequence[int], layout: Layout) -> PipelineInputs:
    """As if the pipeline's traffic had been of these lengths."""
    old = inputs.plan
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    plan = make_plan(old.encoder_spec, old.info, old.task, old.parameters, counted, layout=layout)
    return replace(inputs, plan=plan, traffic=({"text": ""},) * len(lengths))


def exact(lengths: Sequence[int]) -> NewTraffic:
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    return NewTraffic("a test", counted, counted.mean)


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
        for rows, seed in product((1, 3, 20, 200, 5000), range(1, 9)):
            same = verdict(inputs, USUAL, draw(30, rows, seed), layout)
            found_for = (same.drifted, same.action, same.command)
            assert found_for == (False, "keep", ""), (layout, rows, seed)
        for mean in (12, 80):
            found = verdict(inputs, USUAL, draw(mean, 300, 1), layout)
            told = (found.drifted, found.action, found.command)
            assert told == (True, "tune again", "triptych tune minilm")
            assert (found.work > 1) == (mean > 30)
            assert "traffic.jsonl" in found.first
            if layout == "packed":
                ratio = found.now.mean_tokens / found.before.mean_tokens
                assert found.work == pytest.approx(ratio)
    few = verdict(inputs, USUAL, [MAX_LENGTH] * 2, "packed")
    assert not few.drifted
    assert any("with these few rows" in note for note in few.notes)
    cut = verdict(inputs, USUAL, [900] * 40, "bucketed")
    shown = (cut.drifted, cut.now.at_limit_share, cut.best.bucket_edges)
    assert shown == (True, 1.0, (MAX_LENGTH,))
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
    cases: dict[Layout, dict[str, int]] = {"bucketed": {"core.bucket_count": 12}, "packed": {}}
    for layout, changes in cases.items():
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


def counted(pipeline: PipelineInputs, page: str, before: str | None = None) -> NewTraffic:
    earlier = None if before is None else read_metrics(before)
    return count_page(pipeline.plan, read_metrics(page), "a page", before=earlier, seconds=60)


def test_counted_rows_lead_to_what_the_rows_do(inputs: PipelineInputs) -> None:
    for mean, layout in product((30, 80), LAYOUTS):
        pipeline = built_for(inputs, draw(30, 400, 0), layout)
        new = draw(mean, 3000, 1)
        edges = sorted({*EDGES, *pipeline.plan.bucket_edges})
        found = counted(pipeline, page_of(new, edges))
        assert found.lengths.rows == 3000
        assert found.mean == pytest.approx(sum(new) / 3000)
        by_rows, by_page = check_drift(pipeline, exact(new)), check_drift(pipeline, found)
        assert by_page.work == pytest.approx(by_rows.work)
        assert by_rows.distance - 0.03 < by_page.distance <= by_rows.distance
        assert by_page.excess == pytest.approx(by_rows.excess, abs=0.03)
        assert by_page.now.at_limit_share == by_rows.now.at_limit_share
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
    # A server that restarted between them counts from there.
    restarted = counted(inputs, page_of(draw(30, 400, 400)), page_of(draw(30, 900, 900)))
    assert (restarted.lengths.rows, restarted.rows_per_s) == (400, None)
    assert "restarted" in restarted.notes[0]
    # A page saved amid a flush loses no row.
    flushed = [
        (name, labels, 4.0 if labels.get("le") in ("+Inf", "256", "255") else 0.0)
        for name, labels, _ in read_metrics(page_of([3] * 4))
    ]
    rows = read_metrics(page_of([3] * 10 + [60] * 10))
    assert count_page(inputs.plan, rows, "after", before=flushed).lengths.rows == 20
    for seconds in (0.0, float("nan"), float("inf")):
        window = partial(count_page, inputs.plan, rows, "page", seconds=seconds)
        check_refused("must be above 0", window)


def test_servers_add_up_and_other_builds_are_named(inputs: PipelineInputs) -> None:
    one, two = draw(30, 100, 1), draw(30, 200, 2)
    assert counted(inputs, page_of(one) + page_of(two)).lengths.rows == 300
    longer = counted(inputs, page_of([300], [*EDGES, 384, 512]))
    assert longer.lengths.counts == {MAX_LENGTH: 1}
    assert "other settings" in check_drift(inputs, longer).notes[-1]
    bucketed = built_for(inputs, [11, 22, 33] * 40, "bucketed")
    found = check_drift(bucketed, counted(bucketed, page_of(one)))
    assert "other padded lengths" in found.notes[-1]


def without(word: str, page: str) -> str:
    return "\n".join(line for line in page.splitlines() if word not in line)


USUAL_PAGE = page_of([9] * 20)
PAGES = {
    "empty": "",
    "no text": "\x00\xff{}{}{ 1 2 3\n" * 50,
    "another pipeline's": page_of([9], pipeline="another"),
    "no +Inf": without("+Inf", USUAL_PAGE),
    "no sum": without("_sum", USUAL_PAGE),
    "only +Inf": without('le="', USUAL_PAGE.replace('le="+Inf"', "le='x'")),
    "no rows": page_of([]),
    "not a number": USUAL_PAGE.replace("} 20", "} NaN", 1),
    "infinite": USUAL_PAGE.replace("} 20", "} +Inf"),
    "negative": USUAL_PAGE.replace("} 0", "} -4", 1),
    "huge": USUAL_PAGE.replace("} 20", "} 1e300"),
    "falling": page_of([3] * 20).replace(
        'le="+Inf",pipeline="minilm"} 20', 'le="+Inf",pipeline="minilm"} 2'
    ),
    "odd end": USUAL_PAGE.replace('le="4"', 'le="four"'),
    "end that is no number": USUAL_PAGE.replace('le="4"', 'le="NaN"'),
    "too many tokens": USUAL_PAGE.replace("} 180", "} 18000000"),
    "two builds": page_of([9] * 3) + page_of([9] * 4, [*EDGES, 512]),
}
SAMPLES: list[tuple[str | None, str]] = [
    ("\n\n", "new.jsonl"),
    ('{"text": "fine"}\n{"text": 1}', "new.jsonl:2: text"),
    ("not json", "new.jsonl:1"),
    ('{"text": "a", "parameters": {"no_such": 1}}', "new.jsonl:1"),
    ('{"text": "a", "parameters": 1}', "new.jsonl:1: parameters"),
    (None, "new.jsonl"),
]
"""Files of requests, and the field of the error."""


def test_pages_and_samples_that_make_no_sense_are_refused(
    inputs: PipelineInputs, tmp_path: Path
) -> None:
    page, sample = tmp_path / "page.txt", tmp_path / "new.jsonl"
    for kind, text in PAGES.items():
        page.write_text(text, encoding="utf-8", errors="surrogateescape")
        error = refusal(read_lengths, inputs, page)
        assert error.field == str(page), kind
        assert error.remedy, kind
    for content, where in SAMPLES:
        sample.unlink(missing_ok=True)
        if content is not None:
            sample.write_text(content)
        assert refusal(read_lengths, inputs, sample).field.endswith(where), content
    # Images have no lengths.
    images = replace(inputs, plan=replace(inputs.plan, lengths=None))
    page.write_text(page_of([9]))
    sample.write_text('{"text": "a"}')
    for path in (page, sample):
        check_refused("only supported for texts", read_lengths, images, path)


def test_a_sample_is_tokenized_as_the_traffic_is(inputs: PipelineInputs, tmp_path: Path) -> None:
    def read(*texts: str) -> NewTraffic:
        path = tmp_path / "new.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return read_lengths(inputs, path)

    found = read(*traffic_texts()[:TRAFFIC_ROWS])
    assert found.lengths == inputs.plan.lengths
    assert check_drift(inputs, found).distance == 0
    cut = Lengths({3: 1, MAX_LENGTH: 1}, rows=2, truncated_rows=1)
    assert read("word " * 900, "word").lengths == cut
