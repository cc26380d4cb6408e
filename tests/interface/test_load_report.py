"""The report of a bench: every figure is there, it stands alone, and no result can break it."""

import csv
import json
import random
from collections import Counter
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from load_samples import (
    NASTY,
    NOTHING_ANSWERED,
    PROMISE,
    arrivals,
    baseline,
    bench,
    measurement,
    point,
    subject,
)
from triptych.interface.report.bench import shown_points, write_bench_report
from triptych.serving.bench.results import (
    BenchResult,
    LoadPoint,
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
    assert judge_slo(bench(slo=more)).kind == "cannot tell"  # 150/s held, and 165/s did not
    assert judge_slo(bench(slo=Slo(p99_ms=80.0, throughput=165.0))).kind == "not met"
    assert judge_slo(bench(slo=Slo(p99_ms=80.0, throughput=150.0))).kind == "met"
    assert judge_slo(bench(slo=more, rate=None)).kind == "cannot tell"  # 8 clients: 82 ms
    assert judge_slo(bench(slo=Slo(p99_ms=80.0, throughput=200.0), rate=None)).kind == "not met"
    assert judge_slo(bench(slo=Slo(), rate=None)).kind == "none"
    assert judge_slo(bench(points=(), rate=None)).kind == "cannot tell"


def test_noisy_measurements_do_not_make_a_firm_verdict() -> None:
    unproven = RateSearch(PROMISE, 0.0, None, (arrivals(5, 90.0),))
    verdict = judge_slo(bench(rate=unproven))
    assert (verdict.kind, verdict.word, verdict.passed) == (
        "cannot tell",
        "SLO: cannot tell",
        False,
    )
    assert verdict.explanation.endswith(
        "no rate that was tried is proven to meet it (5.00/s); cannot tell at 5.00/s, where the"
        " rounds vary too much."
    )
    # What missed at a higher rate says nothing about the lower one.
    partly = RateSearch(PROMISE, 0.0, 10.0, (arrivals(5, 90.0), arrivals(10, 300.0)))
    assert judge_slo(bench(rate=partly)).kind == "cannot tell"
    above = RateSearch(PROMISE, 150.0, 200.0, tuple(arrivals(r, 80.0) for r in (150, 170, 200)))
    assert "and missed at 200/s; cannot tell at 170/s" in judge_slo(bench(rate=above)).explanation
    noisy = tuple(measurement(8, p99_us=us) for us in (60e3, 130e3, 70e3))
    one = LoadPoint("minilm", OfferedLoad("concurrency", 8), noisy)
    verdict = judge_slo(bench(points=(one,), rate=None))
    assert verdict.kind == "cannot tell"
    assert "no load is proven to meet it" in verdict.explanation
    assert verdict.explanation.endswith(
        "1.02 times (0.370 to 2.82 with 95 % confidence) the limit: too close to the limit, or too"
        " noisy, for 100 rounds."
    )
    near = [replace(one, rounds=tuple(measurement(8, p99_us=us) for us in (50e3, 70e3, 75e3)))]
    text = judge_slo(bench(points=tuple(near), rate=None)).explanation
    assert "0.800 times (0.467 to 1.37 with 95 % confidence) the limit: about 10 rounds" in text
    once = judge_slo(bench(points=(replace(one, rounds=noisy[:1]),), rate=None))
    assert (once.kind, "one round does not show the noise" in once.explanation) == (
        "cannot tell",
        True,
    )
    failing = judge_slo(bench(points=(point(8, errors={"x": 1}),), rate=None))
    assert failing.kind == "not met"


def test_the_verdict_on_a_load_is_seldom_wrong() -> None:
    for noise in (0.02, 0.1, 0.3):
        for level, wrong in ((0.99, "missed"), (1.01, "met"), (0.5, "missed"), (2.0, "met")):
            rng, found = random.Random(9), Counter[str]()
            for _ in range(300):
                rounds = tuple(
                    measurement(8, p99_us=80e3 * level * exp(rng.gauss(0, noise)), steps=())
                    for _ in range(3)
                )
                one = LoadPoint("minilm", OfferedLoad("concurrency", 8), rounds)
                found[one.judge(PROMISE)] += 1
            assert found[wrong] <= 23, (noise, level, found)  # 5 % and two standard errors
            if noise < 0.05 and level in (0.5, 2.0):
                assert found["cannot tell"] == 0, (noise, level, found)


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
