"""Two results side by side: a change, noise, or no answer; and prices worked out by hand."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from load_samples import NASTY, NOTHING_ANSWERED, baseline, bench, measurement, point, subject
from triptych.base.errors import UserError
from triptych.interface.report.bench import write_bench_report
from triptych.serving.bench.comparison import MetricChange, Price, compare_results, read_bench
from triptych.serving.bench.results import BenchResult, Cost, LoadPoint, OfferedLoad


def rounds(*rates: float) -> BenchResult:
    """One load whose rounds had these throughputs."""
    measured = tuple(measurement(8, throughput_per_s=rate) for rate in rates)
    one = LoadPoint("minilm", OfferedLoad("concurrency", 8), measured)
    return bench(points=(one,), baselines=(), rate=None, cost=None)


def change(before: BenchResult, after: BenchResult, name: str) -> MetricChange:
    found = [one for one in compare_results(before, after).pairs[0].changes if one.name == name]
    assert len(found) == 1
    return found[0]


def test_a_change_is_more_than_the_noise_or_not() -> None:
    for before, after, weight in (
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
    ):
        found = change(rounds(*before), rounds(*after), "requests/s")
        assert found.weight == weight, (before, after)


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
                    rounds(*(each * math.exp(rng.gauss(0, noise)) for _ in range(3)))
                    for each in (100, 100 * truth)
                )
                found[truth, change(before, after, "requests/s").weight] += 1
        assert found[1.0, "better"] <= 15, found
        assert found[1.0, "worse"] <= 15, found
        assert found[1.2, "worse"] + found[1.2, "within 10 %"] <= 15, found
        if noise < 0.05:
            assert found[1.2, "better"] > 190, found
            assert found[1.0, "within 10 %"] > 190, found


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


def test_other_pipelines_are_compared_and_other_machines_and_traffic_are_warned_of() -> None:
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
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["pairs"][0]["load"]["value"] == 1
    assert again["differences"]["precision"] == ["fp32", "int8"]
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


def test_any_results_can_be_compared() -> None:
    usual = bench()
    for nasty in NASTY.values():
        for pair in ((usual, nasty), (nasty, usual), (nasty, nasty)):
            json.dumps(compare_results(*pair).as_dict(), allow_nan=False)


def test_a_written_result_is_read_again_and_any_other_file_is_refused(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    file = tmp_path / "bench.json"
    assert read_bench(tmp_path) == read_bench(file) == bench()
    for text, rule in (
        ("{", "must be JSON"),
        ("[]", "must be a bench result"),
        ('{"schema": "triptych-bench/2"}', "must be a bench result"),
        ("\udcff", "must be JSON"),
        (None, "must be a readable file"),
    ):
        if text is None:
            file.unlink()
        else:
            file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError) as caught:
            read_bench(file)
        assert caught.value.field == str(file)
        assert caught.value.rule.startswith(rule)
        assert caught.value.given
        assert "triptych bench" in caught.value.remedy


def cost(rate_per_s: float = 100, **price: Any) -> Cost:
    found = Price(**{"currency": "USD", "headroom": 0.3, **price}).cost(rate_per_s)
    assert found is not None
    return found


def test_a_price_is_that_of_the_time_and_of_machines_with_headroom() -> None:
    # 100/s: a million take 10,000 s, at 3.60 an hour 0.001 a second.
    found = cost(price_per_hour=3.6)
    assert found.per_million == pytest.approx(10.0)
    assert (found.monthly, found.machines, found.currency) == (None, None, "USD")
    # One request a day still takes a machine; 8,640,000 a day are 100/s, 70/s a machine: two.
    assert cost(price_per_hour=2, daily_requests=1).monthly == pytest.approx(1460)
    assert cost(price_per_hour=2, daily_requests=8_640_000).monthly == pytest.approx(2920)
    for peak, headroom, machines in (
        (70, 0.3, 1), (70.1, 0.3, 2), (700, 0.3, 10), (100, 0, 1), (100, 0.5, 2), (0.01, 0.3, 1)
    ):  # fmt: skip
        found = cost(price_per_hour=1, peak_per_s=peak, headroom=headroom)
        assert (found.machines, found.monthly) == (machines, None), (peak, headroom)
    # The peak decides what a month costs.
    found = cost(price_per_hour=1, daily_requests=864_000, peak_per_s=200, currency="EUR")
    assert (found.machines, found.currency) == (3, "EUR")
    assert found.monthly == pytest.approx(3 * 730)


def test_a_price_out_of_range_is_refused() -> None:
    changes: dict[str, Any]
    for field, changes in (
        ("rate", {"rate_per_s": -1}),
        ("rate", {"rate_per_s": math.nan}),
        ("price", {"price_per_hour": 0}),
        ("price", {"price_per_hour": math.inf}),
        ("daily requests", {"daily_requests": 0}),
        ("peak rate", {"peak_per_s": -5}),
        ("peak rate", {"peak_per_s": 1, "daily_requests": 8_640_000}),
        ("headroom", {"headroom": 1}),
        ("headroom", {"headroom": -0.1}),
        ("headroom", {"headroom": math.nan}),
    ):
        with pytest.raises(UserError) as caught:
            cost(**{"rate_per_s": 100, "price_per_hour": 1, **changes})
        assert caught.value.field == field
        assert caught.value.given
        assert caught.value.remedy
