"""The report of a bench: every figure is there, it stands alone, and no result can break it."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from load_samples import (
    NASTY,
    NOTHING_ANSWERED,
    PROMISE,
    baseline,
    bench,
    hostile,
    point,
    subject,
)
from report_pages import Page, assert_finite_drawing, assert_stands_alone
from triptych.interface.report.bench import page, shown_points, write_bench_report
from triptych.serving.bench.results import (
    BenchResult,
    OfferedLoad,
    RateSearch,
    collect_warnings,
    find_best_point,
    find_limiting_bottleneck,
    format_headline,
    from_json,
    judge_slo,
    to_json,
)
from triptych.spec.slo import Slo


def test_every_figure_is_shown() -> None:
    source = page(bench())
    assert_stands_alone(source)
    read = Page(source)
    assert_finite_drawing(read)
    for wanted in (
        "SLO met",
        "p99 ≤ 80 ms: met up to 150/s of requests that arrive at random, and missed at 165/s",
        "Best: 145/s at 4 clients, p50 25.9 ms, p99 50.5 ms",
        "Bottleneck: compute. The machine's 2 cores are 97 % busy",
        "Try precision int8",
        "p99 limit 80 ms",
        "49.5 to 51.5",  # p99 of four clients over its rounds
        "core queue",
        "transport",
        "scheduling",
        "7.3 % of the computed tokens are padding",
        "torch eager",
        "2.03 x as fast",  # LitServe at 8 clients: 178.5 / 88
        "USD 0.630",  # 0.34 / 3600 / 150 * 1e6
        "USD 2,234",  # 9 machines x 730 h x 0.34
        "9 for a peak of 900 requests/s",
        "minilm_core",
        "403",
        "97 % of 2",
        "Some Xeon",
        "0.22.0",
        "core.instances",
    ):
        assert wanted in read.text, wanted


def test_every_plot_shows_its_points() -> None:
    read = Page(page(bench()))
    titles = re.findall(r"<title id=\"([a-z0-9-]+)-t\">", page(bench()))
    assert titles == [
        *("latency", "queues", "rates", "rate-queues", "budget-0", "budget-1"),
        *("contenders", "batches-0", "batches-1", "batches-2", "lengths"),
    ]
    marks = [str(attrs["class"]) for tag, attrs in read.tags if tag == "circle"]
    assert marks.count("mark q3") == 6 + 5 + 2  # loads, rates, two legends
    assert read.count("line", "limit") == 2
    assert read.count("rect", "waits") == 3 * 2
    assert read.count("rect", "own") == 1
    assert read.count("rect", "other") == 4
    assert "32 clients: 148 ms on average, 55 % of it in queues" in read.text
    heads = [attrs for tag, attrs in read.tags if tag == "th" and attrs.get("scope") == "row"]
    assert len(heads) == 5 + 6 + 4 + 6  # rates, loads, baselines, processes


@pytest.mark.parametrize("name", NASTY)
def test_any_result_can_be_reported(name: str, tmp_path: Path) -> None:
    source = write_bench_report(NASTY[name], tmp_path).read_text(encoding="utf-8")
    assert_stands_alone(source)
    read = Page(source)
    assert_finite_drawing(read)
    assert not re.search(r"\b(nan|inf|None)\b", read.text)
    assert f"{len(NASTY[name].points[0].rounds)} round" in read.text if NASTY[name].points else True


@pytest.mark.parametrize(
    ("name", "wanted", "unwanted"),
    [
        (
            "errors only",
            ["SLO NOT MET", "no answer at 1 client", "14,436", "deadline"],
            ["polyline"],
        ),
        ("nothing stable", ["0 of 3", "the windows differ by 31 %"], []),
        ("one point", ["No SLO", "177 to 180"], ["Highest rate", "Baselines", "Cost", "missed"]),
        ("one round", ["1 round", "178"], [" to 180"]),
        ("no details", ["torch eager"], ["Time of a request", "Batches", "Resources"]),
        ("images", ["the same size"], ["padding"]),
        ("a GPU", ["NVIDIA L4", "81 % busy", "3,100"], []),
        ("broken promise", ["SLO NOT MET", "met at no load", "p50 limit 0.5 ms"], ["✓"]),
        (
            "open only",
            ["50/s in bursts of 8", "requests/s offered"],
            ["requests/s answered"],
        ),
        ("no point", ["SLO NOT MET", "nothing was measured"], ["Throughput and latency"]),
        ("slow", ["25,241,405"], []),
    ],
)
def test_what_is_special_is_said(name: str, wanted: list[str], unwanted: list[str]) -> None:
    read = Page(page(NASTY[name]))
    for text in wanted:
        assert text in read.text, text
    for text in unwanted:
        assert text not in read.text, text


WORDS = (
    "<script>alert(1)</script>",
    "</td></table></main></svg><style>*{display:none}</style>",
    "\" onload=alert(1) x='",
    "\u202eexe.txt\x00\x1b[31m",
    "A" * 5000,
)


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_hostile_names_are_inert(word: str) -> None:
    calm, wild = Page(page(hostile("calm"))), Page(page(hostile(word)))
    extra = {"span", "wbr"}  # spelled-out characters, what was left out
    assert [tag for tag, _ in wild.tags if tag not in extra] == [
        tag for tag, _ in calm.tags if tag not in extra
    ]
    assert_finite_drawing(wild)


def test_the_record_is_the_result(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("bench.csv", "bench.json", "report.html"),
    ]
    document = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert from_json(BenchResult, document) == bench()


def test_the_csv_has_a_row_for_each_point_and_round(tmp_path: Path) -> None:
    result = bench()
    write_bench_report(result, tmp_path)
    with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 3 + 4 * 3 + 5
    second = rows[1]
    wanted = result.points[0].rounds[1]
    assert (second["part"], second["contender"], second["round"]) == ("pipeline", "minilm", "2")
    assert float(second["throughput_per_s"]) == wanted.throughput_per_s
    assert float(second["p99_us"]) == wanted.p99_us
    assert float(second["core_queue_us"]) == wanted.steps[1].queue_us
    assert float(second["core_mean_batch"]) == wanted.steps[1].mean_batch
    of_torch = next(row for row in rows if row["contender"] == "torch eager")
    assert (of_torch["part"], of_torch["core_queue_us"]) == ("baseline", "")
    failing = bench(points=(point(1, **NOTHING_ANSWERED),))
    write_bench_report(failing, tmp_path)
    with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file))
    assert first["errors"] == "4815"
    assert json.loads(first["error_kinds"])["deadline"] == 3


def test_no_cell_of_the_csv_is_a_formula(tmp_path: Path) -> None:
    """Names come from a server that may be anybody's; numbers stay numbers."""
    for sign in "=+-@\t\r":
        name = f'{sign}HYPERLINK("http://x")'
        first, *others = (replace(one, contender=name) for one in bench().points)
        step, *steps = first.rounds[0].steps
        rounds = (replace(first.rounds[0], steps=(replace(step, step=name), *steps)),)
        result = bench(points=(replace(first, rounds=rounds), *others))
        write_bench_report(result, tmp_path)
        with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
            heads, *rows = csv.reader(file)
        assert f"'{name}_queue_us" in heads
        assert rows[0][heads.index("contender")] == f"'{name}"
        cells = [cell for row in (heads, *rows) for cell in row]
        assert [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))] == []
        assert float(rows[0][heads.index("p99_us")]) == rounds[0].p99_us


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    before = (tmp_path / "bench.json").read_bytes()
    with pytest.raises(ValueError, match="serialize"):
        write_bench_report(bench(subject=subject(overrides={"x": object()})), tmp_path)
    assert (tmp_path / "bench.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_the_verdict_is_of_rates_where_they_were_searched() -> None:
    assert judge_slo(bench()).kind == "met"
    nowhere = RateSearch(PROMISE, 0.0, 5.0, ())
    assert judge_slo(bench(rate=nowhere)).kind == "not met"  # though closed loops hold it
    closed = judge_slo(bench(rate=None))
    assert closed.kind == "met"
    assert closed.explanation == "p99 <= 80 ms: met at 1 client, 2 clients, 4 clients."
    more = Slo(p99_ms=80.0, throughput=151.0)
    assert judge_slo(bench(slo=more)).kind == "not met"  # only 150/s held
    assert judge_slo(bench(slo=more, rate=None)).kind == "not met"
    assert judge_slo(bench(slo=Slo(), rate=None)).kind == "none"
    assert judge_slo(bench(points=(), rate=None)).kind == "not met"


def test_the_nearest_load_is_named_where_none_holds() -> None:
    says = judge_slo(bench(slo=Slo(p99_ms=20.0), rate=None)).explanation
    assert "nearest: 68.2/s at 1 client" in says
    fast = judge_slo(bench(slo=Slo(throughput=900.0), rate=None)).explanation
    assert "nearest: 216/s at 32 clients" in fast


def test_the_best_point_holds_the_promise_where_one_does() -> None:
    points = bench().points
    for slo, clients in ((PROMISE, 4), (Slo(), 32), (Slo(p99_ms=0.1), 32)):
        best = find_best_point(points, slo)
        assert best is not None
        assert best.load.value == clients
    failing = point(64, errors={"deadline": 1})
    best = find_best_point((*points, failing), Slo())
    assert best is not None
    assert best.load.value == 32
    assert find_best_point((), Slo()) is None
    assert format_headline(bench(points=())) == ""
    assert find_limiting_bottleneck(()) is None
    assert find_limiting_bottleneck((baseline("x", OfferedLoad("in_process", 1), 9.0),)) is None


def test_warnings_that_differ_in_numbers_are_told_once() -> None:
    points = [point(clients, warnings=(f"differs by {clients} %",)) for clients in (1, 8)]
    assert collect_warnings([*points, point(2)]) == [
        "differs by 1 %, 6 similar warnings (minilm, 1 client; minilm, 8 clients)"
    ]
    one = replace(points[0], rounds=points[0].rounds[:1])
    assert collect_warnings([one]) == ["differs by 1 % (minilm, 1 client)"]


def test_the_best_and_the_largest_load_are_shown() -> None:
    assert [one.load.value for one in shown_points(bench())] == [4, 32]
    assert [one.load.value for one in shown_points(bench(slo=Slo()))] == [1, 32]
    assert [one.load.value for one in shown_points(NASTY["one point"])] == [8]
    assert shown_points(NASTY["no point"]) == []


def test_a_result_of_an_earlier_release_is_read() -> None:
    document = to_json(bench())
    text = json.dumps(document)
    assert '"explanation"' in text
    earlier = json.loads(text.replace('"explanation"', '"says"'))
    assert from_json(BenchResult, earlier) == bench()
