"""Plots of curves: measured points with the spread of their rounds, limits, a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.report.svg import (
    WIDTH,
    Scale,
    axis_below,
    axis_left,
    cut,
    dot,
    drawing,
    label,
    line,
    path,
    snug,
)

LOGARITHMIC = 30
"""Values that are so many times apart are drawn on a logarithmic axis."""

_LEFT, _RIGHT, _HEIGHT = 52, WIDTH - 12, 206
_ROW, _CHARACTER = 17, 7.2

Span = tuple[float, float]


@dataclass(frozen=True)
class Dot:
    """A measured point.

    Attributes:
        x: median of its rounds.
        y: see `x`.
        tip: what it is, in full.
        note: a few characters beside it, where there is room; empty for none.
        x_span: lowest and highest round.
        y_span: see `x_span`.
    """

    x: float
    y: float
    tip: str
    note: str = ""
    x_span: Span | None = None
    y_span: Span | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind; `kind` is a word of the style sheet: ``s1`` to ``s6``, ``cloud``."""

    name: str
    kind: str
    dots: tuple[Dot, ...]
    joined: bool = True


def curves(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    axes: tuple[str, str],
    limits: Mapping[str, float] | None = None,
) -> str:
    """A plot of `series`; "" where none of them has a point.

    Args:
        name: of the drawing, once a page.
        title: what it shows.
        series: in the order of the legend; finite numbers, 0 or above.
        axes: what is to the right, and what is up.
        limits: text to the height of a line across.
    """
    dots = [each for one in series for each in one.dots]
    if not dots:
        return ""
    limits = limits or {}
    legend, top = _legend(series, axes[1])
    bottom = top + _HEIGHT
    widest = max(max(each.x, *(each.x_span or (0,))) for each in dots)
    x = Scale(0, widest * 1.06 or 1.0, _LEFT, _RIGHT)
    ys = [v for each in dots for v in (each.y, *(each.y_span or ()))]
    y = _upward([*ys, *limits.values()], bottom, top)
    parts = [axis_left(y, _LEFT, _RIGHT, axes[1]), axis_below(x, top, bottom, axes[0]), legend]
    for index, (text, height) in enumerate(limits.items()):
        parts.append(line("limit", _LEFT, y(height), _RIGHT, y(height)))
        place = (_LEFT + 5, "start") if index % 2 == 0 else (_RIGHT - 2, "end")
        parts.append(label(text, place[0], y(height) - 5, place[1], "limit"))
    for one in series:
        parts += _drawn(one, x, y)
    parts += _notes(series, x, y, limits)
    return drawing(name, bottom + 46, title, _says(series, limits), "".join(parts))


def _upward(values: Sequence[float], bottom: float, top: float) -> Scale:
    """From 0, or logarithmic where the values above 0 are far apart."""
    above = [value for value in values if value > 0]
    if above and max(above) / min(above) > LOGARITHMIC:
        return snug(above, bottom, top + 8)
    return Scale(0, max(above, default=1.0) * 1.12, bottom, top)


def _drawn(one: Series, x: Scale, y: Scale) -> list[str]:
    parts = []
    if one.joined:
        parts.append(path(f"curve {one.kind}", [(x(each.x), y(each.y)) for each in one.dots]))
    for each in one.dots:
        low, high = each.y_span or (each.y, each.y)
        if y(low) - y(high) > 1:
            parts.append(line(f"spread {one.kind}", x(each.x), y(low), x(each.x), y(high)))
        low, high = each.x_span or (each.x, each.x)
        if x(high) - x(low) > 1:
            parts.append(line(f"spread {one.kind}", x(low), y(each.y), x(high), y(each.y)))
    parts += [dot(f"mark {one.kind}", x(each.x), y(each.y), 3.5, each.tip) for each in one.dots]
    return parts


def _notes(series: Sequence[Series], x: Scale, y: Scale, limits: Mapping[str, float]) -> list[str]:
    """Notes above or below their points, where they run into no other text and no point."""
    taken = [(x(each.x), y(each.y), 8.0) for one in series for each in one.dots]
    for index, (text, height) in enumerate(limits.items()):
        half = len(text) * _CHARACTER / 2
        at = _LEFT + 5 + half if index % 2 == 0 else _RIGHT - 2 - half
        taken.append((at, y(height) - 9, half))
    parts = []
    for each in (each for one in series for each in one.dots if each.note):
        half = len(each.note) * _CHARACTER / 2
        at = min(max(x(each.x), _LEFT + half), WIDTH - half)
        for middle in (y(each.y) - 12, y(each.y) + 13):
            near = (abs(at - a) < half + r and abs(middle - b) < 11 for a, b, r in taken)
            if not any(near):
                taken.append((at, middle, half + 3))
                parts.append(label(each.note, at, middle + 4, "middle", "tick"))
                break
    return parts


def _legend(series: Sequence[Series], up: str) -> tuple[str, float]:
    """The legend beside the name of the vertical axis, and where the plot below it begins."""
    named = [one for one in series if one.dots and one.name]
    start = len(up) * _CHARACTER + 22
    at, height, parts = start, 0.0, []
    for one in named:
        text = cut(one.name)
        width = 30 + len(text) * _CHARACTER + 8
        if at + width > WIDTH and at > start:
            at, height = start, height + _ROW
        if one.joined:
            parts.append(line(f"curve {one.kind}", at, height + 7, at + 20, height + 7))
        parts.append(dot(f"mark {one.kind}", at + 10, height + 7, 3.5))
        parts.append(label(text, at + 26, height + 11, "start", "tick"))
        at += width
    return "".join(parts), height + 36


def _says(series: Sequence[Series], limits: Mapping[str, float]) -> str:
    words = [f"{one.name}: {'; '.join(d.tip for d in one.dots)}." for one in series if one.dots]
    return " ".join([*words, *(f"Line: {text}." for text in limits)])
