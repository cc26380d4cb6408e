"""Two results side by side: what is a change, what is noise, what cannot be told."""

import json
import random
from collections import Counter
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from load_samples import NASTY, NOTHING_ANSWERED, baseline, bench, measurement, point, subject
from triptych.base.errors import UserError
from triptych.interface.report.bench import write_bench_report
from triptych.serving.bench.comparison import MetricChange, compare_results, read_bench
from triptych.serving.bench.results import BenchResult, LoadPoint, OfferedLoad


def rounds(*rates: float) -> BenchResult:
    """One load whose rounds had these throughputs."""
    measured = tuple(measurement(8, throughput_per_s=rate) for rate in rates)
    one = LoadPoint("minilm", OfferedLoad("concurrency", 8), measured)
    return bench(points=(one,), baselines=(), rate=None, cost=None)


def change(before: BenchResult, after: BenchResult, name: str) -> MetricChange:
    found = [one for one in compare_results(before, after).pairs[0].changes if one.name == name]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("before", "after", "weight"),
    [
        ((100, 101, 102), (110, 111, 112), "better"),
        ((110, 111, 112), (100, 101, 102), "worse"),
        ((100, 101, 102), (101, 102, 103), "within 10 %"),  # they overlap
        ((100, 100.1, 100.2), (103, 103.1, 103.2), "within 10 %"),  # apart, but by 3 %
        ((90, 100, 101), (102, 103, 104), "cannot tell"),  # apart, with a noisy round
        ((60, 100, 140), (70, 110, 150), "cannot tell"),
        ((100, 101, 102), (100, 101, 102), "same"),
        ((100,), (200, 201), "cannot tell"),
        ((100, 101), (200,), "cannot tell"),
        ((100,), (100,), "cannot tell"),
    ],
    ids=str,
)
def test_a_change_is_more_than_the_noise_or_not(
    before: tuple[float, ...], after: tuple[float, ...], weight: str
) -> None:
    found = change(rounds(*before), rounds(*after), "requests/s")
    assert found.weight == weight


def test_unstable_rounds_prove_nothing() -> None:
    """One build, measured twice on a busy machine: the rounds of each run agree by chance."""
    usual = rounds(100, 101, 102)
    for unstable in (0, 2):
        measured = [
            measurement(8, throughput_per_s=rate, is_stable=index != unstable)
            for index, rate in enumerate((189, 190, 191))
        ]
        one = LoadPoint("minilm", OfferedLoad("concurrency", 8), tuple(measured))
        other = bench(points=(one,), baselines=(), rate=None, cost=None)
        for before, after in ((usual, other), (other, usual)):
            found = compare_results(before, after)
            changed = [each for each in found.pairs[0].changes if each.weight != "same"]
            assert {each.weight for each in changed} == {"cannot tell"}
            assert "8 clients: rounds were unstable; use a quiet machine" in found.warnings[0]


def test_equal_builds_are_seldom_called_faster_and_a_tenth_is_found_in_little_noise() -> None:
    for noise in (0.01, 0.1):
        rng, found = random.Random(4), Counter[tuple[float, str]]()
        for truth in (1.0, 1.2):
            for _ in range(200):
                before, after = (
                    rounds(*(each * exp(rng.gauss(0, noise)) for _ in range(3)))
                    for each in (100, 100 * truth)
                )
                found[truth, change(before, after, "requests/s").weight] += 1
        assert found[1.0, "better"] <= 15, found
        assert found[1.0, "worse"] <= 15, found
        assert found[1.2, "worse"] + found[1.2, "within 10 %"] <= 15, found
        if noise < 0.05:
            assert found[1.2, "better"] > 190, found
            assert found[1.0, "within 10 %"] > 190, found


def test_changes_have_a_direction() -> None:
    faster = compare_results(bench(), bench(drift=1.2))
    assert [pair.load.value for pair in faster.pairs[:6]] == [1, 2, 4, 8, 16, 32]
    of_four = {one.name: one for one in faster.pairs[2].changes}
    ratio = of_four["requests/s"].ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(1.2)
    assert 1.1 < ratio.low < 1.2 < ratio.high < 1.3
    assert of_four["p99 ms"].weight == "better"
    assert of_four["p99 ms"].before == pytest.approx(50.5, abs=0.1)
    assert of_four["core queue ms"].weight == "better"
    assert of_four["core queue ms"].of_step
    assert of_four["core batch"].weight == "same"
    slower = compare_results(bench(drift=1.2), bench())
    assert {one.weight for one in slower.pairs[0].changes[:3]} == {"worse"}


def test_errors_are_compared_where_there_are_any() -> None:
    one = point(8, errors={"deadline": 10}, requests=90)
    failing = bench(points=(one,), baselines=())
    clean = bench(points=(point(8),), baselines=())
    found = change(clean, failing, "errors %")
    assert (found.before, found.after, found.ratio, found.weight) == (0, 10, None, "worse")
    silent = bench(points=(point(8, **NOTHING_ANSWERED),), baselines=())
    assert change(clean, silent, "errors %").after == 100
    assert change(silent, clean, "requests/s").ratio is None


def test_loads_of_one_side_are_named() -> None:
    before = bench(points=(point(1), point(8)))
    after = bench(
        points=(point(8), point(64)), baselines=(baseline("x", OfferedLoad("in_process", 1), 9),)
    )
    found = compare_results(before, after)
    assert [str(pair.load) for pair in found.pairs] == ["8 clients"]
    assert found.only_after == ("minilm, 64 clients", "x, 1 per call")
    assert found.only_before[0] == "minilm, 1 client"
    assert len(found.only_before) == 5


def test_pipelines_of_other_names_are_compared() -> None:
    renamed = bench(
        subject=subject(pipeline="minilm_int8", precision="int8", overrides={"core.instances": 2}),
        points=tuple(replace(point(c), contender="minilm_int8") for c in (1, 8)),
    )
    found = compare_results(bench(), renamed)
    assert found.pairs[0].contender == "minilm_int8"
    assert found.differences == {
        "pipeline": ("minilm", "minilm_int8"),
        "precision": ("fp32", "int8"),
        "core.instances": ("1", "2"),
    }
    assert not found.warnings


def test_other_machines_and_traffic_are_warned_of() -> None:
    other = subject(machine={"processor": "Another"}, lengths={5: 1}, server="host:8001")
    found = compare_results(bench(), bench(subject=other))
    assert len(found.warnings) == 3
    assert any("machines differ" in warning for warning in found.warnings)
    assert found.differences["machine cores"] == ("2", "not set")


def test_rates_and_cost_are_compared_under_the_same_promise() -> None:
    before = bench()
    assert before.rate is not None
    assert before.cost is not None
    faster = replace(before.rate, highest_per_s=300.0, lowest_broken_per_s=310.0)
    cheaper = replace(before.cost, per_million=before.cost.per_million / 2)
    found = compare_results(before, bench(rate=faster, cost=cheaper)).totals
    assert [(one.name, one.weight) for one in found] == [
        ("highest rate/s", "better"),
        ("USD a million", "better"),
    ]
    # 150 held and 165 broke: 160 is within what the search left open.
    near = replace(before.rate, highest_per_s=160.0, lowest_broken_per_s=170.0)
    assert compare_results(before, bench(rate=near)).totals[0].weight == "cannot tell"
    endless = replace(faster, lowest_broken_per_s=None)
    assert compare_results(before, bench(rate=endless)).totals[0].weight == "cannot tell"
    other = replace(before.rate, slo=before.slo.model_copy(update={"p99_ms": 5.0}))
    dearer = replace(before.cost, price_per_hour=9.0)
    assert compare_results(before, bench(rate=other, cost=dearer)).totals == ()


def test_everything_is_plain_data() -> None:
    found = compare_results(bench(), bench(drift=1.2, subject=subject(precision="int8")))
    of_four = found.pairs[2]
    assert (of_four.contender, str(of_four.load)) == ("minilm", "4 clients")
    rate = of_four.changes[0]
    assert (rate.name, round(rate.before), round(rate.after)) == ("requests/s", 145, 174)
    assert found.differences["precision"] == ("fp32", "int8")
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["pairs"][0]["load"]["value"] == 1
    assert again["differences"]["precision"] == ["fp32", "int8"]


@pytest.mark.parametrize("name", NASTY)
def test_any_results_can_be_compared(name: str) -> None:
    for pair in ((bench(), NASTY[name]), (NASTY[name], bench()), (NASTY[name], NASTY[name])):
        found = compare_results(*pair)
        json.dumps(found.as_dict(), allow_nan=False)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    assert read_bench(tmp_path) == bench()
    assert read_bench(tmp_path / "bench.json") == bench()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "must be a readable file"),
        ("{", "must be JSON"),
        ("[]", "must be a bench result"),
        ('{"schema": "triptych-bench/2"}', "must be a bench result"),
        ("\udcff", "must be JSON"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str | None, rule: str) -> None:
    file = tmp_path / "bench.json"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as caught:
        read_bench(file)
    assert caught.value.field == str(file)
    assert caught.value.rule.startswith(rule)
    assert caught.value.given
    assert "triptych bench" in caught.value.remedy
