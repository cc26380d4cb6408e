"""What plots are made of: scales with their ticks, and marks as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

from triptych.base.formatting import figure, plain, power, rounded

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
