"""The report of a bench: ``report.html`` to read, ``bench.json`` and ``bench.csv`` to compute."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.bench.points import BenchResult, Measurement, Point, to_json
from triptych.files import write_files
from triptych.pipeline.slo import PERCENTILES
from triptych.report.load_page import page
from triptych.repository.plain import json_text

_STEP = ("queue_us", "compute_us", "mean_batch", "executions", "busy")


def write_bench_report(result: BenchResult, folder: Path) -> Path:
    """Write the three files into `folder`; each appears whole or not at all.

    Args:
        result: what to report.
        folder: made where it is missing.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    files = {
        "bench.json": json_text(to_json(result)),
        "bench.csv": as_csv(result),
        "report.html": page(result),
    }
    write_files(folder, files)
    return folder / "report.html"


def as_csv(result: BenchResult) -> str:
    """A row for each point and round; the columns of steps are empty where there are none."""
    points = [
        *(("pipeline", point) for point in result.points),
        *(("baseline", point) for point in result.baselines),
        *(("rate search", point) for point in (result.rate.points if result.rate else ())),
    ]
    measured = [one for _, point in points for one in point.rounds]
    steps = list(dict.fromkeys(use.step for one in measured for use in one.steps))
    rows = [row for part, point in points for row in _rows(part, point, steps)]
    text = io.StringIO()
    table = csv.DictWriter(text, _columns(steps), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _columns(steps: list[str]) -> list[str]:
    return [
        *("part", "contender", "load", "load_value", "burst", "round", "seconds", "requests"),
        *("throughput_per_s", "mean_us", *(f"{name}_us" for name in PERCENTILES)),
        *("errors", "error_kinds", "is_stable"),
        *(f"{step}_{name}" for step in steps for name in _STEP),
    ]


def _rows(part: str, point: Point, steps: list[str]) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(point.rounds, 1):
        yield {
            "part": part,
            "contender": point.contender,
            "load": point.load.kind,
            "load_value": point.load.value,
            "burst": point.load.burst,
            "round": number,
            "seconds": one.seconds,
            "requests": one.requests,
            "throughput_per_s": one.throughput_per_s,
            "mean_us": one.mean_us,
            **{f"{name}_us": value for name, value in one.latencies_us.items()},
            "errors": sum(one.errors.values()),
            "error_kinds": json.dumps(one.errors) if one.errors else "",
            "is_stable": one.is_stable,
            **_of_steps(one, steps),
        }


def _of_steps(one: Measurement, steps: list[str]) -> dict[str, Any]:
    used = {use.step: use for use in one.steps}
    return {
        f"{step}_{name}": getattr(used[step], name)
        for step in steps
        if step in used
        for name in _STEP
    }
