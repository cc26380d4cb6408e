"""Scales and drawing operations of the SVG plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

from triptych.base.formatting import figure, plain, power, rounded

WIDTH = 440
"""Width of every plot, in SVG units; the page scales it."""


@dataclass(frozen=True)
class Scale:
    """Mapping of values to positions on an axis."""

    low: float  # Value at position `start`
    high: float  # Value at position `end`, greater than `low`
    start: float
    end: float
    log: bool = False  # Whether the axis is logarithmic; `low` must then be greater than 0
    fine: bool = False  # Whether a logarithmic axis has ticks at 2 and 5 as well, if they are few
    whole: bool = False  # Whether a linear axis has ticks at whole numbers only

    def __call__(self, value: float) -> float:
        """Return the position of `value`, clamped to the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            first = log10(self.low)
            share = (log10(value) - first) / (log10(self.high) - first)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, target: int = 6) -> list[tuple[float, str]]:
        """Return round values with their labels, about `target` at most."""
        if self.log and self.fine:
            steps = _steps(self.low, self.high)
            powers = [step for step in steps if abs(log10(step) - round(log10(step))) < 1e-9]
            return [(v, _short(v)) for v in (steps if len(steps) <= target + 2 else powers)]
        if self.log:
            first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
            step = max(1, ceil((last - first) / target))
            return [(10.0**e, power(10.0**e)) for e in range(first, last + 1, step)]
        rough = (self.high - self.low) / target
        unit = 10.0 ** floor(log10(rough))
        size = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
        first, last = ceil(self.low / size - 1e-9), floor(self.high / size + 1e-9)
        values = [index * size for index in range(first, last + 1)]
        if self.whole:
            return [(value, f"{round(value):,}") for value in values if value == round(value)]
        digits = max(0, -floor(log10(size) + 1e-9))
        return [(value, figure(value, digits)) for value in values]


def linear(values: Iterable[float], start: float, end: float, margin: float = 0.1) -> Scale:
    """Return a linear scale over one or more values, with a margin relative to their range."""
    points = list(values)
    low, high = min(points), max(points)
    padding = (high - low) * margin or abs(high) * 0.1 or 1.0
    return Scale(low - padding, high + padding, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale over one or more values above 0, between powers of ten."""
    points = list(values)
    first, last = floor(log10(min(points))), ceil(log10(max(points)))
    return Scale(10.0**first, 10.0 ** max(last, first + 1), start, end, log=True)


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale over the positive values, between 1, 2 or 5 times powers of 10."""
    positive = [value for value in values if value > 0]
    low, high = min(positive), max(positive)
    if high / low > 1e6:
        return logarithmic(positive, start, end)
    around = _steps(low / 10, high * 10)
    first = max(step for step in around if step <= low * (1 + 1e-9))
    last = min(step for step in around if step >= high * (1 - 1e-9) and step > first)
    return Scale(first, last, start, end, log=True, fine=True)


class SvgCanvas:
    """Marks of one plot, in drawing order; its axes span `top` to `bottom`."""

    def __init__(self, top: float = 0, bottom: float = 0) -> None:
        self.top, self.bottom = top, bottom
        self._marks: list[str] = []

    def svg(self, name: str, height: float, title: str, says: str) -> Markup:
        """Return the plot; `says` describes it for screen readers."""
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
        """Draw a text at a point; `anchor` is start, middle or end."""
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
        """Draw a text above the plot at `value`, within its width."""
        at, half = x(value), len(text) * 3.9
        if at + half > WIDTH:
            self.label(text, WIDTH, y, "end", kind)
        else:
            self.label(text, max(at, half), y, "middle", kind)


def _tip(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""


def _steps(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from `low` to `high`."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (times * 10.0**exponent for exponent in powers for times in (1, 2, 5))
    return [step for step in steps if low * (1 - 1e-9) <= step <= high * (1 + 1e-9)]


def _short(value: float) -> str:
    """Return a value of `_steps` as text, without trailing zeros."""
    return f"{value:,.10f}".rstrip("0").rstrip(".") if 1e-4 <= value < 1e6 else rounded(value)
