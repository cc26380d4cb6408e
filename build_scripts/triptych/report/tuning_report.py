"""The report of a tuning: ``report.html`` to read and ``tune.json`` to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.bench.points import Point, to_json
from triptych.bench.verdict import figures_of
from triptych.files import write_files
from triptych.formatting import plain, rounded, shown
from triptych.report import load_page as load_page
from triptych.report import load_tables as tables
from triptych.report import tuning_trial_table as trial_table
from triptych.report.curves import Dot, Series, curves
from triptych.report.html import PROSE, document, facts, figure_of, listed, section
from triptych.repository.plain import json_text
from triptych.tune.pareto import pareto_front
from triptych.tune.results import TuneResult

Labelled = tuple[str, Point]


def write_tune_report(result: TuneResult, folder: Path) -> Path:
    """Write the two files into `folder`; each appears whole or not at all.

    Args:
        result: what to report.
        folder: made where it is missing.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    record = json_text(to_json(result))
    write_files(folder, {"tune.json": record, "report.html": tune_page(result)})
    return folder / "report.html"


def tune_page(result: TuneResult) -> str:
    """The whole page."""
    points = labelled_points(result)
    body = "".join(
        (
            _header(result),
            _before_after(result),
            section(
                "Trials",
                "<p>Each is measured in turns with the best settings so far, and takes their "
                "place only where it is better.</p>"
                if result.trials
                else "",
                trial_table.all_trials(result.trials),
            ),
            _front(points),
            section("Not tried", trial_table.skipped(result.skipped)),
            section("Errors", tables.errors([point for _, point in points])),
            section("Warnings", tables.warnings([point for _, point in points])),
            load_page.provenance(result.subject),
        )
    )
    title = f"{result.subject.pipeline}: {_word(result).lower()}"
    return document(title, body, load_page.STYLE)


def labelled_points(result: TuneResult) -> list[Labelled]:
    """Every point that was measured, with the name of its settings."""
    outcomes = (("before", result.baseline), ("after", result.winner))
    found = [(name, point) for name, outcome in outcomes for point in outcome.points]
    return found + [(f"trial {one.number}", point) for one in result.trials for point in one.points]


def _word(result: TuneResult) -> str:
    if result.slo.is_empty:
        return "Tuned"
    return "SLO met" if result.met else "SLO NOT MET"


def _header(result: TuneResult) -> str:
    kind = "accepted" if result.slo.is_empty else "passed" if result.met else "failed"
    same = result.winner.overrides == result.baseline.overrides
    won = "Nothing was better than the settings before."
    if not same:
        changed = trial_table.settings(result.winner.overrides, result.baseline.overrides)
        won = f"Settings: {changed}"
    advice = ""
    if result.advice:
        advice = f"<p>What else would help:</p>{listed('notes', result.advice)}"
    better = sum(one.verdict == "better" for one in result.trials)
    entries = {
        "Promise": load_page.promise(result.slo),
        "Maximised": load_page.promise(result.objective),
        "Trials": f"{len(result.trials)}, {better} better",
        "Took": f"{rounded(result.seconds)} s",
        "Stopped because": shown(result.stopped, PROSE),
    }
    return (
        f'<header><p class="eyebrow">Tuning</p><h1>{shown(result.subject.pipeline)}</h1>'
        f'<div class="verdict {kind}"><p class="word">{_word(result)}</p>'
        f"<p>{load_page.promise(result.verdict)}</p><p>{won}</p>{advice}</div>"
        f"{facts('facts', entries)}</header>"
    )


def _before_after(result: TuneResult) -> str:
    series = [
        Series(name, kind, tuple(_dot(name, point) for point in outcome.points))
        for name, kind, outcome in (
            ("before", "s4", result.baseline),
            ("after", "s1", result.winner),
        )
    ]
    limit = result.slo.p99_ms
    svg = curves(
        "before-after",
        "p99 over throughput, before and after",
        [one for one in series if one.dots],
        axes=("requests answered a second", "p99, ms"),
        limits={f"p99 limit {limit:g} ms": limit} if limit is not None else {},
    )
    chart = figure_of(svg, "Each point a number of clients.") if svg else ""
    held = "".join(
        f"<p>{name}: bottleneck {plain(one.bottleneck.kind)}. "
        f"{shown(one.bottleneck.says, PROSE)}</p>"
        for name, one in (("Before", result.baseline), ("After", result.winner))
    )
    left = f"<div>{trial_table.before_after(result)}</div>"
    return section("Before and after", f'<div class="pair">{left}{chart}</div>', held)


def _dot(name: str, point: Point) -> Dot:
    low, high = point.span("p99_us")
    return Dot(
        x=point.median("throughput_per_s"),
        y=point.median("p99_us") / 1e3,
        tip=f"{name}: {figures_of(point)}",
        note=f"{point.load.value:g}",
        x_span=point.span("throughput_per_s"),
        y_span=(low / 1e3, high / 1e3),
    )


def _front(points: Sequence[Labelled]) -> str:
    """All points of all trials, and those of them that none beats."""
    best = pareto_front([point for _, point in points])
    if not best:
        return ""
    names = {id(point): name for name, point in points}
    chosen = [(names[id(point)], point) for point in best]
    answered = [(name, point) for name, point in points if point.median("requests") > 0]
    series = [
        Series("measured", "cloud", tuple(_plain_dot(*each) for each in answered), joined=False),
        Series("front", "front", tuple(_plain_dot(*each) for each in chosen)),
    ]
    axes = ("requests answered a second", "p99, ms")
    svg = curves("front", "p99 over throughput of every trial", series, axes=axes)
    words = "<p>On the front nothing else answers more requests with as little p99.</p>"
    chart = figure_of(svg, "Every point of every trial; joined: the front.")
    body = f'<div class="pair">{chart}<div>{trial_table.front(chosen)}</div></div>'
    return section("Throughput against p99", words, body)


def _plain_dot(name: str, point: Point) -> Dot:
    rate, tail = point.median("throughput_per_s"), point.median("p99_us") / 1e3
    return Dot(rate, tail, f"{name}: {figures_of(point)}")
