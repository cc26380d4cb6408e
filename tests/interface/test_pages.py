"""The pieces of every page: texts and numbers, plots of curves and bars, files written whole."""

import math
import re

import pytest
from jinja2 import UndefinedError

from report_pages import Page, assert_finite_drawing, typed
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
from triptych.interface.report.pages import render
from triptych.interface.report.plots import (
    MAX_BINS,
    Dot,
    PlotBar,
    Series,
    compared,
    curves,
    histogram,
    interval,
    waterfall,
)


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


def test_only_an_interval_wholly_in_the_loss_is_red() -> None:
    for high, is_red in ((-0.01, True), (0.0, False), (-0.005, False)):
        assert ("whisker bad" in interval(-0.03, -0.04, high, 0.005)) == is_red, high


def test_a_histogram_counts_everything_once() -> None:
    counts = {length: length % 7 + 1 for length in range(3, 500)}
    page = Page(histogram("h", "H", counts, axes=("tokens", "rows")))
    assert_finite_drawing(page)
    tips = re.findall(r"tokens [\d,]+(?: to [\d,]+)?: ([\d,]+) rows", page.text)
    assert sum(int(tip.replace(",", "")) for tip in tips) == sum(counts.values())
    assert len(tips) <= MAX_BINS
    assert_finite_drawing(Page(histogram("h", "H", {1: 1, 10**9: 1}, axes=("x", "y"))))


def test_a_name_that_a_template_lacks_is_a_mistake() -> None:
    with pytest.raises(UndefinedError):
        render("gate.html.j2")
