"""The plots of a bench: latency and queues over throughput, a request's time, batches, lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from triptych.bench.points import Measurement, Part, Point, StepUse
from triptych.bench.verdict import figures_of
from triptych.formatting import milliseconds, number, percent, rounded
from triptych.pipeline.slo import Slo
from triptych.report.bars import Bar, histogram, waterfall
from triptych.report.curves import Dot, Series, curves

CURVES = ("p50", "p95", "p99")
"""Percentiles that are drawn."""

STEPS = {"preprocess": "s1", "core": "s2", "postprocess": "s3"}
"""Step to its colour; what is none of them has another."""

Rate = Callable[[Point], float]


def achieved(point: Point) -> float:
    """Requests answered a second."""
    return point.median("throughput_per_s")


def offered(point: Point) -> float:
    """Requests sent a second, by an open load."""
    return point.load.value


def latency(name: str, points: Sequence[Point], slo: Slo, *, rate: Rate) -> str:
    """Latency percentiles over throughput (`rate` tells which), joined in the order of `points`."""
    series = [
        Series(which, f"q{index}", tuple(_latency_dots(points, which, rate)))
        for index, which in enumerate(CURVES, 1)
    ]
    limits = {
        f"{which.replace('_', '.')} limit {most / 1e3:g} ms": most / 1e3
        for which, most in slo.limits_us.items()
        if which in CURVES
    }
    title = "Latency over throughput" if rate is achieved else "Latency over offered rate"
    return curves(name, title, series, axes=(_across(rate), "latency, ms"), limits=limits)


def queues(name: str, points: Sequence[Point], *, rate: Rate) -> str:
    """Mean time in each step's queue over throughput; "" where no server told of its steps."""
    steps = dict.fromkeys(use.step for point in points for use in point.typical.steps)
    series = [
        Series(step, STEPS.get(step, "s4"), tuple(_queue_dots(points, step, rate)))
        for step in steps
    ]
    return curves(name, "Queue over rate", series, axes=(_across(rate), "mean queue, ms"))


def budget(name: str, point: Point) -> str:
    """Where a request's mean time goes at one load, part by part; "" where it is not known."""
    parts = [part for part in mean_parts(point) if number(part.us) is not None]
    whole = sum(max(part.us, 0.0) for part in parts)
    bars = [
        Bar(
            part_name(part),
            max(part.us, 0.0) / 1e3,
            f"{milliseconds(part.us)} ms, {percent(part.us / whole if whole else 0.0)}",
            f"{STEPS.get(part.where, 's4')}{' waits' if part.what == 'queue' else ''}",
        )
        for part in parts
    ]
    total = f"{milliseconds(sum(part.us for part in parts))} ms"
    return waterfall(name, f"A request's time with {point.load}", bars, total)


def mean_parts(point: Point) -> tuple[Part, ...]:
    """Parts of the median round."""
    return point.typical.parts


def part_name(part: Part) -> str:
    """``core queue``, ``core`` for its compute, ``transport``."""
    if part.what == "queue":
        return f"{part.where} queue"
    return part.where if part.what == "compute" else part.what


def batches(name: str, use: StepUse) -> str:
    """How large the batches of a step were."""
    return histogram(
        name,
        f"Batches of {use.step}",
        use.batch_sizes,
        axes=("rows a batch", "batches"),
        height=110,
    )


def lengths(name: str, counts: Mapping[int, int]) -> str:
    """How long the rows of the traffic are."""
    return histogram(name, "Lengths of rows", counts, axes=("tokens a row", "rows"))


def _across(rate: Rate) -> str:
    return "requests answered a second" if rate is achieved else "requests offered a second"


def _latency_dots(points: Sequence[Point], which: str, rate: Rate) -> list[Dot]:
    found = []
    for point in _answered(points):
        low, high = point.span(f"{which}_us")
        y = point.median(f"{which}_us") / 1e3
        found.append(
            Dot(
                x=rate(point),
                y=y,
                tip=f"{figures_of(point)}, {which} {rounded(y)} ms",
                note=_note(point) if which == CURVES[-1] and rate is achieved else "",
                x_span=point.span("throughput_per_s") if rate is achieved else None,
                y_span=(low / 1e3, high / 1e3),
            )
        )
    return found


def _queue_dots(points: Sequence[Point], step: str, rate: Rate) -> list[Dot]:
    found = []
    for point in _answered(points):
        waits = [value for one in point.rounds if (value := _queue_ms(one, step)) is not None]
        if waits:
            tip = f"{point.load}: {step} {rounded(median(waits))} ms"
            found.append(Dot(rate(point), median(waits), tip, y_span=(min(waits), max(waits))))
    return found


def _queue_ms(one: Measurement, step: str) -> float | None:
    return next((use.queue_us / 1e3 for use in one.steps if use.step == step), None)


def _answered(points: Sequence[Point]) -> list[Point]:
    """Points with a latency: a load that only met errors has none."""
    return [point for point in points if point.median("requests") > 0]


def _note(point: Point) -> str:
    """The load beside its point: clients as a number alone."""
    return f"{point.load.value:g}"
