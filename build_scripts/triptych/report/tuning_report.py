"""The report of a tuning: ``report.html`` to read and ``tune.json`` to compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from triptych.bench.points import Point, to_json
from triptych.bench.verdict import best_point, figures_of, warnings_of
from triptych.files import write_files
from triptych.formatting import NOTHING, signed_percent
from triptych.pipeline.slo import Slo
from triptych.report.load_page import achieved, latency_dot, origin
from triptych.report.pages import render
from triptych.report.plots import Dot, Series, curves
from triptych.repository.plain import json_text
from triptych.tune.pareto import pareto_front
from triptych.tune.results import Outcome, Trial, TuneResult

AXES = ("requests answered a second", "p99, ms")
Labelled = tuple[str, Point]


def write_tune_report(result: TuneResult, folder: Path) -> Path:
    """Write the two files into `folder`, made where it is missing; each appears whole or not.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    record = json_text(to_json(result))
    write_files(folder, {"tune.json": record, "report.html": tune_page(result)})
    return folder / "report.html"


def tune_page(result: TuneResult) -> str:
    outcomes = (("before", result.baseline), ("after", result.winner))
    labelled = [(name, point) for name, outcome in outcomes for point in outcome.points]
    labelled += [(f"trial {one.number}", p) for one in result.trials for p in one.points]
    points = [point for _, point in labelled]
    names = {id(point): name for name, point in labelled}
    front = [(names[id(point)], point) for point in pareto_front(points)]
    return render(
        "tune.html.j2",
        result=result,
        word=word_of(result),
        better=sum(one.verdict == "better" for one in result.trials),
        before_after=_before_after(result),
        change=change_of(result),
        grown=grown,
        gained=gained,
        front=front,
        front_plot=_front(labelled, front),
        points=points,
        warnings=warnings_of(points),
        origin=origin(result.subject),
    )


def word_of(result: TuneResult) -> str:
    if result.slo.is_empty:
        return "Tuned"
    return "SLO met" if result.met else "SLO NOT MET"


def change_of(result: TuneResult) -> dict[str, tuple[float | None, float | None]]:
    """Figure to what it was and what it is; without those that neither has."""
    cost = result.winner.cost or result.baseline.cost
    pairs = {
        name.format(currency=cost.currency if cost else ""): (
            read(result.baseline, result.slo),
            read(result.winner, result.slo),
        )
        for name, read in _READ.items()
    }
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def grown(old: float | None, new: float | None) -> str:
    """``+12 %``; a dash where there is nothing to grow from."""
    return NOTHING if not old or new is None else signed_percent(new / old - 1)


def gained(trial: Trial) -> str:
    """What a trial gained; a dash where that is no difference."""
    return NOTHING if trial.verdict == "no difference" else grown(trial.against, trial.score)


def _throughput(one: Outcome, slo: Slo) -> float | None:
    best = best_point(one.points, slo)
    return achieved(best) if best else None


def _p99(one: Outcome, slo: Slo) -> float | None:
    best = best_point(one.points, slo)
    return best.median("p99_us") / 1e3 if best else None


_READ: dict[str, Callable[[Outcome, Slo], float | None]] = {
    "Score, requests/s": lambda one, _: one.score,
    "Best throughput, requests/s": _throughput,
    "p99 there, ms": _p99,
    "Highest rate, requests/s": lambda one, _: one.rate.highest_per_s if one.rate else None,
    "Price of a million, {currency}": lambda one, _: one.cost.per_million if one.cost else None,
    "Price of a month, {currency}": lambda one, _: one.cost.monthly if one.cost else None,
}


def _before_after(result: TuneResult) -> Markup:
    outcomes = (("before", "s4", result.baseline), ("after", "s1", result.winner))
    series = [
        Series(
            name,
            kind,
            tuple(
                latency_dot(p, "p99", f"{name}: {figures_of(p)}", rate=achieved, note=True)
                for p in outcome.points
            ),
        )
        for name, kind, outcome in outcomes
    ]
    limit = result.slo.p99_ms
    limits = {f"p99 limit {limit:g} ms": limit} if limit is not None else {}
    title = "p99 over throughput, before and after"
    return curves("before-after", title, series, axes=AXES, limits=limits)


def _front(labelled: Sequence[Labelled], front: Sequence[Labelled]) -> Markup:
    """All points of all trials, and those of them that none beats."""
    answered = [(name, point) for name, point in labelled if point.median("requests") > 0]
    series = [
        Series("measured", "cloud", tuple(_dot(*each) for each in answered), joined=False),
        Series("front", "front", tuple(_dot(*each) for each in front)),
    ]
    return curves("front", "p99 over throughput of every trial", series, axes=AXES)


def _dot(name: str, point: Point) -> Dot:
    return Dot(achieved(point), point.median("p99_us") / 1e3, f"{name}: {figures_of(point)}")
