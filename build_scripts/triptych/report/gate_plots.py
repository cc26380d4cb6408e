"""The report's plots as inline SVG: differences, the labelled interval, ranges, candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any, Literal

from triptych.formatting import MINUS, amount, figure, number, signed
from triptych.report.svg import (
    WIDTH,
    Scale,
    axis_below,
    axis_left,
    box,
    dot,
    drawing,
    label,
    line,
    linear,
    logarithmic,
)

FP16_LARGEST = 65504.0
EQUAL = 1e-12
"""Differences below it are drawn as none: no float32 arithmetic shows them."""

MOST_BARS = 20
_BINS_A_DECADE = 5
_FEWEST_BINS = 20
_MOST_BINS = 40
_ROW = 19


@dataclass(frozen=True)
class Point:
    """A candidate that was measured: `x` its accuracy, `y` its throughput a second."""

    name: str
    status: Literal["chosen", "passed", "failed"]
    x: float
    y: float


def differences(values: Sequence[float], limit: float | None) -> str:
    """A histogram of finite `values`, each 0 or above, at least one; beyond `limit` in red."""
    bottom, left = 214, 44
    above = sorted(value for value in values if value >= EQUAL)
    equal = len(values) - len(above)
    limit = limit if limit is not None and limit >= EQUAL else None
    top = 36 if limit else 22
    held = [*above, *([limit] if limit else [])] or [1e-7]
    x = logarithmic(held, left + (58 if equal else 0), WIDTH - 10)
    bins = _bins(above, limit, x)
    tallest = max([equal, *(within + over for _, _, within, over in bins)])
    y = Scale(0, tallest * 1.08, bottom, top)
    parts = [axis_left(y, left, x.end, "rows"), axis_below(x, top, bottom, "difference")]
    if equal:
        says = f"{amount(equal, 'row')} without a difference"
        parts.append(box("bar", left + 4, y(equal), 24, bottom - y(equal), says))
        parts.append(label("equal", left + 16, bottom + 16, "middle", "tick"))
    for low, high, within, over in bins:
        place, width = x(low) + 0.5, x(high) - x(low) - 1
        span = f"between {figure(low)} and {figure(high)}"
        tip = f"{amount(within, 'row')} {span}"
        parts.append(box("bar", place, y(within), width, bottom - y(within), tip if within else ""))
        if over:
            tip = f"{amount(over, 'row')} {span}, beyond the limit"
            height = y(within) - y(within + over)
            parts.append(box("bar bad", place, y(within + over), width, height, tip))
    if limit:
        parts.append(_limit_line(x, limit, top, bottom, f"limit {figure(limit)}"))
    says = (
        f"{amount(equal, 'row')} equal; {amount(len(above), 'row')} with a difference"
        + (f" from {figure(above[0])} to {figure(above[-1])}" if above else "")
        + (f"; {sum(value > limit for value in above):,} beyond the limit" if limit else "")
    )
    return drawing("differences", bottom + 46, "Differences of rows", says, "".join(parts))


def interval(difference: float, low: float, high: float, max_drop: float) -> str:
    """The change of the labelled metric with its 95 % confidence interval."""
    top, bottom, middle = 36, 116, 80
    x = linear([difference, low, high, 0.0, -max_drop], 12, WIDTH - 12, 0.15)
    parts = [
        box("loss", x.start, top, x(-max_drop) - x.start, bottom - top),
        axis_below(x, top, bottom, f"candidate {MINUS} reference"),
        line("zero", x(0), top - 19 if max_drop else top - 4, x(0), bottom),
    ]
    if max_drop:
        parts.append(_limit_line(x, -max_drop, top, bottom, f"limit {figure(-max_drop)}"))
    parts.append(_named(x, "no change", 0, "tick", 11 if max_drop else 26))
    parts.append(label("a loss", x.start + 6, bottom - 8, "start", "bad"))
    kind = "bad" if high < -max_drop else "plain"
    tip = f"{signed(difference)}, 95 % interval from {signed(low)} to {signed(high)}"
    parts.append(line(f"whisker {kind}", x(low), middle, x(high), middle))
    parts += [line(f"whisker {kind}", x(e), middle - 6, x(e), middle + 6) for e in (low, high)]
    parts.append(dot(f"estimate {kind}", x(difference), middle, 5.5, tip))
    parts.append(label(signed(difference), x(difference), middle - 13, "middle", "strong"))
    says = f"{tip}. Losses of more than {figure(max_drop)} are to the left of the limit."
    title = "Change of the labelled metric"
    return drawing("interval", bottom + 46, title, says, "".join(parts))


def ranges(found: Mapping[str, float], kept: Sequence[str], *, fp16: bool) -> str:
    """Bars of the largest magnitudes: kept layers and the largest others; at least one range.

    Args:
        found: layer (or value) to its finite range, 0 or above.
        kept: layers in higher precision, marked.
        fp16: whether the largest float16 is drawn though no range comes near it.
    """
    names = charted(found, kept)
    left, top = 214, 36
    bottom = top + _ROW * len(names)
    near = fp16 or max(found.values()) > FP16_LARGEST / 10
    above = [value for name in names if (value := found[name]) >= EQUAL] or [1.0]
    x = logarithmic([*above, *([FP16_LARGEST] if near else [])], left, WIDTH - 14)
    head = common_head(names)
    parts = [axis_below(x, top, bottom, "largest magnitude")]
    for index, name in enumerate(names):
        middle = top + _ROW * (index + 0.5)
        state = "kept" if name in kept else "plain"
        says = f"{name}: {figure(found[name], 1)}" + (", kept" if state == "kept" else "")
        width = x(max(found[name], x.low)) - left
        lost = " bad" if near and state == "plain" and found[name] > FP16_LARGEST else ""
        parts.append(label(_tail(name[len(head) :]), left - 8, middle + 4, "end", f"mono {state}"))
        parts.append(box(f"bar {state}{lost}", left, middle - 6, max(width, 1.5), 12, says))
    if near:
        parts.append(_limit_line(x, FP16_LARGEST, top, bottom, "float16 ends at 65,504"))
    says = "; ".join(
        f"{name} {figure(found[name], 1)}{' (kept)' if name in kept else ''}" for name in names
    )
    return drawing("ranges", bottom + 46, "Ranges of layers", says, "".join(parts))


def charted(found: Mapping[str, float], kept: Sequence[str]) -> list[str]:
    """Which ranges `ranges` draws, the largest first: of kept layers before others."""
    held = set(kept)
    order = sorted(found, key=lambda name: (name not in held, -found[name]))[:MOST_BARS]
    return sorted(order, key=lambda name: -found[name])


def common_head(names: Sequence[str]) -> str:
    """What all `names` begin with, up to a dot or slash, where it is worth leaving out."""
    if len(names) < 2:
        return ""
    shared = min(names)
    last = max(names)
    while not last.startswith(shared):
        shared = shared[:-1]
    head = shared[: max(shared.rfind("."), shared.rfind("/")) + 1]
    return head if len(head) > 3 else ""


def candidates(points: Sequence[Point], metric: str, limit: float | None, *, higher: bool) -> str:
    """Throughput over accuracy, at least one point; better is to the upper right, or left."""
    bottom, top, left = 254, 36, 52
    xs = [point.x for point in points] + ([limit] if limit is not None else [])
    if higher:
        x = linear(xs, left + 8, WIDTH - 16, 0.12)
    else:
        x = logarithmic([max(value, EQUAL) for value in xs], left + 8, WIDTH - 16)
    y = Scale(0, max(point.y for point in points) * 1.15 or 1.0, bottom, top)
    better = f"{metric} (better →)" if higher else f"(← better) {metric}"
    parts = [
        axis_left(y, left, x.end, "per second"),
        axis_below(x, top, bottom, better),
    ]
    if limit is not None:
        parts.append(_limit_line(x, limit, top, bottom, "limit"))
    parts += _points(points, x, y, metric)
    says = "; ".join(
        f"{point.name} ({point.status}) {point.y:,.1f} a second at {figure(point.x)}"
        for point in points
    )
    return drawing("candidates", bottom + 46, f"Throughput over {metric}", says, "".join(parts))


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be drawn, as magnitudes."""
    return {name: abs(v) for name, given in values.items() if (v := number(given)) is not None}


def _points(points: Sequence[Point], x: Scale, y: Scale, metric: str) -> list[str]:
    """Dots with names beside them that do not run into each other."""
    parts = []
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.y):
        at, middle = x(point.x), y(point.y)
        tip = f"{point.name}, {point.status}: {point.y:,.1f} a second, {metric} {figure(point.x)}"
        parts.append(dot(f"point {point.status}", at, middle, 6, tip))
        text = middle + 4
        while any(abs(text - other) < 15 and abs(at - beside) < 130 for beside, other in taken):
            text += 1
        taken.append((at, text))
        right = at + 11 + len(point.name) * 8 < WIDTH
        place = (at + 11, text, "start") if right else (at - 11, text, "end")
        parts.append(label(point.name, *place, f"strong {point.status}"))
    return parts


def _bins(
    above: Sequence[float], limit: float | None, x: Scale
) -> list[tuple[float, float, int, int]]:
    """Low and high edge of each bin, and how many values are within and beyond the limit."""
    first = log10(x.low)
    decades = log10(x.high) - first
    count = min(_MOST_BINS, max(_FEWEST_BINS, round(decades * _BINS_A_DECADE)))
    edges = [10 ** (first + decades * index / count) for index in range(count + 1)]
    within, over = [0] * count, [0] * count
    for value in above:
        place = min(count - 1, int((log10(value) - first) / decades * count))
        (over if limit is not None and value > limit else within)[place] += 1
    return list(zip(edges, edges[1:], within, over, strict=False))


def _limit_line(x: Scale, value: float, top: float, bottom: float, text: str) -> str:
    return line("limit", x(value), top - 4, x(value), bottom) + _named(x, text, value, "limit")


def _named(x: Scale, text: str, value: float, kind: str, y: float = 26) -> str:
    """`text` above the plot at `value`, kept within the drawing."""
    at, half = x(value), len(text) * 3.9
    if at + half > WIDTH:
        return label(text, WIDTH, y, "end", kind)
    return label(text, max(at, half), y, "middle", kind)


def _tail(name: str, most: int = 30) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"
