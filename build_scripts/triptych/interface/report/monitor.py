"""Reports of monitoring (last run and timeline) and of a replay on two builds."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from markupsafe import Markup

from triptych.interface.report.pages import render, write_report
from triptych.interface.report.plots import Dot, Series, curves
from triptych.operate.monitor.results import TIMELINE_FILE, MonitorRun, Timeline
from triptych.operate.monitor.shadow_verdict import ReplayComparison, Speed
from triptych.repository.records import json_text


def write_shadow_report(comparison: ReplayComparison, folder: Path) -> Path:
    """Write the report into `folder`, without any text of a request; see `write_report`."""
    plots = [
        (_rounds(speed), f"{speed.name}: the measurements, in turns.")
        for speed in comparison.speeds
    ]
    page = render("shadow.html.j2", found=comparison, plots=plots)
    return write_report(folder, page, {"shadow.json": json_text(comparison.as_dict())})


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


SERIES_KINDS = ("s1", "s2", "s3", "s4")
"""CSS classes of the plotted tests."""


MAX_SHOWN_RUNS = 50
"""Maximum number of runs in the table of a report, the last ones."""


def format_time(at: float) -> str:
    """Return a Unix time as a date and time of day in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def write_monitor_report(run: MonitorRun, timeline: Timeline, folder: Path) -> Path:
    """Write the report of the last run and the timeline into `folder`; see `write_report`."""
    page = render(
        "monitor.html.j2",
        run=run,
        runs=timeline.runs,
        past=[
            (format_time(past.at), past.build[:12], past.rows, len(past.alarms), len(past.drifts))
            for past in reversed(timeline.runs[-MAX_SHOWN_RUNS:])
        ],
        worst=run.worst or timeline.worst,
        evidence_plot=_evidence(run, timeline),
        quality_plot=_quality(run, timeline),
    )
    # The timeline is last, because it marks the rows as seen.
    files = {"monitor.json": json_text(run.as_dict()), TIMELINE_FILE: timeline.as_text()}
    return write_report(folder, page, files)


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
        for test, kind in zip(run.tests, SERIES_KINDS, strict=False)
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
