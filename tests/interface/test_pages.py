"""The pieces of every page: texts and numbers, plots of curves and bars, files written whole."""

import math
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from report_pages import Page, assert_finite_drawing, assert_stands_alone, typed
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
from triptych.interface.report.pages import PAGES, render
from triptych.interface.report.plots import (
    MAX_BINS,
    Dot,
    PlotBar,
    Series,
    compared,
    curves,
    histogram,
    waterfall,
)
from triptych.interface.report.svg import linear, log_scale


def test_texts_keep_what_can_be_read() -> None:
    assert shown("a\u202eb") == '<bdi>a<span class="mark">U+202E</span>b</bdi>'
    assert "↵" in shown("a\nb")
    assert f"U+0000 {TIMES}3" in shown("\x00\x00\x00")
    assert "\u0645\u06cc\u200c\u062e\u0648" in shown("\u0645\u06cc\u200c\u062e\u0648")
    assert "4,760 more characters" in shown("A" * (MAX_TEXT + 4760))
    assert "empty" in shown("")
    assert "3 blanks" in shown("   ")
    assert plain('<"\u202e') == "&lt;&quot;[U+202E]"


def test_figures_never_round_a_fault_away() -> None:
    texts = {
        None: "—", math.nan: "—", 0: "0", 0.5: "0.5000", 1.0: "1.0000", 0.99999997: "0.99999997",
        -0.0017: "-0.0017", 3.1e-6: "3.1e-06", 12345.678: "12,345.6780", 1e30: "1.0e+30",
    }  # fmt: skip
    assert [typed(figure(value)) for value in texts] == list(texts.values())
    assert figure(True) == "—"


def test_a_value_beside_its_limit_reads_differently() -> None:
    for limit in (0.998, 1e-5, 0.05, 2e-3):
        assert figures(limit, limit)[0] == figures(limit, limit)[1]
        for off in (-1e-7, 1e-7):
            value, bound = figures(limit * (1 + off), limit)
            assert value != bound, (limit, off)


def test_numbers_are_finite_or_none() -> None:
    assert [number(v) for v in (1, 2.5, -3)] == [1.0, 2.5, -3.0]
    assert [number(v) for v in (None, True, "1", math.inf, 10**400, 1e305)] == [None] * 6


def test_measured_numbers_have_three_digits_that_count() -> None:
    texts = {
        None: "—", math.inf: "—", 0.0: "0", 231.94: "232", 23.194: "23.2", 1.0: "1.00",
        0.0456: "0.0456", 12345.6: "12,346", -4.2: "-4.20", 2e-6: "2.0e-06", 3e12: "3.0e+12",
    }  # fmt: skip
    assert [typed(rounded(value)) for value in texts] == list(texts.values())


def test_units_of_measured_numbers() -> None:
    assert milliseconds(41_234.0) == "41.2"
    assert milliseconds(None) == "—"
    assert milliseconds(-3e-11) == "0"
    shares = (0.553, 0.004, 0.0, 0.999, 1.0, None)
    texts = ["55 %", "0.4 %", "0 %", "99.9 %", "100 %", "—"]
    assert [typed(percent(share)) for share in shares] == texts
    assert [typed(signed_percent(share)) for share in (0.12, -0.27)] == ["+12 %", "-27 %"]
    assert [typed(signed(value)) for value in (0.5, 0.0, -0.5)] == ["+0.5000", "0", "-0.5000"]
    assert [amount(1, "batch", "es"), amount(2, "batch", "es")] == ["1 batch", "2 batches"]


def series(*places: tuple[float, float], kind: str = "s1") -> Series:
    return Series("one", kind, tuple(Dot(x, y, f"at {x:g}", note=f"{x:g}") for x, y in places))


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
        svg = curves("c", "<C>", [series(*places)], axes=("x", "y"), limits=limits)
        page = Page(svg)
        assert_finite_drawing(page)
        assert page.count("circle", "mark") == len(places) + 1, places  # and the legend's
        marks = [attrs["cx"] for tag, attrs in page.tags if tag == "circle"]
        assert len(set(marks)) == len({x for x, _ in places}) + 1, places
        assert page.count("line", "limit") == 2
        assert page.count("polyline") == (len(places) > 1), places
        assert "<C>" in page.text


def test_no_point_is_no_plot() -> None:
    assert curves("c", "C", [], axes=("x", "y")) == ""
    assert curves("c", "C", [series()], axes=("x", "y")) == ""
    assert histogram("h", "H", {4: 0}, axes=("x", "y")) == ""
    assert waterfall("w", "W", [], "0") == ""
    assert waterfall("w", "W", [PlotBar("a", 0.0, "0", "s1")], "0") == ""
    assert compared("b", "B", []) == ""


def test_the_spread_of_rounds_is_drawn() -> None:
    dot = Dot(10.0, 10.0, "tip", x_span=(8.0, 12.0), y_span=(5.0, 15.0))
    one = Series("one", "s1", (dot, Dot(20.0, 20.0, "alone")))
    page = Page(curves("c", "C", [one], axes=("x", "y")))
    assert page.count("line", "spread") == 2


def test_notes_do_not_run_into_each_other() -> None:
    crowded = [(100 + x / 100, 10.0) for x in range(20)]
    page = Page(curves("c", "C", [series((1.0, 1.0), *crowded)], axes=("x", "y")))
    notes = [attrs for tag, attrs in page.tags if tag == "text" and attrs.get("class") == "tick"]
    places = [(float(str(each["x"])), float(str(each["y"]))) for each in notes]
    assert "100.01" not in page.text.split("at 100")[0]
    assert len(places) == len(set(places))


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    near = curves("c", "C", [series((1.0, 1.0), (2.0, 20.0))], axes=("x", "y"))
    far = curves("c", "C", [series((1.0, 1.0), (2.0, 900.0))], axes=("x", "y"))
    assert ">0<" in near.split("polyline")[0]
    assert re.findall(r">10{0,2}<", far[far.index("grid") :])[:3] == [">1<", ">10<", ">100<"]
    assert [text for _, text in log_scale([0.03, 0.4], 0, 1).ticks()] == [
        *("0.02", "0.05", "0.1", "0.2", "0.5"),
    ]
    assert linear([1.0, 1.0], 0, 1).high > 1


def test_a_histogram_counts_everything_once() -> None:
    counts = {length: length % 7 + 1 for length in range(3, 500)}
    page = Page(histogram("h", "H", counts, axes=("tokens", "rows")))
    assert_finite_drawing(page)
    tips = re.findall(r"tokens [\d,]+(?: to [\d,]+)?: ([\d,]+) rows", page.text)
    assert sum(int(tip.replace(",", "")) for tip in tips) == sum(counts.values())
    assert len(tips) <= MAX_BINS
    one = Page(histogram("h", "H", {1: 9}, axes=("rows a batch", "batches")))
    assert "rows a batch 1: 9 batches" in one.text
    assert_finite_drawing(Page(histogram("h", "H", {1: 1, 10**9: 1}, axes=("x", "y"))))


def test_a_waterfall_goes_on_where_the_last_part_ends() -> None:
    bars = [
        PlotBar("a", 1.0, "1", "s1"),
        PlotBar("none", -2.0, "-2", "s1"),
        PlotBar("b", 3.0, "3", "s2"),
    ]
    page = Page(waterfall("w", "W", bars, "4 ms"))
    boxes = [attrs for tag, attrs in page.tags if tag == "rect"]
    starts = [float(str(each["x"])) for each in boxes]
    widths = [float(str(each["width"])) for each in boxes]
    assert starts[2] == pytest.approx(starts[0] + widths[0], abs=0.11)
    assert widths[3] == pytest.approx(widths[0] + widths[2], abs=0.2)
    assert widths[2] == pytest.approx(3 * widths[0], rel=0.02)
    assert "4 ms" in page.text


PIECES = """
{% extends "page.html.j2" %}
{% from "parts.html.j2" import listed, section %}
{% block title %}{{ word }}{% endblock %}
{% block style %}.own { color: red; }{% endblock %}
{% block body %}
{% call section("Nothing") %}{{ listed("notes", ()) }}{% endcall %}
{% call section("One") %}<p>{{ word }}</p>{% endcall %}
{% endblock %}
"""


def test_a_page_stands_alone() -> None:
    source = PAGES.from_string(PIECES).render(word="<b>\u202e")
    assert_stands_alone(source)
    assert ".own" in source
    page = Page(source)
    assert page.count("h2") == 1
    assert page.text.count("<b>[U+202E]") == 2  # though no filter was named


def test_a_name_that_a_template_lacks_is_a_mistake() -> None:
    with pytest.raises(UndefinedError):
        render("gate.html.j2")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_files(tmp_path / "new/folder", {"a.txt": "ü", "b.txt": "b"})
    assert (tmp_path / "new/folder/a.txt").read_text(encoding="utf-8") == "ü"
    with pytest.raises(UnicodeEncodeError):
        write_files(tmp_path / "new/folder", {"a.txt": "lost \ud800"})
    assert (tmp_path / "new/folder/a.txt").read_text(encoding="utf-8") == "ü"
    assert sorted(path.name for path in (tmp_path / "new/folder").iterdir()) == ["a.txt", "b.txt"]
