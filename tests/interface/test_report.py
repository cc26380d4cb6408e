"""Files beside the page of a report: records that are read again, tables, and none half written."""

import csv
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from load_samples import NOTHING_ANSWERED, bench, measurement, point, subject, tuned
from report_pages import ABOUT, CANDIDATES, gate_of
from triptych.base.files import write_files
from triptych.interface.report.bench import write_bench_report
from triptych.interface.report.gate import write_gate_report
from triptych.interface.report.tune import write_tune_report
from triptych.operate.tune.results import TuneResult, pareto_front
from triptych.repository.records import plain_data
from triptych.serving.bench.results import BenchResult, LoadPoint, OfferedLoad, from_json


def read_csv(folder: Path) -> list[list[str]]:
    with (folder / "bench.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_a_record_is_the_result(tmp_path: Path) -> None:
    write_bench_report(bench(), tmp_path)
    assert write_tune_report(tuned(), tmp_path) == tmp_path / "report.html"
    gate = gate_of(row_differences=(math.nan, 1.0, math.inf), candidates=CANDIDATES)
    write_gate_report(gate, ABOUT, tmp_path)
    names = ["bench.csv", "bench.json", "gate.json", "report.html", "tune.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    text = (tmp_path / "bench.json").read_text(encoding="utf-8")
    assert from_json(BenchResult, json.loads(text)) == bench()
    assert '"explanation"' in text  # which an earlier release called otherwise
    earlier = json.loads(text.replace('"explanation"', '"says"'))
    assert from_json(BenchResult, earlier) == bench()
    document = json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))
    assert from_json(TuneResult, document) == tuned()
    held = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert held["row_differences"] == [None, 1.0, None]
    assert held["verdicts"] == [asdict(each) for each in gate.verdicts]
    assert held["candidates"] == [plain_data(asdict(each)) for each in CANDIDATES]
    assert {"rows", "labeled", "versions"} < held.keys()
    assert (held["pipeline"], held["layout"], held["accepted"]) == ("minilm", "packed", None)
    write_gate_report(gate_of(conversion=None, accepted="why"), ABOUT, tmp_path)
    held = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert "candidates" not in held
    assert (held["conversion"], held["accepted"]) == (None, "why")


def test_the_csv_has_a_row_for_each_point_and_round(tmp_path: Path) -> None:
    result = bench()
    write_bench_report(result, tmp_path)
    heads, *lines = read_csv(tmp_path)
    rows = [dict(zip(heads, line, strict=True)) for line in lines]
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
    write_bench_report(bench(points=(point(1, **NOTHING_ANSWERED),)), tmp_path)
    heads, line, *_ = read_csv(tmp_path)
    first = dict(zip(heads, line, strict=True))
    assert first["errors"] == "4815"
    assert json.loads(first["error_kinds"])["deadline"] == 3


def test_no_cell_of_the_csv_is_a_formula(tmp_path: Path) -> None:
    """Names come from a server that may be anybody's; numbers stay numbers."""
    for sign in "=+-@\t\r":
        name = f'{sign}HYPERLINK("http://x")'
        first, *others = (replace(one, contender=name) for one in bench().points)
        step, *steps = first.rounds[0].steps
        rounds = (replace(first.rounds[0], steps=(replace(step, step=name), *steps)),)
        write_bench_report(bench(points=(replace(first, rounds=rounds), *others)), tmp_path)
        heads, *rows = read_csv(tmp_path)
        assert f"'{name}_queue_us" in heads
        assert rows[0][heads.index("contender")] == f"'{name}"
        cells = [cell for row in (heads, *rows) for cell in row]
        assert [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))] == []
        assert float(rows[0][heads.index("p99_us")]) == rounds[0].p99_us


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


def test_the_front_of_a_tuning_is_what_no_point_beats() -> None:
    def at(rate: float, p99: float, **changes: Any) -> LoadPoint:
        one = measurement(4, throughput_per_s=rate, p99_us=p99, **changes)
        return LoadPoint("p", OfferedLoad("concurrency", rate), (one,))

    def figures(one: LoadPoint) -> tuple[float, float]:
        return one.median("throughput_per_s"), one.median("p99_us")

    def beats(one: LoadPoint, other: LoadPoint) -> bool:
        (a, b), (c, d) = figures(one), figures(other)
        return a >= c and b <= d and (a, b) != (c, d)

    points = [at(rate, p99) for rate in range(10, 60, 7) for p99 in range(rate // 2, 90, 11)]
    unbeaten = [one for one in points if not any(beats(other, one) for other in points)]
    assert {*map(figures, pareto_front(points))} == {*map(figures, unbeaten)}
    twice = [at(100, 10), at(100, 10)]
    assert pareto_front(twice)[0] is twice[0]
    failing = at(900, 1, errors={"deadline": 1})
    silent = replace(at(0, 0), rounds=(measurement(1, **NOTHING_ANSWERED),))
    assert pareto_front([failing, silent]) == pareto_front([]) == ()
    assert pareto_front([failing, silent, at(10, 10)])[0].load.value == 10
