"""SVG plots of the reports and for notebooks: histograms, bars, curves, intervals, scatter plots.

Each plot has a `name`, which is unique on its page, and a `title`. A plot without data is "".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import log10

from markupsafe import Markup

from triptych.base.formatting import MINUS, amount, figure, number, signed
from triptych.interface.report.svg import (
    WIDTH,
    Scale,
    SvgCanvas,
    linear,
    log_scale,
    logarithmic,
)
from triptych.repository.records import GateResult
from triptych.spec.traffic import Lengths

MAX_BINS = 40
MAX_BARS = 20
MIN_LOG_RATIO = 30
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""

MAX_FP16 = 65504.0
MIN_DIFFERENCE = 1e-12
"""Minimum difference that is drawn; smaller ones are below the resolution of float32."""

_LEFT, _RIGHT = 52, WIDTH - 12
_ROW, _RANGE_ROW, _LEGEND_ROW = 22, 19, 17
_CHARACTER = 7.2

Span = tuple[float, float]
Place = tuple[float, float, float]
Bins = list[tuple[float, float, int, int]]


@dataclass(frozen=True)
class PlotBar:
    """A bar of length `value` (0 or more) between its name and a text; `kind` is a CSS class."""

    name: str
    value: float
    text: str
    kind: str


@dataclass(frozen=True)
class Dot:
    """A measured point: medians of its rounds, with the minimum and maximum of the rounds as spans.

    `tip` is the full description, `note` a short label that is drawn if there is space.
    """

    x: float
    y: float
    tip: str
    note: str = ""
    x_span: Span | None = None
    y_span: Span | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind; `kind` is a CSS class: ``s1`` to ``s4``, ``cloud``."""

    name: str
    kind: str
    dots: tuple[Dot, ...]
    joined: bool = True


@dataclass(frozen=True)
class PrecisionPoint:
    """A measured precision: accuracy `x` and throughput `y` in rows/s.

    `status` is ``chosen``, ``passed`` or ``failed``.
    """

    name: str
    status: str
    x: float
    y: float


def histogram(
    name: str, title: str, counts: Mapping[int, int], *, axes: tuple[str, str], height: float = 150
) -> Markup:
    """Return a histogram of whole numbers (0 or more); wide ranges are binned.

    `axes` are the titles of the horizontal and the vertical axis.
    """
    held = {value: count for value, count in sorted(counts.items()) if count > 0}
    if not held:
        return Markup()
    draw, low, high = SvgCanvas(30, 30 + height), min(held), max(held)
    step = -(-(high - low + 1) // MAX_BINS)
    bins = [0] * -(-(high - low + 1) // step)
    for value, count in held.items():
        bins[(value - low) // step] += count
    end = max(low + len(bins) * step, low + 8) - 0.5
    x = Scale(low - 0.5, end, _LEFT, _RIGHT, whole=True)
    y = Scale(0, max(bins) * 1.1, draw.bottom, draw.top)
    draw.axis_left(y, _LEFT, _RIGHT, axes[1])
    draw.axis_below(x, axes[0])
    for first, count in zip(range(low, high + 1, step), bins, strict=True):
        if count:
            width = x(first + step - 0.5) - x(first - 0.5) - 1.5
            span = f"{first:,}" if step == 1 else f"{first:,} to {first + step - 1:,}"
            tip = f"{axes[0]} {span}: {count:,} {axes[1]}"
            # A bin with a single entry stays visible.
            tall = max(draw.bottom - y(count), 1.5)
            draw.box("bar", x(first - 0.5) + 0.75, draw.bottom - tall, max(width, 1.5), tall, tip)
    total = sum(held.values())
    mean = sum(value * count for value, count in held.items()) / total
    says = f"{total:,} {axes[1]}; {axes[0]} from {low:,} to {high:,}, mean {mean:,.1f}."
    return draw.svg(name, draw.bottom + 46, title, says)


def waterfall(name: str, title: str, bars: Sequence[PlotBar], total: str) -> Markup:
    """Return the parts of a sum as consecutive bars, and the sum with the text `total`."""
    values = [max(bar.value, 0.0) for bar in bars]
    starts = [*(sum(values[:index]) for index in range(len(bars))), 0.0]
    bars = [*bars, PlotBar("mean", sum(values), total, "whole")]
    longest = max((bar.value for bar in bars), default=0.0)
    if longest <= 0:
        return Markup()
    # Space for the names before the bars and for the texts after them.
    left = max(len(_cut(bar.name)) for bar in bars) * _CHARACTER + 10
    right = WIDTH - max(len(bar.text) for bar in bars) * 6.9 - 8
    draw, scale, height = (
        SvgCanvas(),
        Scale(0, longest, left, max(right, left + 60)),
        len(bars) * _ROW,
    )
    for index, (bar, start) in enumerate(zip(bars, starts, strict=True)):
        middle, first = index * _ROW + _ROW / 2 + 2, scale(start)
        width = max(scale(start + max(bar.value, 0.0)) - first, 1.5)
        if start:
            draw.line("grid", first, index * _ROW - 5, first, index * _ROW + 5)
        strong = " strong" if bar.kind == "whole" else ""
        draw.label(_cut(bar.name), left - 8, middle + 4, "end", f"name{strong}")
        draw.box(f"bar {bar.kind}", first, middle - 7, width, 14, f"{bar.name}: {bar.text}")
        draw.label(bar.text, first + width + 6, middle + 4, "start", f"value{strong}")
    draw.line("axis", left, 4, left, height)
    says = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return draw.svg(name, height + 6, title, says)


def curves(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    axes: tuple[str, str],
    limits: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool | None = None,
) -> Markup:
    """Return a plot of finite points (0 or more), with a line for each of `limits` (text to value).

    Args:
        axes: Titles of the horizontal and the vertical axis.
        log_x: Whether the horizontal axis is logarithmic; all `x` must then be above 0.
        log_y: Whether the vertical axis is logarithmic; None decides by `MIN_LOG_RATIO`.
    """
    series = [one for one in series if one.dots]
    dots = [each for one in series for each in one.dots]
    if not dots:
        return Markup()
    limits, draw = limits or {}, SvgCanvas()
    draw.top = _legend(draw, series, axes[1])
    draw.bottom = draw.top + 206
    if log_x:
        x = log_scale([each.x for each in dots], _LEFT, _RIGHT)
    else:
        widest = max(max(each.x, *(each.x_span or (0,))) for each in dots)
        x = Scale(0, widest * 1.06 or 1.0, _LEFT, _RIGHT)
    heights = [v for each in dots for v in (each.y, *(each.y_span or ()))]
    above = [value for value in (*heights, *limits.values()) if value > 0]
    if log_y is None:
        log_y = bool(above) and max(above) / min(above) > MIN_LOG_RATIO
    if log_y:
        y = log_scale(above, draw.bottom, draw.top + 8)
    else:
        y = Scale(0, max(above, default=1.0) * 1.12, draw.bottom, draw.top)
    draw.axis_left(y, _LEFT, _RIGHT, axes[1])
    draw.axis_below(x, axes[0])
    taken = [(x(each.x), y(each.y), 8.0) for each in dots]
    for index, (text, height) in enumerate(limits.items()):
        draw.line("limit", _LEFT, y(height), _RIGHT, y(height))
        at, anchor, way = (_LEFT + 5, "start", 1) if index % 2 == 0 else (_RIGHT - 2, "end", -1)
        draw.label(text, at, y(height) - 5, anchor, "limit")
        half = len(text) * _CHARACTER / 2
        taken.append((at + way * half, y(height) - 9, half))
    for one in series:
        _draw_series(draw, one, x, y)
    _notes(draw, dots, x, y, taken)
    words = [f"{one.name}: {'; '.join(each.tip for each in one.dots)}." for one in series]
    words += [f"Line: {text}." for text in limits]
    return draw.svg(name, draw.bottom + 46, title, " ".join(words))


def differences(values: Sequence[float], limit: float | None) -> Markup:
    """Return a histogram of one or more finite values (0 or more); values over `limit` are red."""
    above = sorted(value for value in values if value >= MIN_DIFFERENCE)
    equal = len(values) - len(above)
    limit = limit if limit is not None and limit >= MIN_DIFFERENCE else None
    draw, left = SvgCanvas(36 if limit else 22, 214), 44
    held = [*above, *([limit] if limit else [])] or [1e-7]
    x = logarithmic(held, left + (58 if equal else 0), WIDTH - 10)
    bins = _bins(above, limit, x)
    tallest = max([equal, *(within + over for _, _, within, over in bins)])
    y = Scale(0, tallest * 1.08, draw.bottom, draw.top)
    draw.axis_left(y, left, x.end, "rows")
    draw.axis_below(x, "difference")
    if equal:
        tip = f"{amount(equal, 'row')} without difference"
        draw.box("bar", left + 4, y(equal), 24, draw.bottom - y(equal), tip)
        draw.label("equal", left + 16, draw.bottom + 16, "middle", "tick")
    for low, high, within, over in bins:
        place, width = x(low) + 0.5, x(high) - x(low) - 1
        span = f"between {figure(low)} and {figure(high)}"
        tip = f"{amount(within, 'row')} {span}" if within else ""
        draw.box("bar", place, y(within), width, draw.bottom - y(within), tip)
        if over:
            tip = f"{amount(over, 'row')} {span}, over the limit"
            height = y(within) - y(within + over)
            draw.box("bar bad", place, y(within + over), width, height, tip)
    says = f"{amount(equal, 'row')} equal; {amount(len(above), 'row')} with a difference"
    says += f" from {figure(above[0])} to {figure(above[-1])}" if above else ""
    if limit:
        draw.limit(x, limit, f"limit {figure(limit)}")
        says += f"; {sum(value > limit for value in above):,} over the limit"
    return draw.svg("differences", draw.bottom + 46, "Differences of rows", says)


def interval(difference: float, low: float, high: float, max_drop: float) -> Markup:
    """Return a plot of the labeled metric's change with its 95 % confidence interval."""
    draw, middle = SvgCanvas(36, 116), 80
    x = linear([difference, low, high, 0.0, -max_drop], 12, WIDTH - 12, 0.15)
    draw.box("loss", x.start, draw.top, x(-max_drop) - x.start, draw.bottom - draw.top)
    draw.axis_below(x, f"candidate {MINUS} reference")
    draw.line("zero", x(0), draw.top - (19 if max_drop else 4), x(0), draw.bottom)
    if max_drop:
        draw.limit(x, -max_drop, f"limit {figure(-max_drop)}")
    draw.named(x, "no change", 0, "tick", 11 if max_drop else 26)
    draw.label("loss", x.start + 6, draw.bottom - 8, "start", "bad")
    kind = "bad" if high < -max_drop else "plain"
    tip = f"{signed(difference)}, 95 % interval from {signed(low)} to {signed(high)}"
    draw.line(f"whisker {kind}", x(low), middle, x(high), middle)
    for end in (low, high):
        draw.line(f"whisker {kind}", x(end), middle - 6, x(end), middle + 6)
    draw.dot(f"estimate {kind}", x(difference), middle, 5.5, tip)
    draw.label(signed(difference), x(difference), middle - 13, "middle", "strong")
    says = f"{tip}. Losses of more than {figure(max_drop)} are to the left of the limit."
    return draw.svg("interval", draw.bottom + 46, "Change of the labeled metric", says)


def ranges(found: Mapping[str, float], kept: Sequence[str], *, fp16: bool) -> Markup:
    """Return bars of the largest magnitudes: excluded layers (highlighted), then other layers.

    `found` maps layers or values to their finite ranges (0 or more). With `fp16`, the maximum of
    float16 is always drawn.
    """
    names, left = charted(found, kept), 214
    draw = SvgCanvas(36, 36 + _RANGE_ROW * len(names))
    near = fp16 or max(found.values()) > MAX_FP16 / 10
    above = [value for name in names if (value := found[name]) >= MIN_DIFFERENCE] or [1.0]
    x = logarithmic([*above, *([MAX_FP16] if near else [])], left, WIDTH - 14)
    head = common_head(names)
    draw.axis_below(x, "largest magnitude")
    for index, name in enumerate(names):
        middle = draw.top + _RANGE_ROW * (index + 0.5)
        state, tip = "plain", f"{name}: {figure(found[name], 1)}"
        if name in kept:
            state, tip = "kept", f"{tip}, kept"
        lost = " bad" if near and state == "plain" and found[name] > MAX_FP16 else ""
        short = name[len(head) :]
        short = short if len(short) <= 30 else f"…{short[-29:]}"
        draw.label(short, left - 8, middle + 4, "end", f"mono {state}")
        width = max(x(max(found[name], x.low)) - left, 1.5)
        draw.box(f"bar {state}{lost}", left, middle - 6, width, 12, tip)
    if near:
        draw.limit(x, MAX_FP16, "float16 maximum 65,504")
    marks = ((name, " (kept)" if name in kept else "") for name in names)
    says = "; ".join(f"{name} {figure(found[name], 1)}{mark}" for name, mark in marks)
    return draw.svg("ranges", draw.bottom + 46, "Ranges of layers", says)


def charted(found: Mapping[str, float], kept: Sequence[str]) -> list[str]:
    """Return the names that `ranges` draws, largest first; excluded layers take precedence."""
    excluded = set(kept)
    order = sorted(found, key=lambda name: (name not in excluded, -found[name]))[:MAX_BARS]
    return sorted(order, key=lambda name: -found[name])


def common_head(names: Sequence[str]) -> str:
    """Return the common prefix of names, up to a dot or slash; "" if it is short."""
    if len(names) < 2:
        return ""
    pairs = zip(min(names), max(names), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    head = shared[: max(shared.rfind("."), shared.rfind("/")) + 1]
    return head if len(head) > 3 else ""


def candidates(
    points: Sequence[PrecisionPoint], metric: str, limit: float | None, *, higher: bool
) -> Markup:
    """Return a plot of throughput over accuracy; better is up, and right if `higher`, else left."""
    draw, left = SvgCanvas(36, 254), 52
    xs = [point.x for point in points] + ([limit] if limit is not None else [])
    if higher:
        x = linear(xs, left + 8, WIDTH - 16, 0.12)
    else:
        x = logarithmic([max(value, MIN_DIFFERENCE) for value in xs], left + 8, WIDTH - 16)
    y = Scale(0, max(point.y for point in points) * 1.15 or 1.0, draw.bottom, draw.top)
    draw.axis_left(y, left, x.end, "rows/s")
    draw.axis_below(x, f"{metric} (better →)" if higher else f"(← better) {metric}")
    if limit is not None:
        draw.limit(x, limit, "limit")
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.y):
        at, middle = x(point.x), y(point.y)
        tip = f"{point.name}, {point.status}: {point.y:,.1f} rows/s, {metric} {figure(point.x)}"
        draw.dot(f"point {point.status}", at, middle, 6, tip)
        # Move the names so that they do not overlap.
        text = middle + 4
        while any(abs(text - other) < 15 and abs(at - beside) < 130 for beside, other in taken):
            text += 1
        taken.append((at, text))
        way, anchor = (1, "start") if at + 11 + len(point.name) * 8 < WIDTH else (-1, "end")
        draw.label(point.name, at + way * 11, text, anchor, f"strong {point.status}")
    says = "; ".join(
        f"{point.name} ({point.status}) {point.y:,.1f} rows/s at {figure(point.x)}"
        for point in points
    )
    return draw.svg("candidates", draw.bottom + 46, f"Throughput over {metric}", says)


def _cut(name: str, max_characters: int = 32) -> str:
    return name if len(name) <= max_characters else f"{name[: max_characters - 1]}…"


def _bins(above: Sequence[float], limit: float | None, x: Scale) -> Bins:
    """Return the bounds of each bin, and its numbers of values within and over the limit."""
    first = log10(x.low)
    decades = log10(x.high) - first
    count = min(40, max(20, round(decades * 5)))
    edges = [10 ** (first + decades * index / count) for index in range(count + 1)]
    counts = [[0, 0] for _ in range(count)]
    for value in above:
        index = min(count - 1, int((log10(value) - first) / decades * count))
        counts[index][limit is not None and value > limit] += 1
    return [(*span, w, o) for span, (w, o) in zip(pairwise(edges), counts, strict=True)]


def _draw_series(draw: SvgCanvas, one: Series, x: Scale, y: Scale) -> None:
    if one.joined:
        draw.path(f"curve {one.kind}", [(x(each.x), y(each.y)) for each in one.dots])
    for each in one.dots:
        low, high = each.y_span or (each.y, each.y)
        if y(low) - y(high) > 1:
            draw.line(f"spread {one.kind}", x(each.x), y(low), x(each.x), y(high))
        low, high = each.x_span or (each.x, each.x)
        if x(high) - x(low) > 1:
            draw.line(f"spread {one.kind}", x(low), y(each.y), x(high), y(each.y))
    for each in one.dots:
        draw.dot(f"mark {one.kind}", x(each.x), y(each.y), 3.5, each.tip)


def _notes(draw: SvgCanvas, dots: Sequence[Dot], x: Scale, y: Scale, taken: list[Place]) -> None:
    """Draw notes above or below their points, unless they overlap `taken` (x, y, half width)."""
    for each in (each for each in dots if each.note):
        half = len(each.note) * _CHARACTER / 2
        at = min(max(x(each.x), _LEFT + half), WIDTH - half)
        for middle in (y(each.y) - 12, y(each.y) + 13):
            if not any(abs(at - a) < half + r and abs(middle - b) < 11 for a, b, r in taken):
                taken.append((at, middle, half + 3))
                draw.label(each.note, at, middle + 4, "middle", "tick")
                break


def _legend(draw: SvgCanvas, series: Sequence[Series], up: str) -> float:
    """Draw the legend beside the title of the vertical axis; return the top of the plot below."""
    at = start = len(up) * _CHARACTER + 22
    height = 0.0
    for one in (one for one in series if one.name):
        text = _cut(one.name)
        width = 30 + len(text) * _CHARACTER + 8
        if at + width > WIDTH and at > start:
            at, height = start, height + _LEGEND_ROW
        if one.joined:
            draw.line(f"curve {one.kind}", at, height + 7, at + 20, height + 7)
        draw.dot(f"mark {one.kind}", at + 10, height + 7, 3.5)
        draw.label(text, at + 26, height + 11, "start", "tick")
        at += width
    return height + 36


_RULES = {
    "text": "font:13px system-ui,sans-serif;fill:#333",
    ".tick": "font-size:12px;fill:#666",
    ".axis": "stroke:#666",
    ".grid": "stroke:#e4e4e4",
    ".bar": "fill:#3c6eb4",
    ".bad": "fill:#c0392b",
    ".limit": "stroke:#c0392b",
    "text.limit": "fill:#c0392b;stroke:none",
}
# The class limits the rules to the plot; a notebook would apply them to its whole page.
_STYLE = "".join(f".triptych {name}{{{rule}}}" for name, rule in _RULES.items())


@dataclass(frozen=True)
class SvgFigure:
    """A plot as a complete SVG document."""

    svg: str

    def _repr_svg_(self) -> str:
        """Return the SVG for notebooks."""
        return self.svg


def plot_row_differences(gate: GateResult) -> SvgFigure:
    """Return a histogram of the rows' differences from the reference."""
    values = [v for each in gate.row_differences if (v := number(each)) is not None]
    limits = [each.limit for each in gate.verdicts if each.metric == "max_difference"]
    return _figure(differences(values, limits[0] if limits else None) if values else "")


def plot_row_lengths(lengths: Lengths | None) -> SvgFigure:
    """Return a histogram of the traffic's rows by their number of tokens."""
    counts = {} if lengths is None else lengths.counts
    return _figure(histogram("lengths", "Lengths of the traffic", counts, axes=("tokens", "rows")))


def _figure(drawing: str) -> SvgFigure:
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="triptych" '
    if not drawing:
        return SvgFigure(f'{head}width="1" height="1"/>')
    inner = drawing.removeprefix("<svg ")
    tag, _, marks = inner.partition(">")
    return SvgFigure(f'{head}width="{WIDTH}" {tag}><style>{_STYLE}</style>{marks}')
