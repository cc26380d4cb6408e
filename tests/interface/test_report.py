"""Reports: verdicts on measured load, the pieces of every page, and the files beside a page."""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from tests.support.load_samples import (
    NASTY,
    NOTHING_ANSWERED,
    PROMISE,
    arrivals,
    bench,
    measurement,
    point,
    subject,
    tuned,
)
from tests.support.report_pages import (
    ABOUT,
    CANDIDATES,
    Page,
    assert_finite_drawing,
    gate_of,
    typed,
)
from triptych.base.files import write_files
from triptych.base.formatting import (
    MAX_TEXT,
    TIMES,
    amount,
    figure,
    figures,
    milliseconds,
    number,
    percent,
    plain,
    rounded,
    shown,
    signed,
    signed_percent,
)
from triptych.building.build import BuildOutcome
from triptych.interface.api import BuildResult
from triptych.interface.report.bench import shown_points, write_bench_report
from triptych.interface.report.gate import write_gate_report
from triptych.interface.report.pages import render
from triptych.interface.report.plots import (
    MAX_BINS,
    Dot,
    PlotBar,
    Series,
    curves,
    histogram,
    interval,
    waterfall,
)
from triptych.interface.report.tune import write_tune_report
from triptych.operate.tune.results import TuneResult, pareto_front
from triptych.repository.records import plain_data, read_record
from triptych.serving.bench.results import (
    BenchResult,
    LoadPoint,
    OfferedLoad,
    RateSearch,
    collect_warnings,
    find_best_point,
    find_limiting_bottleneck,
    format_headline,
    judge_slo,
)
from triptych.spec.slo import Slo


def closed_loop(*p99_ms: float) -> BenchResult:
    """A load of eight clients without a search of rates, in rounds with these latencies."""
    rounds = tuple(measurement(8, p99_us=1e3 * ms) for ms in p99_ms)
    return bench(points=(LoadPoint(OfferedLoad("concurrency", 8), rounds),), rate=None)


def test_a_verdict_is_of_rates_where_they_were_searched_and_as_firm_as_the_rounds_allow() -> None:
    """All words of a verdict are on record in `tests/data/tables`."""

    def asks(per_s: float) -> Slo:
        return Slo(p99_ms=80.0, throughput=per_s)

    # What missed at a higher rate says nothing about the lower one.
    unproven = RateSearch(PROMISE, 0.0, None, (arrivals(5, 90.0),))
    partly = RateSearch(PROMISE, 0.0, 10.0, (arrivals(5, 90.0), arrivals(10, 300.0)))
    above = RateSearch(PROMISE, 150.0, 200.0, tuple(arrivals(r, 80.0) for r in (150, 170, 200)))
    failing = point(8, errors={"x": 1})
    for result, kind, said in (
        (bench(), "met", ""),
        (bench(rate=RateSearch(PROMISE, 0.0, 5.0, ())), "not met", ""),  # though closed loops do
        (bench(rate=unproven), "cannot tell", ""),
        (bench(rate=partly), "cannot tell", ""),
        (bench(rate=above), "met", "and missed at 200/s; cannot tell at 170/s"),
        (bench(slo=asks(150.0)), "met", ""),
        (bench(slo=asks(151.0)), "cannot tell", ""),  # 165/s is too much
        (bench(slo=asks(165.0)), "not met", ""),
        (bench(slo=asks(151.0), rate=None), "cannot tell", ""),
        (bench(slo=asks(200.0), rate=None), "not met", ""),
        (bench(rate=None), "met", "p99 <= 80 ms: met at 1 client, 2 clients, 4 clients."),
        (bench(slo=Slo(p99_ms=20.0), rate=None), "not met", "nearest: 68.2/s at 1 client"),
        (bench(slo=Slo(throughput=900.0), rate=None), "not met", "nearest: 216/s at 32 clients"),
        (bench(slo=Slo(), rate=None), "none", ""),
        (bench(points=(), rate=None), "cannot tell", ""),
        (closed_loop(60, 130, 70), "cannot tell", "or too noisy, for 100 rounds."),
        (
            closed_loop(50, 70, 75),
            "cannot tell",
            "0.800 times (0.467 to 1.37 with 95 % confidence)",
        ),
        (closed_loop(50, 70, 75), "cannot tell", "the limit: about 10 rounds"),
        (closed_loop(60), "cannot tell", "one round does not show the noise"),
        (bench(points=(failing,), rate=None), "not met", ""),
    ):
        verdict = judge_slo(result)
        assert (verdict.kind, said in verdict.explanation) == (kind, True), verdict
        assert verdict.passed == (kind in ("met", "none")), verdict


def test_the_best_point_holds_the_promise_where_one_does() -> None:
    points = bench().points
    failing = point(64, errors={"deadline": 1})
    for given, slo, clients in (
        (points, PROMISE, 4),
        (points, Slo(), 32),
        (points, Slo(p99_ms=0.1), 32),
        ((*points, failing), Slo(), 32),
        ((*points, failing), Slo(p99_ms=0.1), 32),
    ):
        best = find_best_point(given, slo)
        assert best is not None
        assert best.load.value == clients
    assert find_best_point((), Slo()) is None
    assert format_headline(bench(points=())) == ""
    assert find_limiting_bottleneck(()) is None
    for result, loads in (
        (bench(), [4, 32]),
        (bench(slo=Slo()), [1, 32]),
        (NASTY["one point"], [8]),
        (NASTY["no point"], []),
    ):
        assert [one.load.value for one in shown_points(result)] == loads


def test_warnings_that_differ_in_numbers_are_told_once() -> None:
    points = [point(clients, warnings=(f"differs by {clients} %",)) for clients in (1, 8)]
    assert collect_warnings([*points, point(2)]) == [
        "differs by 1 %, 6 similar warnings (1 client; 8 clients)"
    ]
    one = replace(points[0], rounds=points[0].rounds[:1])
    assert collect_warnings([one]) == ["differs by 1 % (1 client)"]


def test_texts_keep_what_can_be_read() -> None:
    assert shown("a\u202eb") == '<bdi>a<span class="mark">U+202E</span>b</bdi>'
    assert plain('<"\u202e') == "&lt;&quot;[U+202E]"
    for text, part in (
        ("a\nb", "↵"),
        ("\x00\x00\x00", f"U+0000 {TIMES}3"),
        ("\u0645\u06cc\u200c\u062e\u0648", "\u0645\u06cc\u200c\u062e\u0648"),
        ("A" * (MAX_TEXT + 4760), "4,760 more characters"),
        ("", "empty"),
        ("   ", "3 blanks"),
    ):
        assert part in shown(text)


def test_numbers_have_the_digits_that_count_and_never_hide_a_fault() -> None:
    tables: tuple[tuple[Callable[[Any], str], dict[float | None, str]], ...] = (
        (figure, {
            None: "—", math.nan: "—", 0: "0", 0.5: "0.5000", 1.0: "1.0000", -0.0017: "-0.0017",
            0.99999997: "0.99999997", 3.1e-6: "3.1e-06", 12345.678: "12,345.6780", 1e30: "1.0e+30",
        }),
        (rounded, {
            None: "—", math.inf: "—", 0.0: "0", 231.94: "232", 23.194: "23.2", 1.0: "1.00",
            0.0456: "0.0456", 12345.6: "12,346", -4.2: "-4.20", 2e-6: "2.0e-06", 3e12: "3.0e+12",
        }),
        (milliseconds, {41_234.0: "41.2", None: "—", -3e-11: "0"}),
        (percent, {
            0.553: "55 %", 0.004: "0.4 %", 0.0: "0 %", 0.999: "99.9 %", 1.0: "100 %", None: "—",
        }),
        (signed_percent, {0.12: "+12 %", -0.27: "-27 %"}),
        (signed, {0.5: "+0.5000", 0.0: "0", -0.5: "-0.5000"}),
    )  # fmt: skip
    for write, texts in tables:
        assert {value: typed(write(value)) for value in texts} == texts
    assert figure(True) == "—"
    assert [number(v) for v in (1, 2.5, None, True, "1", math.inf, 10**400, 1e305)] == [
        *(1.0, 2.5),
        *[None] * 6,
    ]
    assert [amount(1, "batch", "es"), amount(2, "batch", "es")] == ["1 batch", "2 batches"]
    for limit in (0.998, 1e-5, 0.05, 2e-3):  # a value beside its limit reads differently
        assert figures(limit, limit)[0] == figures(limit, limit)[1]
        for off in (-1e-7, 1e-7):
            value, bound = figures(limit * (1 + off), limit)
            assert value != bound, (limit, off)


def series(*places: tuple[float, float]) -> Series:
    return Series("one", "s1", tuple(Dot(x, y, f"at {x:g}", note=f"{x:g}") for x, y in places))


def test_any_points_can_be_drawn() -> None:
    limits = {"a limit": 3.0, "another": 1e6}
    for places in (
        [(1.0, 1.0)],
        [(0.0, 0.0)],
        [(1.0, 0.0), (2.0, 1e9)],
        [(1e-9, 1e-9), (1e9, 1e9)],
        [(5.0, 7.0)] * 20,
        [(float(x), x**3.0) for x in range(20)],
    ):
        page = Page(curves("c", "<C>", [series(*places)], axes=("x", "y"), limits=limits))
        assert_finite_drawing(page)
        assert page.count("circle", "mark") == len(places) + 1, places  # and the legend's
        marks = {attrs["cx"] for tag, attrs in page.tags if tag == "circle"}
        assert len(marks) == len({x for x, _ in places}) + 1, places
        assert page.count("line", "limit") == 2
        assert page.count("polyline") == (len(places) > 1), places
        assert "<C>" in page.text
    assert {
        curves("c", "C", [], axes=("x", "y")),
        curves("c", "C", [series()], axes=("x", "y")),
        histogram("h", "H", {4: 0}, axes=("x", "y")),
        waterfall("w", "W", [], "0"),
        waterfall("w", "W", [PlotBar("a", 0.0, "0", "s1")], "0"),
    } == {""}
    for high, is_red in ((-0.01, True), (0.0, False), (-0.005, False)):  # only wholly in the loss
        assert ("whisker bad" in interval(-0.03, -0.04, high, 0.005)) == is_red, high
    with pytest.raises(UndefinedError):  # a name that a template lacks
        render("gate.html.j2")


def test_a_histogram_counts_everything_once() -> None:
    counts = {length: length % 7 + 1 for length in range(3, 500)}
    page = Page(histogram("h", "H", counts, axes=("tokens", "rows")))
    assert_finite_drawing(page)
    tips = re.findall(r"tokens [\d,]+(?: to [\d,]+)?: ([\d,]+) rows", page.text)
    assert sum(int(tip.replace(",", "")) for tip in tips) == sum(counts.values())
    assert len(tips) <= MAX_BINS
    assert_finite_drawing(Page(histogram("h", "H", {1: 1, 10**9: 1}, axes=("x", "y"))))


def read_csv(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns and the rows of a `bench.csv`."""
    with (folder / "bench.csv").open(encoding="utf-8", newline="") as file:
        heads, *lines = csv.reader(file)
    return heads, [dict(zip(heads, line, strict=True)) for line in lines]


def test_a_record_is_the_result(tmp_path: Path) -> None:
    def read(name: str) -> Any:
        return json.loads((tmp_path / name).read_text(encoding="utf-8"))

    write_bench_report(bench(), tmp_path)
    assert write_tune_report(tuned(), tmp_path) == tmp_path / "report.html"
    gate = gate_of(row_differences=(math.nan, 1.0, math.inf), candidates=CANDIDATES)
    write_gate_report(gate, ABOUT, tmp_path)
    names = ["bench.csv", "bench.json", "gate.json", "report.html", "tune.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read_record(BenchResult, read("bench.json")) == bench()
    assert read_record(TuneResult, read("tune.json")) == tuned()
    held = read("gate.json")
    assert held["row_differences"] == [None, 1.0, None]
    assert held["verdicts"] == [asdict(each) for each in gate.verdicts]
    assert held["candidates"] == [plain_data(asdict(each)) for each in CANDIDATES]
    assert {"rows", "labeled", "versions"} < held.keys()
    assert (held["pipeline"], held["layout"], held["accepted"]) == ("minilm", "packed", None)
    write_gate_report(gate_of(conversion=None, accepted="why"), ABOUT, tmp_path)
    held = read("gate.json")
    assert ("candidates" in held, held["conversion"], held["accepted"]) == (False, None, "why")


def test_the_csv_has_a_row_for_each_point_and_round(tmp_path: Path) -> None:
    result = bench()
    write_bench_report(result, tmp_path)
    _, rows = read_csv(tmp_path)
    assert len(rows) == 6 * 3 + 5
    second = rows[1]
    wanted = result.points[0].rounds[1]
    assert (second["part"], second["load_value"], second["round"]) == ("pipeline", "1", "2")
    names = ("throughput_per_s", "p99_us", "core_queue_us", "core_mean_batch")
    core = wanted.steps[1]
    measured = wanted.throughput_per_s, wanted.p99_us, core.queue_us, core.mean_batch
    assert tuple(float(second[name]) for name in names) == measured
    write_bench_report(bench(points=(point(1, **NOTHING_ANSWERED),)), tmp_path)
    first = read_csv(tmp_path)[1][0]
    assert (first["errors"], json.loads(first["error_kinds"])["deadline"]) == ("4815", 3)


def test_no_cell_of_the_csv_is_a_formula(tmp_path: Path) -> None:
    """Names come from a server that may be anybody's; numbers stay numbers."""
    for sign in "=+-@\t\r":
        name = f'{sign}HYPERLINK("http://x")'
        first, *others = bench().points
        step, *steps = first.rounds[0].steps
        rounds = (replace(first.rounds[0], steps=(replace(step, step=name), *steps)),)
        write_bench_report(bench(points=(replace(first, rounds=rounds), *others)), tmp_path)
        heads, rows = read_csv(tmp_path)
        assert f"'{name}_queue_us" in heads
        cells = [*heads, *(cell for row in rows for cell in row.values())]
        assert [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))] == []
        assert float(rows[0]["p99_us"]) == rounds[0].p99_us


def test_what_cannot_be_written_leaves_the_old_files_and_no_scraps(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    write_gate_report(gate_of(), ABOUT, tmp_path)
    write_files(tmp_path, {"a.txt": "ü"})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="serialize"):
        write_bench_report(bench(subject=subject(overrides={"x": object()})), tmp_path)
    with pytest.raises(TypeError):
        write_gate_report(gate_of(notes=(object(),)), ABOUT, tmp_path)
    with pytest.raises(UnicodeEncodeError):
        write_files(tmp_path, {"a.txt": "lost \ud800"})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "new/folder/report.html").mkdir(parents=True)
    with pytest.raises(OSError, match=r"report\.html"):
        write_gate_report(gate_of(), ABOUT, tmp_path / "new/folder")
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["report.html"]


def test_a_notebook_shows_the_metrics_of_a_build() -> None:
    page = BuildResult(BuildOutcome("minilm", ("minilm_core",), gate_of(), ()))._repr_html_()
    assert "<td>max_difference</td><td>0.0834</td><td>none</td><td>passed</td>" in page
    assert "<td>mean_cosine</td><td>0.9986</td><td>0.998</td><td>passed</td>" in page


def test_the_front_of_a_tuning_is_what_no_point_beats() -> None:
    def at(rate: float, p99: float, **changes: Any) -> LoadPoint:
        one = measurement(4, throughput_per_s=rate, p99_us=p99, **changes)
        return LoadPoint(OfferedLoad("concurrency", rate), (one,))

    def figures(one: LoadPoint) -> tuple[float, float]:
        return one.median("throughput_per_s"), one.median("p99_us")

    def front(points: list[LoadPoint]) -> tuple[LoadPoint, ...]:
        return pareto_front(points, lambda one: figures(one)[0], lambda one: figures(one)[1])

    def beats(one: LoadPoint, other: LoadPoint) -> bool:
        (a, b), (c, d) = figures(one), figures(other)
        return a >= c and b <= d and (a, b) != (c, d)

    points = [at(rate, p99) for rate in range(10, 60, 7) for p99 in range(rate // 2, 90, 11)]
    unbeaten = [one for one in points if not any(beats(other, one) for other in points)]
    assert {*map(figures, front(points))} == {*map(figures, unbeaten)}
    twice = [at(100, 10), at(100, 10)]
    assert front(twice)[0] is twice[0]
    failing = at(900, 1, errors={"deadline": 1})
    silent = replace(at(0, 0), rounds=(measurement(1, **NOTHING_ANSWERED),))
    assert front([failing, silent]) == front([]) == ()
    assert front([failing, silent, at(10, 10)])[0].load.value == 10
