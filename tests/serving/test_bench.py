"""`triptych bench` on a real server, two results side by side, and prices worked out by hand."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.load_samples import NASTY, NOTHING_ANSWERED, bench, measurement, point, subject
from tests.support.mistakes import check_refused, refusal
from tests.support.project import TRAFFIC_ROWS, build_into, quiet, write_pipeline
from triptych.base.errors import UserError
from triptych.interface.cli import app
from triptych.interface.cli.measure import PriceOptions
from triptych.interface.report.bench import write_bench_report
from triptych.repository.records import read_record
from triptych.serving.bench import bench as load_tests
from triptych.serving.bench.bench import (
    Bench,
    BenchOptions,
    bench_requests,
    parse_loads,
    sustained_rate,
)
from triptych.serving.bench.comparison import MetricChange, Price, compare_results, read_bench
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    OfferedLoad,
    judge_slo,
)
from triptych.spec.slo import Slo


def triptych(*words: str, status: int = 0) -> str:
    """What the command prints in this process, or its mistake."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if isinstance(done.exception, UserError):
        assert status == 2
        return done.exception.message
    assert done.exit_code == status, (done.output, done.stderr, done.exc_info)
    return done.stderr if status == 2 else done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a pipeline of a tiny model, built."""
    home = tmp_path_factory.mktemp("bench")
    model = {"source": str(tiny_model)}
    folder = write_pipeline(
        home / "pipelines" / "tiny", model=model, serving={"slo": {"p99_ms": 9e5}}
    )
    build_into(folder, home / "repository")
    return home


def options(home: Path, reports: str) -> list[str]:
    return [
        *("--pipelines", str(home / "pipelines"), "--repository", str(home / "repository")),
        *("--reports", str(home / reports), "--window-seconds", "0.6", "--rounds", "2"),
    ]


@pytest.fixture(scope="module")
def measured(home: Path) -> dict[str, Any]:
    """Two closed loops and bursts, and a price."""
    words = ["-c", "1", "-c", "4", "--rate", "20", "--arrivals", "burst", "--burst", "4"]
    price = ["--price-per-hour", "3.6", "--peak-rps", "1000", "--daily-requests", "1000000"]
    text = triptych("bench", "tiny", *options(home, "a"), *words, *price, "--json")
    document: dict[str, Any] = json.loads(text)
    return document


def test_every_load_is_measured_with_its_steps_and_where_time_goes(
    home: Path, measured: dict[str, Any]
) -> None:
    result = read_record(BenchResult, measured)
    loads = ["1 client", "4 clients", "20/s in bursts of 4"]
    assert [str(load.load) for load in result.points] == loads
    for load in result.points:
        one = load.typical
        assert one.requests > 0
        assert load.errors == {}
        assert [use.step for use in one.steps] == ["preprocess", "core", "postprocess"]
        assert load.bottleneck is not None
    assert result.subject.requests == TRAFFIC_ROWS
    assert sum(result.subject.lengths.values()) == TRAFFIC_ROWS
    assert result.slo == Slo(p99_ms=9e5)
    assert result.cost is not None
    assert all(len(one.rounds) == 2 for one in result.points)
    # All loads hold so loose a promise: the price is that of the fastest.
    best = max(one.median("throughput_per_s") for one in result.points)
    assert result.cost.per_million == pytest.approx(3.6 / 3600 / best * 1e6, rel=1e-6)
    # The files say the same.
    folder = home / "a" / "tiny" / "bench"
    assert json.loads((folder / "bench.json").read_text(encoding="utf-8")) == measured
    rows = list(csv.DictReader((folder / "bench.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 6  # two rounds of three loads
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "SLO met" in page
    assert "20/s in bursts of 4" in page


def test_a_missed_slo_ends_with_1_and_a_comparison_tells_what_changed(
    home: Path, measured: dict[str, Any]
) -> None:
    words = ["-c", "4", "--slo", "p99=1us", "--min-throughput", "100000", "--rounds", "1"]
    words += ["--export-perf", str(home / "rows.json")]
    shown = triptych("bench", "tiny", *options(home, "b"), *words, status=1)
    rows = json.loads((home / "rows.json").read_text(encoding="ascii"))["data"]
    assert len(rows) == TRAFFIC_ROWS
    assert all("dimensions" in row and "text" in row for row in rows)
    assert "SLO: cannot tell" in shown
    assert "one round does not show the noise, use --rounds 3" in shown
    files = [str(home / reports / "tiny" / "bench" / "bench.json") for reports in "ab"]
    compared = triptych("bench-diff", *files)
    assert "4 clients" in compared
    assert "cannot tell at 4 clients: one round does not show the noise" in compared
    assert json.loads(triptych("bench-diff", *files, "--json"))


MISTAKES = (
    ("bench tiny --rate 5 --arrivals sine", "must be one of poisson"),
    ("bench tiny --time-budget 5", "Write it as 90s"),
    ("bench tiny --slo p99=fast", "must have the form"),
    ("bench tiny --peak-rps 5", "`--price-per-hour` is required"),
    ("bench tiny --metrics-url http://h/metrics", "`--metrics-url` is only supported with --url"),
    ("bench tiny --url 127.0.0.1:9 -c 1", "127.0.0.1:9"),
    ("bench-diff here.json there.json", "here.json"),
    ("tune tiny --slo fast", "must have the form"),
)


def test_a_mistake_is_named(home: Path, tmp_path: Path) -> None:
    for line, says in MISTAKES:
        verb, *rest = line.split()
        places = [] if verb == "bench-diff" else options(home, "c")
        if verb == "tune":
            places = places[:6]
        assert says in triptych(verb, *rest, *places, status=2), line
    words = [*options(home, "d"), "--repository", str(tmp_path)]
    assert "Run `triptych build tiny`" in triptych("bench", "tiny", *words, status=2)


def test_what_is_sustained_is_the_fastest_load_within_the_latencies() -> None:
    loads = ((100, 10e3), (200, 40e3), (300, 90e3))
    points = [point(1, throughput_per_s=rate, p99_us=p99_us) for rate, p99_us in loads]
    assert sustained_rate(points, Slo(p99_ms=50.0, throughput=1e9), None) == 200
    assert sustained_rate(points, Slo(), None) == 300
    assert sustained_rate(points, Slo(p99_ms=1.0), None) == 0
    assert Price(2.0, currency="USD", headroom=0).cost(0.0) is None


def test_a_rate_is_not_searched_where_no_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = measurement(1, **NOTHING_ANSWERED)
    monkeypatch.setattr(load_tests, "measure", lambda *_, **__: failed)
    loads = (OfferedLoad("concurrency", 1),)
    asked = Bench(loads=loads, rounds=1, slo=Slo(p99_ms=50.0), find_rate=True)
    options = BenchOptions(repository=tmp_path, progress=quiet, bench=asked, url="127.0.0.1:1")
    found = bench_requests(subject(), ["text"], options)
    assert (found.points[0].rounds, found.rate) == ((failed,), None)
    assert judge_slo(found).kind == "not met"


def test_loads_and_prices_are_checked() -> None:
    loads = parse_loads([2], [10.0], "poisson", 8)
    assert loads == (OfferedLoad("concurrency", 2.0), OfferedLoad("poisson", 10.0, 1))
    check_refused("--burst", parse_loads, [], [5.0], "burst", 0)
    check_refused("--price-per-hour", PriceOptions(daily_requests=1e6).price)
    assert PriceOptions().price() is None
    made = PriceOptions(price_per_hour=3.6, headroom=0.2).price()
    assert made == Price(3.6, currency="USD", headroom=0.2)


def rounds(*rates: float, unstable: int = -1) -> BenchResult:
    """One load whose rounds had these throughputs, one of them in unstable windows."""
    measured = tuple(
        measurement(8, throughput_per_s=rate, is_stable=index != unstable)
        for index, rate in enumerate(rates)
    )
    one = replace(point(8), rounds=measured)
    return bench(points=(one,), rate=None, cost=None)


def change(before: BenchResult, after: BenchResult, name: str) -> MetricChange:
    (found,) = (one for one in compare_results(before, after).pairs[0].changes if one.name == name)
    return found


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
    unstable = rounds(189, 190, 191, unstable=2)
    for before, after in ((usual, unstable), (unstable, usual)):
        found = compare_results(before, after)
        changed = {one.weight for one in found.pairs[0].changes if one.weight != "same"}
        assert changed == {"cannot tell"}
        assert "8 clients: rounds were unstable; use a quiet machine" in found.warnings[0]


def test_errors_are_compared_where_there_are_any() -> None:
    one = point(8, errors={"deadline": 10}, requests=90)
    failing = bench(points=(one,))
    clean = bench(points=(point(8),))
    found = change(clean, failing, "errors %")
    assert (found.before, found.after, found.ratio, found.weight) == (0, 10, None, "worse")
    silent = bench(points=(point(8, **NOTHING_ANSWERED),))
    assert change(clean, silent, "errors %").after == 100
    assert change(silent, clean, "requests/s").ratio is None


def test_loads_of_one_side_are_named() -> None:
    before = bench(points=(point(1), point(8)))
    after = bench(points=(point(8), point(64)))
    found = compare_results(before, after)
    assert [str(pair.load) for pair in found.pairs] == ["8 clients"]
    assert found.only_after == ("64 clients",)
    assert found.only_before == ("1 client",)


def test_other_pipelines_are_compared_and_other_machines_and_traffic_are_warned_of() -> None:
    renamed = bench(
        subject=subject(pipeline="minilm_int8", precision="int8", overrides={"core.instances": 2}),
        points=(point(1), point(8)),
    )
    found = compare_results(bench(), renamed)
    assert len(found.pairs) == 2
    assert found.differences == {
        "pipeline": ("minilm", "minilm_int8"),
        "precision": ("fp32", "int8"),
        "core.instances": ("1", "2"),
    }
    assert not found.warnings
    other = subject(machine={"processor": "Another"}, lengths={5: 1}, server="host:8001")
    assert len(compare_results(bench(), bench(subject=other)).warnings) == 3


def test_rates_and_cost_are_compared_under_the_same_promise() -> None:
    before = bench()
    assert before.rate
    assert before.cost
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
    for content, rule in (
        (b"{", "must be JSON"),
        (b"[]", "must be a bench result"),
        (b'{"schema": "triptych-bench/2"}', "must be a bench result"),
        (b"\xff", "must be JSON"),
        (None, "must be a readable file"),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        error = refusal(read_bench, file)
        assert (error.field, bool(error.given)) == (str(file), True)
        assert error.rule.startswith(rule)
        assert "triptych bench" in error.remedy
        file.touch()


def cost(rate_per_s: float = 100, **price: Any) -> Cost:
    found = Price(**{"currency": "USD", "headroom": 0.3, **price}).cost(rate_per_s)
    assert found is not None
    return found


def test_a_price_is_that_of_the_time_and_of_machines_with_headroom() -> None:
    # 100/s: a million take 10,000 s, at 3.60 an hour 0.001 a second.
    assert cost(price_per_hour=3.6).per_million == pytest.approx(10.0)
    # One request a day still takes a machine; 8,640,000 a day are 100/s, 70/s a machine: two.
    assert cost(price_per_hour=2, daily_requests=1).monthly == pytest.approx(1460)
    assert cost(price_per_hour=2, daily_requests=8_640_000).monthly == pytest.approx(2920)
    of_peaks = ((70, 0.3, 1), (70.1, 0.3, 2), (700, 0.3, 10), (100, 0, 1), (100, 0.5, 2))
    for peak, headroom, machines in of_peaks:
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
        error = refusal(partial(cost, **{"price_per_hour": 1, **changes}))
        assert (error.field, bool(error.given), bool(error.remedy)) == (field, True, True)
