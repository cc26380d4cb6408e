"""The report of a gate: it says what the gate found, stands alone, and no text can break it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from report_pages import (
    ABOUT,
    CANDIDATES,
    CONVERSION,
    LABELED,
    LAYERS,
    NOTHING_KNOWN,
    Page,
    assert_finite_drawing,
    assert_stands_alone,
    candidate,
    gate_of,
    probe_of,
    verdict,
)
from triptych.interface.report import plots
from triptych.interface.report.gate import GateHeader, write_gate_report
from triptych.repository.records import Conversion, GateResult, PrecisionTrial, WorstRow, plain_data

NAN = math.nan

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "</td></tr></table></main></svg><style>*{display:none}</style>",
    "\" onload=alert(1) x='",
    "\u202eexe.txt\u202c \u200f\u2066 \u05e9\u05dc\u05d5\u05dd",
    "\x00\x07\x1b[31m\r\n\t\x85 \ud800 \ufffe",
    "A" * 5000,
    "Z" + "\u0337\u0321" * 300,
    "&amp; ]]> -->",
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Page]:
    """Writes a report and takes it apart."""

    def write(
        gate: GateResult, candidates: tuple[PrecisionTrial, ...] = (), about: GateHeader = ABOUT
    ) -> Page:
        write_gate_report(replace(gate, candidates=candidates), about, tmp_path / "out")
        return Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))

    return write


def test_a_report_stands_alone_and_shows_every_figure(read: Callable[..., Page]) -> None:
    page = read(gate_of(), CANDIDATES)
    assert page.count("svg") == 4
    assert_finite_drawing(page)
    for wanted in (
        "Passed",
        "All 2 limits are met",
        "≥ 0.9980",
        "texts with the same nearest neighbor",
        "0.8214",
        "most sensitive",
        "a text",
        "a note",
        "of the conversion",
        "BertModel",
        "1.22.0",
        "231.9",
        "24.1",
        "0.88 is below 0.97",
        "Not measured: bf16.",
    ):
        assert wanted in page.text, wanted


def test_the_style_sheet_asks_for_nothing(read: Callable[..., Page], tmp_path: Path) -> None:
    read(gate_of())
    source = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    style = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face|//", style)
    for wanted in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem"):
        assert wanted in style


def test_every_plot_has_words_for_who_cannot_see_it(
    read: Callable[..., Page], tmp_path: Path
) -> None:
    page = read(gate_of(), CANDIDATES)
    assert_stands_alone((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert "1 row equal; 3 rows with a difference" in page.text


def test_what_is_outside_the_traffic_has_a_section_of_its_own(read: Callable[..., Page]) -> None:
    assert "Outside your traffic" not in read(gate_of()).text
    text = read(gate_of(probe=probe_of(passed=True), rounding=1.65e-5)).text
    section = text.split("Outside your traffic")[1].split("Labeled rows")[0]
    for wanted in ("394 texts", "mean_neighbor_loss", "≤ 0.0015", "a text of the probe"):
        assert wanted in section, wanted
    assert "All 3 limits are met" in text
    assert "Rounding of PyTorch1.7 x 10⁻⁵" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"failures": ("mean_cosine 0.99 is below 0.998",)},
        {"finite": False},
        {"verdicts": ()},
        {"verdicts": (verdict("mean_cosine", math.nan, 0.998, passed=False),)},
        {"verdicts": (verdict("max_difference", math.nan, None, passed=False),)},
        {"labeled": replace(LABELED, failure="fell by 0.03")},
        {"probe": probe_of(passed=False)},
    ],
    ids=str,
)
def test_only_a_gate_without_any_fault_reads_as_passed(
    read: Callable[..., Page], changes: dict[str, Any]
) -> None:
    page = read(gate_of(**changes))
    assert page.count("div", "failed") == 1
    assert page.count("div", "passed") == 0
    assert "FAILED" in page.text
    again = read(gate_of(**changes, accepted="launch <b>freeze</b>"))
    assert again.count("div", "accepted") == 1
    assert "Accepted despite failure" in again.text
    assert "launch <b>freeze</b>" in again.text


def test_a_failure_is_listed_once(read: Callable[..., Page]) -> None:
    labeled = replace(LABELED, failure="fell by 0.03")
    for failures in ((), ("fell by 0.03",)):
        page = read(gate_of(failures=failures, labeled=labeled))
        assert page.text.count("fell by 0.03") == 2  # in the verdict and beside its plot


def test_each_verdict_has_its_row(read: Callable[..., Page]) -> None:
    verdicts = (
        verdict("mean_cosine", 0.99799996, 0.998, passed=False),
        verdict("batch_sensitivity", 2e-7, 1e-5),
        verdict("max_difference", math.nan, 0.05, passed=False),
        verdict("of_a_later_version", 0.5, 0.4),
    )
    page = read(gate_of(verdicts=verdicts, labeled=None, worst=(), conversion=None))
    assert page.count("th") - 4 == len(verdicts)
    assert page.count("tr", "failed") == 2
    assert "2 of 4 limits are exceeded" in page.text
    for wanted in (
        "0.99799996",
        "0.99800000",
        "2.0 x 10⁻⁷",
        "≤ 1.0 x 10⁻⁵",
        "not finite",
        "0.4000",
    ):
        assert wanted in page.text, wanted


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_inert(read: Callable[..., Page], text: str, tmp_path: Path) -> None:
    few, many = (
        read(
            gate_of(
                failures=(word,),
                notes=(word,),
                worst=(WorstRow(word, 1.0, 1.0, word, word),),
                accepted=word,
                conversion=Conversion((word,), (word,), {word: word}, {word: 2.0}),
                verdicts=(verdict(word, 1.0, 1.0),),
            ),
            (candidate(word, "chosen", note=word, failures=(word,), verdicts={word: 0.5}),),
            GateHeader(word, word, word, word, {word: word}),
        )
        for word in ("calm", text)
    )
    extra = {"span", "wbr"}  # spelled-out characters, what was left out, breaks of names
    assert [tag for tag, _ in many.tags if tag not in extra] == [
        tag for tag, _ in few.tags if tag not in extra
    ]
    source = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert not re.search(
        "[\u202a-\u202e\u2066-\u2069\u200f\x00-\x09\x0b-\x1f\x7f-\x9f\ufffe]", source
    )


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [0.0] * 5, [0.3], [1e-320, 1e299], [NAN, NAN], [NAN, 0.1], [-1.0], [1e-7] * 400],
    ids=str,
)
@pytest.mark.parametrize("limit", [None, 0.0, 1e-5, 1e280])
def test_differences_of_any_kind_are_drawn(
    read: Callable[..., Page], values: list[float], limit: float | None
) -> None:
    verdicts = (verdict("max_difference", 0.1, limit),)
    page = read(gate_of(row_differences=tuple(values), verdicts=verdicts))
    assert_finite_drawing(page)
    assert ("not finite" in page.text) == (NAN in values)


def test_rows_beyond_the_limit_are_red() -> None:
    svg = plots.differences([1e-3, 0.01, 0.0501, 0.4], 0.05)
    beyond = re.findall(r'class="bar bad"[^>]*><title>(\d+) rows? between', svg)
    assert sum(map(int, beyond)) == 2
    assert "2 over the limit" in svg
    assert "bar bad" not in plots.differences([1e-3, 0.05], 0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"difference": 0.0, "low": 0.0, "high": 0.0, "max_drop": 0.0},
        {"difference": 0.5, "low": 0.4, "high": 0.6, "max_drop": 0.0},
        {"difference": -1e-12, "low": -1.0, "high": 1.0},
        {"low": NAN},
        {name: NAN for name, value in asdict(LABELED).items() if isinstance(value, float)},
    ],
    ids=str,
)
def test_any_labeled_result_can_be_shown(
    read: Callable[..., Page], changes: dict[str, Any]
) -> None:
    page = read(gate_of(labeled=replace(LABELED, **changes), conversion=None))
    assert_finite_drawing(page)
    assert page.count("svg") == (1 if NAN in changes.values() else 2)


def test_only_an_interval_wholly_in_the_loss_is_red() -> None:
    assert "whisker bad" in plots.interval(-0.03, -0.04, -0.01, 0.005)
    assert "whisker bad" not in plots.interval(-0.03, -0.04, 0.0, 0.005)


@pytest.mark.parametrize(
    "ranges",
    [{}, {"one": 0.0}, {"one": 3.0}, {"one": NAN, "two": 1e299}, {"one": -7.0, "two": 7.0}],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_any_ranges_can_be_drawn(
    read: Callable[..., Page], ranges: dict[str, float], precision: str
) -> None:
    conversion = replace(CONVERSION, ranges=ranges, excluded_layers=("one",), reasons={})
    page = read(gate_of(conversion=conversion, precision=precision, labeled=None))
    assert_finite_drawing(page)
    assert page.count("svg") == 1 + bool(ranges)
    drawn = any(value is not NAN for value in ranges.values())
    assert ("65,504" in page.text) == (drawn and (precision == "fp16" or 1e299 in ranges.values()))


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


@pytest.mark.parametrize(
    "candidates",
    [
        (candidate("fp32", "chosen"),),
        (candidate("fp32", "chosen", throughput_per_s=0.0),),
        (NOTHING_KNOWN,),
        (NOTHING_KNOWN, candidate("int8", "chosen"), candidate("int8", "passed")),
        (candidate("int8", "chosen", verdicts={"batch_sensitivity": 0.0}),),
        (candidate("a", "failed", verdicts={"mean_cosine": -1.0}, throughput_per_s=1e299),),
    ],
    ids=range(6),
)
def test_any_candidates_can_be_shown(
    read: Callable[..., Page], candidates: tuple[PrecisionTrial, ...]
) -> None:
    page = read(gate_of(conversion=None, labeled=None), candidates)
    assert_finite_drawing(page)
    measured = sum(each.throughput_per_s is not None for each in candidates)
    assert page.count("circle") == measured


def test_the_scatter_shows_the_metric_with_the_least_to_spare(read: Callable[..., Page]) -> None:
    page = read(gate_of(), CANDIDATES)
    assert "Throughput over nearest_neighbor_agreement, the metric" in page.text  # .75, .695
    assert page.count("circle", "point") == 3
    assert page.count("td", "chosen") == 7
    assert "1.43" in page.text


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
