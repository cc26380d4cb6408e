"""The report of a gate: it says what the gate found, stands alone, and no text can break it."""

import json
import math
import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from report_pages import (
    ABOUT,
    CANDIDATES,
    LAYERS,
    gate_of,
)
from triptych.interface.report import plots
from triptych.interface.report.gate import write_gate_report
from triptych.repository.records import plain_data

NAN = math.nan


def test_rows_beyond_the_limit_are_red() -> None:
    svg = plots.differences([1e-3, 0.01, 0.0501, 0.4], 0.05)
    beyond = re.findall(r'class="bar bad"[^>]*><title>(\d+) rows? between', svg)
    assert sum(map(int, beyond)) == 2
    assert "2 over the limit" in svg
    assert "bar bad" not in plots.differences([1e-3, 0.05], 0.05)


def test_only_an_interval_wholly_in_the_loss_is_red() -> None:
    assert "whisker bad" in plots.interval(-0.03, -0.04, -0.01, 0.005)
    assert "whisker bad" not in plots.interval(-0.03, -0.04, 0.0, 0.005)
    assert "whisker bad" not in plots.interval(-0.03, -0.04, -0.005, 0.005)


def test_kept_layers_are_drawn_before_larger_ones() -> None:
    found = {name: 1.0 + index for index, name in enumerate(LAYERS)}
    svg = plots.ranges(found, [LAYERS[0]], fp16=False)
    assert svg.count("<rect") == plots.MAX_BARS
    assert svg.count("bar kept") == 1
    assert "encoder.layer.0.query: 1.0, kept" in svg
    assert plots.common_head(plots.charted(found, [])) == "encoder.layer."


def test_float16_overflow_is_red_only_where_nothing_was_done_about_it() -> None:
    found = {"a": 131_000.0, "b": 140_000.0, "c": 2.0}
    assert plots.ranges(found, ["a"], fp16=True).count("bar plain bad") == 1


def test_names_of_candidates_do_not_run_into_each_other() -> None:
    points = [plots.PrecisionPoint(str(index), "passed", 0.99, 100.0) for index in range(5)]
    svg = plots.candidates(points, "mean_cosine", None, higher=True)
    heights = sorted(
        float(y) for y in re.findall(r'class="strong passed" x="[\d.]+" y="([\d.]+)"', svg)
    )
    assert len(heights) == 5
    assert all(after - before >= 15 for before, after in pairwise(heights))


def test_gate_json_is_the_gate(tmp_path: Path) -> None:
    gate = gate_of(row_differences=(math.nan, 1.0, math.inf), candidates=CANDIDATES)
    write_gate_report(gate, ABOUT, tmp_path)
    held = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert held["row_differences"] == [None, 1.0, None]
    assert held["verdicts"] == [asdict(each) for each in gate.verdicts]
    assert held["candidates"] == [plain_data(asdict(each)) for each in CANDIDATES]
    assert held["accepted"] is None
    assert {"rows", "labeled", "versions"} < held.keys()
    assert (held["pipeline"], held["layout"]) == ("minilm", "packed")
    write_gate_report(gate_of(conversion=None, accepted="why"), ABOUT, tmp_path)
    held = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert "candidates" not in held
    assert (held["conversion"], held["accepted"]) == (None, "why")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.json", "report.html"]


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_gate_report(gate_of(), ABOUT, tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(TypeError):
        write_gate_report(gate_of(notes=(object(),)), ABOUT, tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.json", "report.html"]


def test_a_write_that_fails_leaves_no_scraps(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write_gate_report(gate_of(), ABOUT, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
