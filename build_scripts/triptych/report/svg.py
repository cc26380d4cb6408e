"""Marks and axes of plots: scales, ticks, and the SVG around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from triptych.formatting import figure, plain, power, rounded

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
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    fine: bool = False

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
            whole = [step for step in steps if _is_power(step)]
            return [(v, _short(v)) for v in (steps if len(steps) <= most + 2 else whole)]
        if self.log:
            first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
            step = max(1, ceil((last - first) / most))
            return [(10.0**e, power(10.0**e)) for e in range(first, last + 1, step)]
        rough = (self.high - self.low) / most
        unit = 10.0 ** floor(log10(rough))
        step_size = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
        first = ceil(self.low / step_size - 1e-9)
        last = floor(self.high / step_size + 1e-9)
        digits = max(0, -floor(log10(step_size) + 1e-9))
        values = [index * step_size for index in range(first, last + 1)]
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


def axis_below(scale: Scale, top: float, bottom: float, title: str) -> str:
    """Ticks, grid lines and the title of a horizontal axis."""
    parts = [line("axis", scale.start, bottom, scale.end, bottom)]
    for value, text in scale.ticks():
        x = scale(value)
        parts += [line("grid", x, top, x, bottom), label(text, x, bottom + 16, "middle", "tick")]
    middle = (scale.start + scale.end) / 2
    return "".join(parts) + label(title, middle, bottom + 36, "middle", "name")


def axis_left(scale: Scale, left: float, right: float, title: str) -> str:
    """Ticks, grid lines and, above them, the title of a vertical axis."""
    parts = []
    for value, text in scale.ticks(5):
        y = scale(value)
        parts += [line("grid", left, y, right, y), label(text, left - 8, y + 4, "end", "tick")]
    return "".join(parts) + label(title, 0, 11, "start", "name")


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a kind that the style sheet knows."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(kind: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    """A rectangle, with `tip` where a pointer rests on it."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{kind}" {place}>{_tip(tip)}</rect>'


def dot(kind: str, x: float, y: float, radius: float, tip: str = "") -> str:
    """A disc, with `tip` where a pointer rests on it."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{_tip(tip)}</circle>'


def label(text: str, x: float, y: float, anchor: str = "start", kind: str = "") -> str:
    """Text beside, around or before a point: `anchor` is start, middle or end."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{plain(text)}</text>'


def drawing(name: str, height: float, title: str, says: str, body: str) -> str:
    """A whole plot; `says` is what someone who cannot see it reads. `name`: once a page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{plain(title)}</title><desc id="{name}-d">{plain(says)}</desc>'
        f"{body}</svg>"
    )


def cut(name: str, most: int = 32) -> str:
    """`name`, or its beginning where it would not fit beside a plot."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def path(kind: str, places: Sequence[tuple[float, float]]) -> str:
    """Straight lines from place to place; nothing where there are fewer than two."""
    if len(places) < 2:
        return ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{kind}" points="{points}"/>'


def _steps(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from `low` to `high`."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (times * 10.0**exponent for exponent in powers for times in (1, 2, 5))
    return [step for step in steps if low * (1 - 1e-9) <= step <= high * (1 + 1e-9)]


def _is_power(value: float) -> bool:
    return abs(log10(value) - round(log10(value))) < 1e-9


def _short(value: float) -> str:
    """`value`, one of `_steps`, without noughts behind its last digit."""
    return f"{value:,.10f}".rstrip("0").rstrip(".") if 1e-4 <= value < 1e6 else rounded(value)


def _tip(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""
