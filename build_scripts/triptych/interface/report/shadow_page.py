"""The report of a candidate beside the build in place: the verdict, answers, latency and cost."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from triptych.base.files import write_files
from triptych.interface.report.pages import render
from triptych.interface.report.plots import Dot, Series, curves
from triptych.operate.watch.verdict import Shadow, Speed
from triptych.repository.plain import json_text


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
