"""The figures of a bench beside the card of the very build that was measured: Markdown."""

from __future__ import annotations

from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.files import told_to_user, write_files
from triptych.base.formatting import milliseconds, rounded
from triptych.repository.lock import FIGURES_FILE, build_id
from triptych.repository.store import locked
from triptych.serving.bench.points import BenchResult, Point
from triptych.serving.bench.verdict import closed_loops, headline, verdict_of

_TIMES = ("ttft p50", "ttft p99", "itl p50", "itl p99")


def write_figures(result: BenchResult, repository: Path) -> str:
    """Put the figures beside the card, if the build that was measured is still the one in place.

    Returns:
        In a line, what became of them.
    """
    subject = result.subject
    file = repository / subject.pipeline / FIGURES_FILE
    try:
        with told_to_user(repository), locked(repository):
            if subject.build != build_id(repository, subject.pipeline):
                return f"{file} was not written: what was measured has been built anew"
            write_files(file.parent, {FIGURES_FILE: figures(result)})
    except UserError as error:
        return f"{file} was not written: {error.message}"
    return str(file)


def figures(result: BenchResult) -> str:
    """The best figure, each load, and what they were measured on."""
    subject = result.subject
    others = [point for point in result.points if point.load.kind != "concurrency"]
    lines = [f"# Speed of {subject.pipeline}", "", f"{headline(result)}.", ""]
    if not result.slo.is_empty:
        lines += [verdict_of(result).says, ""]
    lines += ["| load | requests/s | p50, ms | p95, ms | p99, ms | errors |", "|" + " --- |" * 6]
    points = (*closed_loops(result.points), *others)
    lines += [_row(point) for point in points]
    if any(point.streamed for point in points):
        heads = ("load", "tokens/s", "goodput, requests/s", *(f"{name}, ms" for name in _TIMES))
        lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        lines += [_tokens_row(point) for point in points if point.streamed]
    machine = ", ".join(f"{name} {value}" for name, value in subject.machine.items())
    lines += [
        "",
        f"Measured by `triptych bench` at {subject.measured_at} with the pipeline's own traffic "
        f"({subject.requests} different requests) on: {machine}. {subject.precision}, "
        f"{subject.layout}. Server: {subject.server}. Build {subject.build[:12]} (SHA-256 of its "
        "lock).",
    ]
    return "\n".join(lines) + "\n"


def _tokens_row(point: Point) -> str:
    times = [milliseconds(point.latencies_us[name.replace(" ", "_")]) for name in _TIMES]
    rates = [rounded(point.median(name)) for name in ("tokens_per_s", "goodput_per_s")]
    return f"| {' | '.join([str(point.load), *rates, *times])} |"


def _row(point: Point) -> str:
    times = [milliseconds(point.median(f"{name}_us")) for name in ("p50", "p95", "p99")]
    rate = rounded(point.median("throughput_per_s"))
    return f"| {' | '.join([str(point.load), rate, *times, str(sum(point.errors.values()))])} |"
