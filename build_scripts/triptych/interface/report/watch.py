"""The report of the watch: the last look, and a timeline of all of them.

The report of a candidate beside the build in place: the verdict, answers, latency and cost.
"""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from triptych.base.files import write_files
from triptych.interface.report.pages import render
from triptych.interface.report.plots import Dot, Series, curves
from triptych.operate.tune.proposal import describe_proposal
from triptych.operate.watch.findings import Look, describe_figure, describe_test
from triptych.operate.watch.timeline import TIMELINE_FILE, Timeline
from triptych.operate.watch.verdict import Shadow, Speed
from triptych.repository.records import json_text


def write_shadow_report(found: Shadow, folder: Path) -> Path:
    """Write page and figures into `folder`; each appears whole or not. No text is in them.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    page = shadow_page(found)
    write_files(folder, {"shadow.json": json_text(found.as_dict()), "report.html": page})
    return folder / "report.html"


def shadow_page(found: Shadow) -> str:
    """The page as HTML."""
    plots = [
        (_rounds(speed), f"{speed.name}: the measurements, in turns.") for speed in found.speeds
    ]
    return render("shadow.html.j2", found=found, plots=plots)


def _rounds(speed: Speed) -> Markup:
    """A figure of latency or cost, round by round."""
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
            ("in place", "s1", speed.in_place),
            ("candidate", "s2", speed.candidate),
        )
    ]
    key = "speed-" + speed.name.replace(" ", "-")
    return curves(key, speed.name, series, axes=("round", speed.name))


KINDS = ("s1", "s2", "s3", "s4")


def write_watch_report(look: Look, timeline: Timeline, folder: Path) -> Path:
    """Write page, timeline and the last look into `folder`; each appears whole or not.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    files = {
        "watch.json": json_text(look.as_dict()),
        "report.html": watch_page(look, timeline),
        TIMELINE_FILE: timeline.as_text(),  # last: rows count as seen once all is told
    }
    write_files(folder, files)
    return folder / "report.html"


def watch_page(look: Look, timeline: Timeline) -> str:
    """The page as HTML."""
    drift = look.drift
    proposed = (
        describe_proposal(drift.proposal, drift.rate_per_s) if drift and drift.proposal else ()
    )
    return render(
        "watch.html.j2",
        look=look,
        proposed=[line.strip() for line, _ in proposed],
        looks=timeline.looks,
        evidence_plot=_evidence(look, timeline),
        quality_plot=_quality(look, timeline),
        describe_figure=describe_figure,
        describe_test=describe_test,
    )


def _hours(timeline: Timeline, at: float) -> float:
    """Since the first look."""
    return max(at - timeline.looks[0].at, 0.0) / 3600


def _evidence(look: Look, timeline: Timeline) -> Markup:
    """Evidence of each test over the looks at this build; from 1 on it is an alarm."""
    series = [
        Series(
            test.name,
            kind,
            tuple(
                Dot(_hours(timeline, one.at), one.evidence[test.name] / test.needed, test.name)
                for one in timeline.looks
                if one.build == look.build and test.name in one.evidence
            ),
        )
        for test, kind in zip(look.tests, KINDS, strict=False)
    ]
    axes = ("hours since the first look", "evidence, 1 is an alarm")
    return curves("evidence", "Evidence over time", series, axes=axes, limits={"alarm": 1.0})


def _quality(look: Look, timeline: Timeline) -> Markup:
    """The first metric of each look with its interval."""
    name = next((one.metric for one in look.figures if one.low is not None), None)
    dots = []
    for one in timeline.looks:
        value, low, high = one.figures.get(name or "", (None, None, None))
        if value is not None and low is not None and high is not None:
            tip = f"{one.rows} rows: {value:.6g}, {low:.6g} to {high:.6g}"
            dots.append(Dot(_hours(timeline, one.at), value, tip, y_span=(low, high)))
    if name is None or not dots:
        return Markup()
    axes = ("hours since the first look", name)
    return curves("quality", f"{name} over time", [Series(name, "s1", tuple(dots))], axes=axes)
