"""New traffic as it is read: what a server counted, and samples of requests."""

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from conftest import TRAFFIC_ROWS, traffic_texts
from drift_cases import MAX_LENGTH, built_for, draw, exact, read_minilm
from mistakes import check_refused, refusal
from triptych.core.inputs import PipelineInputs
from triptych.operate.tune.drift import check_drift
from triptych.operate.tune.new_traffic import NewTraffic, count_page, read_lengths
from triptych.serving.bench.resources import read_metrics
from triptych.spec.plan import Layout
from triptych.spec.traffic import Lengths

EDGES = [4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 51, 64, 81, 102, 128, 161, 203, 255, 256]
LAYOUTS: tuple[Layout, ...] = ("packed", "bucketed")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PipelineInputs:
    return read_minilm(tmp_path_factory.mktemp("drift"))


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
    for mean, layout in ((mean, layout) for mean in (30, 80) for layout in LAYOUTS):
        pipeline = built_for(inputs, draw(30, 400, 0), layout)
        new = draw(mean, 3000, 1)
        edges = sorted({*EDGES, *pipeline.plan.bucket_edges})
        found = counted(pipeline, page_of(new, edges))
        assert found.lengths.rows == 3000
        assert found.mean == pytest.approx(sum(new) / 3000)
        by_rows, by_page = check_drift(pipeline, exact(new)), check_drift(pipeline, found)
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
