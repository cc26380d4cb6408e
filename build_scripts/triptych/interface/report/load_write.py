"""The report of a bench: ``report.html`` to read, ``bench.json`` and ``bench.csv`` to compute."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from triptych.base.files import write_files
from triptych.interface.report.load_page import page
from triptych.repository.plain import json_text
from triptych.serving.bench.points import BenchResult, to_json
from triptych.spec.slo import PERCENTILES

_LATENCIES = ("mean_us", *(f"{name}_us" for name in PERCENTILES))
_ROUND = ("seconds", "requests", "throughput_per_s", *_LATENCIES, "is_stable")
_TIMES = tuple(f"{moment}_{name}" for moment in ("ttft", "itl") for name in PERCENTILES)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_COUNTS = ("ttft_samples", "itl_samples")
_STREAMED = ("tokens_per_s", "goodput_per_s", *_COUNTS, *(f"{name}_us" for name in _TIMES))
_STEP = ("queue_us", "compute_us", "mean_batch", "executions", "busy")


def write_bench_report(result: BenchResult, folder: Path) -> Path:
    """Write the three files into `folder`, made where it is missing; each appears whole or not.

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
    """A row for each point and round; the columns of steps are empty where there are none.

    Those of tokens are there where answers were streamed.
    """
    points = [
        *(("pipeline", point) for point in result.points),
        *(("baseline", point) for point in result.baselines),
        *(("rate search", point) for point in (result.rate.points if result.rate else ())),
    ]
    steps = dict.fromkeys(use.step for _, p in points for one in p.rounds for use in one.steps)
    columns = [
        *("part", "contender", "load", "load_value", "burst", "round", "seconds", "requests"),
        *("throughput_per_s", *_LATENCIES),
        *("errors", "error_kinds", "is_stable"),
        *(_STREAMED if any(point.streamed for _, point in points) else ()),
        *(f"{step}_{name}" for step in steps for name in _STEP),
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writerow({column: _as_text(column) for column in columns})
    for part, point in points:
        for number, one in enumerate(point.rounds, 1):
            row = {
                "part": part,
                "contender": point.contender,
                "load": point.load.kind,
                "load_value": point.load.value,
                "burst": point.load.burst,
                "round": number,
                "errors": sum(one.errors.values()),
                "error_kinds": json.dumps(one.errors) if one.errors else "",
            }
            row |= {name: getattr(one, name) for name in _ROUND}
            if one.streamed is not None:
                row |= {"tokens_per_s": one.tokens_per_s, "goodput_per_s": one.goodput_per_s}
                row |= {
                    name: getattr(one.streamed, name.partition("_")[0]).samples for name in _COUNTS
                }
                row |= {f"{name}_us": one.latencies_us[name] for name in _TIMES}
            for use in one.steps:
                row |= {f"{use.step}_{name}": getattr(use, name) for name in _STEP}
            table.writerow({column: _as_text(value) for column, value in row.items()})
    return text.getvalue()


def _as_text(value: Any) -> Any:
    """A cell: a text that a spreadsheet would take for a formula is marked as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
