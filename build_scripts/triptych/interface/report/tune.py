"""Report of a tuning: ``report.html`` and ``tune.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from triptych.base.formatting import NOTHING, milliseconds, rounded, signed_percent
from triptych.interface.report.bench import achieved, latency, origin
from triptych.interface.report.pages import render, write_report
from triptych.interface.report.plots import Dot, Series, curves
from triptych.operate.tune.results import Outcome, Trial, TuneResult, pareto_front
from triptych.repository.records import json_text
from triptych.serving.bench.results import (
    SLO_WORDS,
    LoadPoint,
    collect_warnings,
    find_best_point,
    format_point,
    to_json,
)
from triptych.spec.slo import AnySlo, GenerationSlo

Labeled = tuple[str, LoadPoint]


@dataclass(frozen=True)
class Axes:
    """Measures by which the points of a tuning are compared."""

    rate: str  # Name of the throughput of a measurement, such as ``tokens_per_s``
    tail: str  # Name of the tail latency in `latencies_us`
    titles: tuple[str, str]  # Titles of both axes
    title: str
    front: str  # Description of the Pareto front, one sentence
    # Headings of the table of points, with functions that return their cells.
    columns: Mapping[str, Callable[[LoadPoint], str]]

    def read_rate(self, point: LoadPoint) -> float:
        return point.median(self.rate)

    def read_tail_ms(self, point: LoadPoint) -> float:
        """Return the tail latency of a point, in ms."""
        return point.latencies_us.get(self.tail, 0.0) / 1e3

    def cells(self, point: LoadPoint) -> list[str]:
        return [read(point) for read in self.columns.values()]

    def dot(self, name: str, point: LoadPoint, *, detailed: bool = False) -> Dot:
        """Return the dot of a point; if `detailed`, with the range of its rounds and clients."""
        dot = Dot(self.read_rate(point), self.read_tail_ms(point), f"{name}: {format_point(point)}")
        if not detailed:
            return dot
        tails = [one.latencies_us.get(self.tail, 0.0) / 1e3 for one in point.rounds]
        return replace(
            dot,
            note=f"{point.load.value:g}",
            x_span=point.span(self.rate),
            y_span=(min(tails), max(tails)),
        )


ANSWERED = Axes(
    "throughput_per_s",
    "p99",
    ("requests/s answered", "p99, ms"),
    "p99 over throughput",
    "For a point on the front, no other point has more requests/s at the same or a lower p99.",
    {
        "Requests/s": lambda point: rounded(achieved(point)),
        "p50, ms": lambda point: latency(point, "p50"),
        "p99, ms": lambda point: latency(point, "p99"),
    },
)
STREAMED = Axes(
    "tokens_per_s",
    "ttft_p99",
    ("tokens/s", "p99 of the first token, ms"),
    "First token over tokens/s",
    "For a point on the front, no other point has more tokens/s at the same or a lower p99 of the "
    "first token.",
    {
        "Tokens/s": lambda point: rounded(point.median("tokens_per_s")),
        "Goodput/s": lambda point: rounded(point.median("goodput_per_s")),
        "First token p99, ms": lambda point: milliseconds(point.latencies_us["ttft_p99"]),
        "Between tokens p99, ms": lambda point: milliseconds(point.latencies_us["itl_p99"]),
    },
)


def choose_axes(result: TuneResult) -> Axes:
    """Return the axes; for streamed answers, the time to the first token is the latency."""
    return STREAMED if isinstance(result.slo, GenerationSlo) else ANSWERED


def write_tune_report(result: TuneResult, folder: Path) -> Path:
    """Write the report into `folder`; see `write_report`."""
    return write_report(folder, tune_page(result), {"tune.json": json_text(to_json(result))})


def tune_page(result: TuneResult) -> str:
    outcomes = (("before", result.baseline), ("after", result.winner))
    labeled = [(name, point) for name, outcome in outcomes for point in outcome.points]
    labeled += [(f"trial {one.number}", p) for one in result.trials for p in one.points]
    points = [point for _, point in labeled]
    names = {id(point): name for name, point in labeled}
    axes = choose_axes(result)
    front = [
        (names[id(point)], point)
        for point in pareto_front(points, axes.read_rate, axes.read_tail_ms)
    ]
    return render(
        "tune.html.j2",
        result=result,
        word=verdict_word(result),
        better=sum(one.verdict == "better" for one in result.trials),
        axes=axes,
        before_after=_before_after(result, axes),
        change=before_and_after(result),
        grown=grown,
        gained=gained,
        front=front,
        front_plot=_front(labeled, front, axes),
        points=points,
        warnings=collect_warnings(points),
        origin=origin(result.subject),
    )


def verdict_word(result: TuneResult) -> str:
    return "Tuned" if result.slo.is_empty else SLO_WORDS[result.slo_kind]


def before_and_after(result: TuneResult) -> dict[str, tuple[float | None, float | None]]:
    """Return the values of each measure before and after, if there is one."""
    cost = result.winner.cost or result.baseline.cost
    pairs = {
        name.format(currency=cost.currency if cost else "", unit=result.unit): (
            read(result.baseline, result.slo),
            read(result.winner, result.slo),
        )
        for name, read in _READ.items()
    }
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def grown(old: float | None, new: float | None) -> str:
    """Return the relative change, such as ``+12 %``; a dash without an old value."""
    return NOTHING if not old or new is None else signed_percent(new / old - 1)


def gained(trial: Trial) -> str:
    """Return the gain of a trial; a dash if none is proven."""
    is_proven = trial.verdict in ("better", "worse")
    return grown(trial.against, trial.score) if is_proven else NOTHING


def _best(one: Outcome, slo: AnySlo) -> LoadPoint | None:
    """Return the point with the highest goodput, or else the best point within the SLO."""
    if any(point.median("goodput_per_s") for point in one.points):
        return max(one.points, key=lambda point: point.median("goodput_per_s"))
    return find_best_point(one.points, slo)


def _at_best(
    read: Callable[[LoadPoint], float | None],
) -> Callable[[Outcome, AnySlo], float | None]:
    def figure(one: Outcome, slo: AnySlo) -> float | None:
        best = _best(one, slo)
        return read(best) if best else None

    return figure


def _streamed(read: Callable[[LoadPoint], float]) -> Callable[[Outcome, AnySlo], float | None]:
    return _at_best(lambda point: read(point) if point.streamed else None)


_READ: dict[str, Callable[[Outcome, AnySlo], float | None]] = {
    "Score, {unit}": lambda one, _: one.score,
    "Best throughput, requests/s": _at_best(achieved),
    "p99 there, ms": _at_best(lambda point: point.median("p99_us") / 1e3),
    "Tokens there, tokens/s": _streamed(lambda point: point.median("tokens_per_s")),
    "First token p99 there, ms": _streamed(lambda point: point.latencies_us["ttft_p99"] / 1e3),
    "Between tokens p99 there, ms": _streamed(lambda point: point.latencies_us["itl_p99"] / 1e3),
    # None as well if the time budget proved no rate.
    "Highest rate, requests/s": lambda one, _: (one.rate and one.rate.highest_per_s) or None,
    "Price of a million, {currency}": lambda one, _: one.cost.per_million if one.cost else None,
    "Price of a million tokens, {currency}": lambda one, _: (
        one.cost.per_million_tokens if one.cost else None
    ),
    "Price of a month, {currency}": lambda one, _: one.cost.monthly if one.cost else None,
}


def _before_after(result: TuneResult, axes: Axes) -> Markup:
    outcomes = (("before", "s4", result.baseline), ("after", "s1", result.winner))
    series = [
        Series(name, kind, tuple(axes.dot(name, p, detailed=True) for p in outcome.points))
        for name, kind, outcome in outcomes
    ]
    limit_ms = result.slo.limits_ms.get(axes.tail)
    limits = {f"p99 limit {limit_ms:g} ms": limit_ms} if limit_ms is not None else {}
    title = f"{axes.title}, before and after"
    return curves("before-after", title, series, axes=axes.titles, limits=limits)


def _front(labeled: Sequence[Labeled], front: Sequence[Labeled], axes: Axes) -> Markup:
    """Return a plot of all points of all trials, with the Pareto front."""
    answered = [(name, point) for name, point in labeled if point.median("requests") > 0]
    series = [
        Series("measured", "cloud", tuple(axes.dot(*each) for each in answered), joined=False),
        Series("front", "front", tuple(axes.dot(*each) for each in front)),
    ]
    return curves("front", f"{axes.title} of every trial", series, axes=axes.titles)
