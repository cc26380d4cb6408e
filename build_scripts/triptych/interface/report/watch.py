"""Reports of monitoring (last run and timeline) and of a replay on two builds."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from triptych.base.files import write_files
from triptych.interface.report.pages import render
from triptych.interface.report.plots import Dot, Series, curves
from triptych.operate.monitor.results import MonitorRun, format_metric, format_test
from triptych.operate.monitor.timeline import TIMELINE_FILE, Timeline
from triptych.operate.monitor.verdict import ReplayComparison, Speed
from triptych.operate.tune.proposal import format_proposal
from triptych.repository.records import json_text


def write_shadow_report(found: ReplayComparison, folder: Path) -> Path:
    """Write page and figures into `folder`; each appears whole or not. No text is in them.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    page = shadow_page(found)
    write_files(folder, {"shadow.json": json_text(found.as_dict()), "report.html": page})
    return folder / "report.html"


def shadow_page(found: ReplayComparison) -> str:
    """Return the page as HTML."""
    plots = [
        (_rounds(speed), f"{speed.name}: the measurements, in turns.") for speed in found.speeds
    ]
    return render("shadow.html.j2", found=found, plots=plots)


def _rounds(speed: Speed) -> Markup:
    """Return a plot of a latency or cost over the rounds."""
    series = [
        Series(
            name,
            kind,
            tuple(
                Dot(number, value, f"round {number}, {name}: {value:.4g} {speed.name}")
                for number, value in enumerate(values, 1)
            ),
        )
        for name, kind, values in (
            ("active build", "s1", speed.active),
            ("candidate", "s2", speed.candidate),
        )
    ]
    key = "speed-" + speed.name.replace(" ", "-")
    return curves(key, speed.name, series, axes=("round", speed.name))


KINDS = ("s1", "s2", "s3", "s4")


def write_watch_report(run: MonitorRun, timeline: Timeline, folder: Path) -> Path:
    """Write page, timeline and the last run into `folder`; each appears whole or not.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    files = {
        "monitor.json": json_text(run.as_dict()),
        "report.html": watch_page(run, timeline),
        TIMELINE_FILE: timeline.as_text(),  # last: rows count as seen once all is told
    }
    write_files(folder, files)
    return folder / "report.html"


def watch_page(run: MonitorRun, timeline: Timeline) -> str:
    """Return the page as HTML."""
    drift = run.drift
    proposed = format_proposal(drift.proposal, drift.rate_per_s) if drift and drift.proposal else ()
    return render(
        "watch.html.j2",
        run=run,
        proposed=[line.strip() for line, _ in proposed],
        runs=timeline.runs,
        evidence_plot=_evidence(run, timeline),
        quality_plot=_quality(run, timeline),
        format_metric=format_metric,
        format_test=format_test,
    )


def _hours(timeline: Timeline, at: float) -> float:
    """Return the hours from the first run to `at`."""
    return max(at - timeline.runs[0].at, 0.0) / 3600


def _evidence(run: MonitorRun, timeline: Timeline) -> Markup:
    """Return a plot of the evidence of each test over the runs of this build; 1 is an alarm."""
    series = [
        Series(
            test.name,
            kind,
            tuple(
                Dot(_hours(timeline, one.at), one.evidence[test.name] / test.needed, test.name)
                for one in timeline.runs
                if one.build == run.build and test.name in one.evidence
            ),
        )
        for test, kind in zip(run.tests, KINDS, strict=False)
    ]
    axes = ("hours since the first run", "evidence, 1 is an alarm")
    return curves("evidence", "Evidence over time", series, axes=axes, limits={"alarm": 1.0})


def _quality(run: MonitorRun, timeline: Timeline) -> Markup:
    """Return a plot of the first metric of each run, with its confidence interval."""
    name = next((one.metric for one in run.metrics if one.low is not None), None)
    dots = []
    for one in timeline.runs:
        value, low, high = one.metrics.get(name or "", (None, None, None))
        if value is not None and low is not None and high is not None:
            tip = f"{one.rows} rows: {value:.6g}, {low:.6g} to {high:.6g}"
            dots.append(Dot(_hours(timeline, one.at), value, tip, y_span=(low, high)))
    if name is None or not dots:
        return Markup()
    axes = ("hours since the first run", name)
    return curves("quality", f"{name} over time", [Series(name, "s1", tuple(dots))], axes=axes)
