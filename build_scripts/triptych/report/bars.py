"""Plots of bars: a histogram of whole numbers, a waterfall, bars to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.report.svg import (
    WIDTH,
    Scale,
    axis_below,
    axis_left,
    box,
    cut,
    drawing,
    label,
    line,
)

MOST_BINS = 40
_LEFT, _RIGHT = 52, WIDTH - 12
_ROW = 22
_CHARACTER = 7.2


@dataclass(frozen=True)
class Bar:
    """A bar from left to right.

    Attributes:
        name: before it.
        value: its length; 0 or above.
        text: its value, for people.
        kind: a word of the style sheet.
    """

    name: str
    value: float
    text: str
    kind: str


def histogram(
    name: str, title: str, counts: Mapping[int, int], *, axes: tuple[str, str], height: float = 150
) -> str:
    """How often each whole number occurs; several share a bar where there are many.

    Args:
        name: of the drawing, once a page.
        title: what it shows.
        counts: number, 0 or above, to how often; "" where nothing occurs.
        axes: what is counted by, and what is counted (plural).
        height: of the bars.
    """
    held = {value: count for value, count in sorted(counts.items()) if count > 0}
    if not held:
        return ""
    top, low, high = 30, min(held), max(held)
    bottom = top + height
    step = -(-(high - low + 1) // MOST_BINS)
    bins = [0] * -(-(high - low + 1) // step)
    for value, count in held.items():
        bins[(value - low) // step] += count
    x = Scale(low - 0.5, max(low + len(bins) * step, low + 8) - 0.5, _LEFT, _RIGHT)
    y = Scale(0, max(bins) * 1.1, bottom, top)
    parts = [axis_left(y, _LEFT, _RIGHT, axes[1]), axis_below(_whole(x), top, bottom, axes[0])]
    for index, count in enumerate(bins):
        first = low + index * step
        last = first + step - 1
        at, width = x(first - 0.5) + 0.75, x(last + 0.5) - x(first - 0.5) - 1.5
        span = f"{first:,}" if step == 1 else f"{first:,} to {last:,}"
        if count:
            tip = f"{axes[0]} {span}: {count:,} {axes[1]}"
            # A bin of one among thousands is still a bin.
            tall = max(bottom - y(count), 1.5)
            parts.append(box("bar", at, bottom - tall, max(width, 1.5), tall, tip))
    total = sum(held.values())
    mean = sum(value * count for value, count in held.items()) / total
    says = f"{total:,} {axes[1]}; {axes[0]} from {low:,} to {high:,}, {mean:,.1f} in the mean."
    return drawing(name, bottom + 46, title, says, "".join(parts))


def waterfall(name: str, title: str, bars: Sequence[Bar], total: str) -> str:
    """Parts of a whole, each beginning where the one before ends; "" where they are all 0.

    Args:
        name: of the drawing, once a page.
        title: what it shows.
        bars: in order.
        total: the whole, for people; its bar is the last.
    """
    whole = sum(max(bar.value, 0.0) for bar in bars)
    if whole <= 0:
        return ""
    scale = _beside([bar.name for bar in bars], [total, *(bar.text for bar in bars)], whole)
    left = scale.start
    parts, gone = [], 0.0
    for index, bar in enumerate(bars):
        start, gone = gone, gone + max(bar.value, 0.0)
        parts.append(_row(index, bar, scale, start))
        if index + 1 < len(bars):
            below = (index + 1) * _ROW
            parts.append(line("grid", scale(gone), below - 5, scale(gone), below + 5))
    parts.append(line("axis", left, 4, left, (len(bars) + 1) * _ROW))
    parts.append(_row(len(bars), Bar("mean", whole, total, "whole"), scale, 0))
    says = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return drawing(name, (len(bars) + 1) * _ROW + 6, title, f"{says}; mean {total}", "".join(parts))


def compared(name: str, title: str, bars: Sequence[Bar]) -> str:
    """Bars from one line, to compare; "" where they are all 0."""
    most = max((bar.value for bar in bars), default=0.0)
    if most <= 0:
        return ""
    scale = _beside([bar.name for bar in bars], [bar.text for bar in bars], most)
    parts = [_row(index, bar, scale, 0) for index, bar in enumerate(bars)]
    parts.append(line("axis", scale.start, 4, scale.start, len(bars) * _ROW))
    says = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return drawing(name, len(bars) * _ROW + 6, title, says, "".join(parts))


def _beside(names: Sequence[str], texts: Sequence[str], most: float) -> Scale:
    """A scale with room for `names` before it and `texts` after it."""
    left = max(len(cut(name)) for name in names) * _CHARACTER + 10
    right = WIDTH - max(map(len, texts)) * 6.9 - 8
    return Scale(0, most, left, max(right, left + 60))


def _row(index: int, bar: Bar, scale: Scale, start: float) -> str:
    middle = index * _ROW + _ROW / 2 + 2
    first, last = scale(start), scale(start + max(bar.value, 0.0))
    width = max(last - first, 1.5)
    strong = " strong" if bar.kind in ("whole", "own") else ""
    return (
        label(cut(bar.name), scale.start - 8, middle + 4, "end", f"name{strong}")
        + box(f"bar {bar.kind}", first, middle - 7, width, 14, f"{bar.name}: {bar.text}")
        + label(bar.text, first + width + 6, middle + 4, "start", f"value{strong}")
    )


def _whole(scale: Scale) -> Scale:
    """The same scale with ticks at whole numbers only."""
    return _Whole(scale.low, scale.high, scale.start, scale.end)


class _Whole(Scale):
    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """At most about `most` whole values with their texts."""
        found = super().ticks(most)
        return [(value, f"{round(value):,}") for value, _ in found if value == round(value)]
