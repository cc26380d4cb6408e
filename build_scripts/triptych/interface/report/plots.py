"""Every plot of every page, as SVG: histograms, bars, curves, an interval, a scatter.

A drawing's `name` is used once a page, its `title` says what it shows; where there is nothing to
show it is "".

What plots are made of: scales with their ticks, and marks as SVG.

Plots that stand by themselves: a notebook shows them, a file of one is an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import ceil, floor, log10

from markupsafe import Markup

from triptych.base.formatting import MINUS, amount, figure, number, plain, power, rounded, signed
from triptych.repository.records import GateResult
from triptych.spec.traffic import Lengths

WIDTH = 440
"""Of every plot, in its own units; the page scales it."""


@dataclass(frozen=True)
class Scale:
    """From values to positions.

    Attributes:
        low: value at `start`.
        high: value at `end`; above `low`.
        start: position.
        end: position; may be less than `start`.
        log: equal steps multiply; both values above 0.
        fine: a logarithmic axis has ticks at 2 and 5 as well, where there are not too many.
        whole: a linear axis has ticks at whole numbers only.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    fine: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """Position of `value`, at the axis's end where it lies beyond it."""
        value = min(max(value, self.low), self.high)
        if self.log:
            first = log10(self.low)
            share = (log10(value) - first) / (log10(self.high) - first)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """At most about `most` round values with their texts."""
        if self.log and self.fine:
            steps = _steps(self.low, self.high)
            powers = [step for step in steps if abs(log10(step) - round(log10(step))) < 1e-9]
            return [(v, _short(v)) for v in (steps if len(steps) <= most + 2 else powers)]
        if self.log:
            first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
            step = max(1, ceil((last - first) / most))
            return [(10.0**e, power(10.0**e)) for e in range(first, last + 1, step)]
        rough = (self.high - self.low) / most
        unit = 10.0 ** floor(log10(rough))
        size = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
        first, last = ceil(self.low / size - 1e-9), floor(self.high / size + 1e-9)
        values = [index * size for index in range(first, last + 1)]
        if self.whole:
            return [(value, f"{round(value):,}") for value in values if value == round(value)]
        digits = max(0, -floor(log10(size) + 1e-9))
        return [(value, figure(value, digits)) for value in values]


def linear(values: Iterable[float], start: float, end: float, margin: float = 0.1) -> Scale:
    """A scale over `values`, at least one, with a `margin` (share of their range) on both sides."""
    held = list(values)
    low, high = min(held), max(held)
    room = (high - low) * margin or abs(high) * 0.1 or 1.0
    return Scale(low - room, high + room, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale over `values`, at least one and all above 0, out to whole powers of ten."""
    held = list(values)
    first, last = floor(log10(min(held))), ceil(log10(max(held)))
    return Scale(10.0**first, 10.0 ** max(last, first + 1), start, end, log=True)


def snug(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale over `values`, at least one above 0, out to 1, 2 or 5 times a power."""
    held = [value for value in values if value > 0]
    low, high = min(held), max(held)
    if high / low > 1e6:
        return logarithmic(held, start, end)
    around = _steps(low / 10, high * 10)
    first = max(step for step in around if step <= low * (1 + 1e-9))
    last = min(step for step in around if step >= high * (1 - 1e-9) and step > first)
    return Scale(first, last, start, end, log=True, fine=True)


class Drawing:
    """The marks of one plot in the order they are drawn; its axes span `top` to `bottom`."""

    def __init__(self, top: float = 0, bottom: float = 0) -> None:
        self.top, self.bottom = top, bottom
        self._marks: list[str] = []

    def svg(self, name: str, height: float, title: str, says: str) -> Markup:
        """The plot; `says` is for who cannot see it, and `name` is used once a page."""
        ids = f'role="img" aria-labelledby="{name}-t {name}-d"'
        return Markup(
            f'<svg viewBox="0 0 {WIDTH} {height:.0f}" {ids}><title id="{name}-t">{plain(title)}'
            f'</title><desc id="{name}-d">{plain(says)}</desc>{"".join(self._marks)}</svg>'
        )

    def _mark(self, tag: str, kind: str, held: str = "", **places: float) -> None:
        at = "".join(f' {name}="{value:.1f}"' for name, value in places.items())
        self._marks.append(f'<{tag} class="{kind}"{at}>{held}</{tag}>')

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._mark("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def box(
        self, kind: str, x: float, y: float, width: float, height: float, tip: str = ""
    ) -> None:
        self._mark("rect", kind, _tip(tip), x=x, y=y, width=max(width, 0), height=max(height, 0))

    def dot(self, kind: str, x: float, y: float, radius: float, tip: str = "") -> None:
        self._mark("circle", kind, _tip(tip), cx=x, cy=y, r=radius)

    def label(self, text: str, x: float, y: float, anchor: str = "middle", kind: str = "") -> None:
        """Text beside, around or before a point: `anchor` is start, middle or end."""
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._marks.append(f'<text class="{kind}" {at}>{plain(text)}</text>')

    def path(self, kind: str, places: Sequence[tuple[float, float]]) -> None:
        if len(places) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            self._marks.append(f'<polyline class="{kind}" points="{points}"/>')

    def axis_below(self, scale: Scale, title: str) -> None:
        self.line("axis", scale.start, self.bottom, scale.end, self.bottom)
        for value, text in scale.ticks():
            self.line("grid", scale(value), self.top, scale(value), self.bottom)
            self.label(text, scale(value), self.bottom + 16, "middle", "tick")
        self.label(title, (scale.start + scale.end) / 2, self.bottom + 36, "middle", "name")

    def axis_left(self, scale: Scale, left: float, right: float, title: str) -> None:
        for value, text in scale.ticks(5):
            self.line("grid", left, scale(value), right, scale(value))
            self.label(text, left - 8, scale(value) + 4, "end", "tick")
        self.label(title, 0, 11, "start", "name")

    def limit(self, x: Scale, value: float, text: str) -> None:
        self.line("limit", x(value), self.top - 4, x(value), self.bottom)
        self.named(x, text, value, "limit")

    def named(self, x: Scale, text: str, value: float, kind: str, y: float = 26) -> None:
        """`text` above the plot at `value`, kept within the drawing."""
        at, half = x(value), len(text) * 3.9
        if at + half > WIDTH:
            self.label(text, WIDTH, y, "end", kind)
        else:
            self.label(text, max(at, half), y, "middle", kind)


def _tip(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""


def _steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from `low` to `high`."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (times * 10.0**exponent for exponent in powers for times in (1, 2, 5))
    return [step for step in steps if low * (1 - 1e-9) <= step <= high * (1 + 1e-9)]


def _short(value: float) -> str:
    """`value`, one of `_steps`, without noughts behind its last digit."""
    return f"{value:,.10f}".rstrip("0").rstrip(".") if 1e-4 <= value < 1e6 else rounded(value)


MAX_BINS = 40
MAX_BARS = 20
LOGARITHMIC = 30
"""Values that are so many times apart are drawn on a logarithmic axis."""

FP16_LARGEST = 65504.0
EQUAL = 1e-12
"""Differences below it are drawn as none: no float32 arithmetic shows them."""

_LEFT, _RIGHT = 52, WIDTH - 12
_ROW, _RANGE_ROW, _LEGEND_ROW = 22, 19, 17
_CHARACTER = 7.2

Span = tuple[float, float]
Place = tuple[float, float, float]
Bins = list[tuple[float, float, int, int]]


@dataclass(frozen=True)
class Bar:
    """A bar with `name` before it, `value` long (0 or above), and `text` after it.

    `kind` is a word of the style sheet.
    """

    name: str
    value: float
    text: str
    kind: str


@dataclass(frozen=True)
class Dot:
    """A measured point: medians of its rounds, with the lowest and highest round as spans.

    `tip` says what it is, in full; `note` is a few characters beside it, where there is room.
    """

    x: float
    y: float
    tip: str
    note: str = ""
    x_span: Span | None = None
    y_span: Span | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind; `kind` is a word of the style sheet: ``s1`` to ``s4``, ``cloud``."""

    name: str
    kind: str
    dots: tuple[Dot, ...]
    joined: bool = True


@dataclass(frozen=True)
class Point:
    """A candidate that was measured: `x` its accuracy, `y` its throughput a second.

    `status` is ``chosen``, ``passed`` or ``failed``.
    """

    name: str
    status: str
    x: float
    y: float


def histogram(
    name: str, title: str, counts: Mapping[int, int], *, axes: tuple[str, str], height: float = 150
) -> Markup:
    """How often each whole number (0 or above) occurs; several share a bar where there are many.

    `axes` name what is counted by, and what is counted; `height` is that of the bars.
    """
    held = {value: count for value, count in sorted(counts.items()) if count > 0}
    if not held:
        return Markup()
    draw, low, high = Drawing(30, 30 + height), min(held), max(held)
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
            # A bin of one among thousands is still a bin.
            tall = max(draw.bottom - y(count), 1.5)
            draw.box("bar", x(first - 0.5) + 0.75, draw.bottom - tall, max(width, 1.5), tall, tip)
    total = sum(held.values())
    mean = sum(value * count for value, count in held.items()) / total
    says = f"{total:,} {axes[1]}; {axes[0]} from {low:,} to {high:,}, {mean:,.1f} in the mean."
    return draw.svg(name, draw.bottom + 46, title, says)


def waterfall(name: str, title: str, bars: Sequence[Bar], total: str) -> Markup:
    """Parts of a sum, each beginning where the one before ends, then the sum (`total` in words)."""
    values = [max(bar.value, 0.0) for bar in bars]
    starts = [sum(values[:index]) for index in range(len(bars))]
    return _bars(name, title, [*bars, Bar("mean", sum(values), total, "whole")], [*starts, 0.0])


def compared(name: str, title: str, bars: Sequence[Bar]) -> Markup:
    """Bars from one line, to compare."""
    return _bars(name, title, bars, [0.0] * len(bars))


def _bars(name: str, title: str, bars: Sequence[Bar], starts: Sequence[float]) -> Markup:
    """Horizontal bars, each from its start; a line joins one that starts above 0 to the last."""
    most = max((bar.value for bar in bars), default=0.0)
    if most <= 0:
        return Markup()
    # Room for names before the bars and texts after them.
    left = max(len(_cut(bar.name)) for bar in bars) * _CHARACTER + 10
    right = WIDTH - max(len(bar.text) for bar in bars) * 6.9 - 8
    draw, scale, height = Drawing(), Scale(0, most, left, max(right, left + 60)), len(bars) * _ROW
    for index, (bar, start) in enumerate(zip(bars, starts, strict=True)):
        middle, first = index * _ROW + _ROW / 2 + 2, scale(start)
        width = max(scale(start + max(bar.value, 0.0)) - first, 1.5)
        if start:
            draw.line("grid", first, index * _ROW - 5, first, index * _ROW + 5)
        strong = " strong" if bar.kind in ("whole", "own") else ""
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
) -> Markup:
    """A plot of finite points, 0 or above, each of `limits` (text to height) a line across.

    `axes` name what is to the right, and what is up.
    """
    series = [one for one in series if one.dots]
    dots = [each for one in series for each in one.dots]
    if not dots:
        return Markup()
    limits, draw = limits or {}, Drawing()
    draw.top = _legend(draw, series, axes[1])
    draw.bottom = draw.top + 206
    widest = max(max(each.x, *(each.x_span or (0,))) for each in dots)
    x = Scale(0, widest * 1.06 or 1.0, _LEFT, _RIGHT)
    heights = [v for each in dots for v in (each.y, *(each.y_span or ()))]
    above = [value for value in (*heights, *limits.values()) if value > 0]
    if above and max(above) / min(above) > LOGARITHMIC:
        y = snug(above, draw.bottom, draw.top + 8)
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
    """A histogram of finite `values`, each 0 or above, at least one; beyond `limit` in red."""
    above = sorted(value for value in values if value >= EQUAL)
    equal = len(values) - len(above)
    limit = limit if limit is not None and limit >= EQUAL else None
    draw, left = Drawing(36 if limit else 22, 214), 44
    held = [*above, *([limit] if limit else [])] or [1e-7]
    x = logarithmic(held, left + (58 if equal else 0), WIDTH - 10)
    bins = _bins(above, limit, x)
    tallest = max([equal, *(within + over for _, _, within, over in bins)])
    y = Scale(0, tallest * 1.08, draw.bottom, draw.top)
    draw.axis_left(y, left, x.end, "rows")
    draw.axis_below(x, "difference")
    if equal:
        tip = f"{amount(equal, 'row')} without a difference"
        draw.box("bar", left + 4, y(equal), 24, draw.bottom - y(equal), tip)
        draw.label("equal", left + 16, draw.bottom + 16, "middle", "tick")
    for low, high, within, over in bins:
        place, width = x(low) + 0.5, x(high) - x(low) - 1
        span = f"between {figure(low)} and {figure(high)}"
        tip = f"{amount(within, 'row')} {span}" if within else ""
        draw.box("bar", place, y(within), width, draw.bottom - y(within), tip)
        if over:
            tip = f"{amount(over, 'row')} {span}, beyond the limit"
            height = y(within) - y(within + over)
            draw.box("bar bad", place, y(within + over), width, height, tip)
    says = f"{amount(equal, 'row')} equal; {amount(len(above), 'row')} with a difference"
    says += f" from {figure(above[0])} to {figure(above[-1])}" if above else ""
    if limit:
        draw.limit(x, limit, f"limit {figure(limit)}")
        says += f"; {sum(value > limit for value in above):,} beyond the limit"
    return draw.svg("differences", draw.bottom + 46, "Differences of rows", says)


def interval(difference: float, low: float, high: float, max_drop: float) -> Markup:
    """The change of the labeled metric with its 95 % confidence interval."""
    draw, middle = Drawing(36, 116), 80
    x = linear([difference, low, high, 0.0, -max_drop], 12, WIDTH - 12, 0.15)
    draw.box("loss", x.start, draw.top, x(-max_drop) - x.start, draw.bottom - draw.top)
    draw.axis_below(x, f"candidate {MINUS} reference")
    draw.line("zero", x(0), draw.top - (19 if max_drop else 4), x(0), draw.bottom)
    if max_drop:
        draw.limit(x, -max_drop, f"limit {figure(-max_drop)}")
    draw.named(x, "no change", 0, "tick", 11 if max_drop else 26)
    draw.label("a loss", x.start + 6, draw.bottom - 8, "start", "bad")
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
    """Bars of the largest magnitudes: of kept layers, marked, and of the largest others.

    `found` is layer (or value) to its finite range, at least one, 0 or above; with `fp16` the
    largest float16 is drawn even though no range comes near it.
    """
    names, left = charted(found, kept), 214
    draw = Drawing(36, 36 + _RANGE_ROW * len(names))
    near = fp16 or max(found.values()) > FP16_LARGEST / 10
    above = [value for name in names if (value := found[name]) >= EQUAL] or [1.0]
    x = logarithmic([*above, *([FP16_LARGEST] if near else [])], left, WIDTH - 14)
    head = common_head(names)
    draw.axis_below(x, "largest magnitude")
    for index, name in enumerate(names):
        middle = draw.top + _RANGE_ROW * (index + 0.5)
        state, tip = "plain", f"{name}: {figure(found[name], 1)}"
        if name in kept:
            state, tip = "kept", f"{tip}, kept"
        lost = " bad" if near and state == "plain" and found[name] > FP16_LARGEST else ""
        short = name[len(head) :]
        short = short if len(short) <= 30 else f"…{short[-29:]}"
        draw.label(short, left - 8, middle + 4, "end", f"mono {state}")
        width = max(x(max(found[name], x.low)) - left, 1.5)
        draw.box(f"bar {state}{lost}", left, middle - 6, width, 12, tip)
    if near:
        draw.limit(x, FP16_LARGEST, "float16 ends at 65,504")
    marks = ((name, " (kept)" if name in kept else "") for name in names)
    says = "; ".join(f"{name} {figure(found[name], 1)}{mark}" for name, mark in marks)
    return draw.svg("ranges", draw.bottom + 46, "Ranges of layers", says)


def charted(found: Mapping[str, float], kept: Sequence[str]) -> list[str]:
    """Which ranges `ranges` draws, the largest first: of kept layers before others."""
    held = set(kept)
    order = sorted(found, key=lambda name: (name not in held, -found[name]))[:MAX_BARS]
    return sorted(order, key=lambda name: -found[name])


def common_head(names: Sequence[str]) -> str:
    """What all `names` begin with, up to a dot or slash, where it is worth leaving out."""
    if len(names) < 2:
        return ""
    pairs = zip(min(names), max(names), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    head = shared[: max(shared.rfind("."), shared.rfind("/")) + 1]
    return head if len(head) > 3 else ""


def candidates(
    points: Sequence[Point], metric: str, limit: float | None, *, higher: bool
) -> Markup:
    """Throughput over accuracy, at least one point; better is to the upper right, or left."""
    draw, left = Drawing(36, 254), 52
    xs = [point.x for point in points] + ([limit] if limit is not None else [])
    if higher:
        x = linear(xs, left + 8, WIDTH - 16, 0.12)
    else:
        x = logarithmic([max(value, EQUAL) for value in xs], left + 8, WIDTH - 16)
    y = Scale(0, max(point.y for point in points) * 1.15 or 1.0, draw.bottom, draw.top)
    draw.axis_left(y, left, x.end, "per second")
    draw.axis_below(x, f"{metric} (better →)" if higher else f"(← better) {metric}")
    if limit is not None:
        draw.limit(x, limit, "limit")
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.y):
        at, middle = x(point.x), y(point.y)
        tip = f"{point.name}, {point.status}: {point.y:,.1f} a second, {metric} {figure(point.x)}"
        draw.dot(f"point {point.status}", at, middle, 6, tip)
        # Names beside the dots do not run into each other.
        text = middle + 4
        while any(abs(text - other) < 15 and abs(at - beside) < 130 for beside, other in taken):
            text += 1
        taken.append((at, text))
        way, anchor = (1, "start") if at + 11 + len(point.name) * 8 < WIDTH else (-1, "end")
        draw.label(point.name, at + way * 11, text, anchor, f"strong {point.status}")
    says = "; ".join(
        f"{point.name} ({point.status}) {point.y:,.1f} a second at {figure(point.x)}"
        for point in points
    )
    return draw.svg("candidates", draw.bottom + 46, f"Throughput over {metric}", says)


def _cut(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _bins(above: Sequence[float], limit: float | None, x: Scale) -> Bins:
    """Low and high edge of each bin, and how many values are within and beyond the limit."""
    first = log10(x.low)
    decades = log10(x.high) - first
    count = min(40, max(20, round(decades * 5)))
    edges = [10 ** (first + decades * index / count) for index in range(count + 1)]
    counts = [[0, 0] for _ in range(count)]
    for value in above:
        place = min(count - 1, int((log10(value) - first) / decades * count))
        counts[place][limit is not None and value > limit] += 1
    return [(*span, w, o) for span, (w, o) in zip(pairwise(edges), counts, strict=True)]


def _draw_series(draw: Drawing, one: Series, x: Scale, y: Scale) -> None:
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


def _notes(draw: Drawing, dots: Sequence[Dot], x: Scale, y: Scale, taken: list[Place]) -> None:
    """Notes above or below their points, where they run into nothing of `taken` (x, y, half)."""
    for each in (each for each in dots if each.note):
        half = len(each.note) * _CHARACTER / 2
        at = min(max(x(each.x), _LEFT + half), WIDTH - half)
        for middle in (y(each.y) - 12, y(each.y) + 13):
            if not any(abs(at - a) < half + r and abs(middle - b) < 11 for a, b, r in taken):
                taken.append((at, middle, half + 3))
                draw.label(each.note, at, middle + 4, "middle", "tick")
                break


def _legend(draw: Drawing, series: Sequence[Series], up: str) -> float:
    """The legend beside the name of the vertical axis; where the plot below it begins."""
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
# In a notebook the rules would hold for all of its page.
_STYLE = "".join(f".triptych {name}{{{rule}}}" for name, rule in _RULES.items())


@dataclass(frozen=True)
class Figure:
    """One plot; `svg` is a whole SVG document."""

    svg: str

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg


def differences_of(gate: GateResult) -> Figure:
    """Rows of the gate by how far they are from the reference."""
    values = [v for each in gate.row_differences if (v := number(each)) is not None]
    limits = [each.limit for each in gate.verdicts if each.metric == "max_difference"]
    return _figure(differences(values, limits[0] if limits else None) if values else "")


def lengths_of(lengths: Lengths | None) -> Figure:
    """Rows of the traffic by their tokens."""
    counts = {} if lengths is None else lengths.counts
    return _figure(histogram("lengths", "Lengths of the traffic", counts, axes=("tokens", "rows")))


def _figure(drawing: str) -> Figure:
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="triptych" '
    if not drawing:
        return Figure(f'{head}width="1" height="1"/>')
    inner = drawing.removeprefix("<svg ")
    tag, _, marks = inner.partition(">")
    return Figure(f'{head}width="{WIDTH}" {tag}><style>{_STYLE}</style>{marks}')
