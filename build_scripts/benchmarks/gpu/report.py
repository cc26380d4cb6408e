"""Results of the GPU test as JSON and as a Markdown page; results on fakes are marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.engines import BuiltPipeline
from benchmarks.gpu.ledger import Entry, Ledger
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.served import LoadPoint, Served
from benchmarks.gpu.targets import Target
from benchmarks.results import Table
from triptych.base.files import write_files

ALL_MET, BAD, INCOMPLETE = 0, 1, 3
"""Exit codes; 2 is an invalid option."""

FAKE = "FAKE"


@dataclass
class GpuResults:
    """Results of a run so far.

    Attributes:
        fakes: Names of modules that are fakes.
        started_at: Time in UTC.
        finished: Whether the run came to its end.
        speeds: Measurements in process.
        served: Measurements on a server.
        targets: Targets, judged at the end.
    """

    machine: Machine
    fakes: tuple[str, ...]
    started_at: str
    finished: bool = False
    built: list[BuiltPipeline] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def exit_code(results: GpuResults, ledger: Ledger, *, judged: bool = True) -> int:
    """Return 0 if everything ran on real hardware and every target was met.

    Args:
        judged: Whether targets were to be judged.
    """
    statuses = {target.status for target in results.targets}
    if ledger.failed or "missed" in statuses:
        return BAD
    undecided = judged and statuses != {"met"}
    if ledger.not_run or results.fakes or not results.finished or undecided:
        return INCOMPLETE
    return ALL_MET


def write(results: GpuResults, ledger: Ledger, path: Path) -> None:
    """Write the JSON report to `path` and the page beside it, each of them atomically."""
    report = {
        "started_at": results.started_at,
        "finished": results.finished,
        "fakes": results.fakes,
        "machine": asdict(results.machine),
        "pipelines": [_to_dict(built) for built in results.built],
        "speeds": [asdict(speed) for speed in results.speeds],
        "served": [asdict(served) for served in results.served],
        "targets": [asdict(target) for target in results.targets],
        "not_run": [asdict(entry) for entry in ledger.not_run],
        "failed": [asdict(entry) for entry in ledger.failed],
        "notes": ledger.notes,
    }
    files = {
        path.name: json.dumps(report, indent=2) + "\n",
        path.with_suffix(".md").name: make_page(results, ledger) + "\n",
    }
    write_files(path.parent, files)


def make_page(results: GpuResults, ledger: Ledger) -> str:
    """Return the tables, then everything that did not run or failed, with the reason."""
    facts = results.machine.facts
    lines = [f"# GPU test, {results.started_at}", ""]
    if results.fakes:
        fakes = ", ".join(results.fakes)
        lines += [f"**{FAKE}: {fakes}. No figure here describes a GPU.**", ""]
    if not results.finished:
        lines += ["**Not finished: the run was interrupted.**", ""]
    lines += ["; ".join(f"{name}: {text}" for name, text in facts.items()), ""]
    models = dict.fromkeys(built.pipeline.model for built in results.built)
    lines += [f"- {model.name}: {model.weights}" for model in models]
    for table in make_tables(results):
        lines += ["", str(table)]
    lines += _list_entries("Failed", ledger.failed) + _list_entries("Not run", ledger.not_run)
    lines += ["", *(f"Note: {note}" for note in ledger.notes)] if ledger.notes else []
    lines += ["", f"{len(ledger.failed)} failed, {len(ledger.not_run)} not run."]
    return "\n".join(lines)


def make_tables(results: GpuResults) -> list[Table]:
    """Return the tables that have rows: targets, engines, speed in process, served."""
    mark = f"{FAKE} " if results.fakes else ""
    ranges = ("lowest-highest", "p50 ms", "p99 ms", "rounds")
    tables = [
        Table(
            "Targets",
            ("model", "target", "status", "figures"),
            [(t.model, t.text, f"{mark}{t.status}", t.figures) for t in results.targets],
        ),
        Table(
            "Engines and their parity with PyTorch fp32",
            ("pipeline", "layout", "graph's gate (CPU)", "engine", "engine's gate (GPU)"),
            [_make_engine_row(built, mark) for built in results.built],
        ),
        Table(
            "In process, on one GPU",
            ("model", "load", "system", "rows/s", *ranges),
            [
                (
                    speed.model,
                    speed.load,
                    f"{mark}{speed.system}",
                    *_format(speed.rows_per_s, speed, 3),
                )
                for speed in sorted(results.speeds, key=_sort_key)
            ],
        ),
        Table(
            "Served by tritonserver, one text a request",
            ("pipeline", "load", "texts/s", *ranges),
            [
                (
                    f"{mark}{one.model} {one.precision} {one.layout}",
                    _name_load(point),
                    *_format(point.rate_per_s, point, 2),
                )
                for one in results.served
                for point in (*one.closed, one.poisson)
            ],
        ),
    ]
    return [table for table in tables if table.rows]


def _to_dict(built: BuiltPipeline) -> dict[str, Any]:
    pipeline = built.pipeline
    return {
        "name": pipeline.name,
        "model": pipeline.model.name,
        "weights": pipeline.model.weights,
        "precision": pipeline.precision,
        "layout": built.plan.layout,
        "max_batch_size": built.plan.max_batch_size,
        "graph_failures": built.graph_failures,
        "engine": built.engine,
        "parity": built.parity,
    }


def _make_engine_row(built: BuiltPipeline, mark: str) -> tuple[str, ...]:
    engine, parity = "none", "not checked"
    if built.engine is not None:
        counts = built.engine.get("matmuls") or {}
        matmuls = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
        engine = f"{mark}matmuls {matmuls or 'unknown'}"
    if built.parity is not None:
        parity = f"{mark}{'FAILED' if built.parity['failures'] else 'passed'}: "
        parity += ", ".join(
            f"{verdict['metric']} {_format_metric(verdict['value'])}"
            for verdict in built.parity["verdicts"]
            if verdict["limit"] is not None
        )
    graph = "FAILED" if built.graph_failures else "passed"
    return built.pipeline.name, built.plan.layout, graph, engine, parity


def _format_metric(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4g}"


def _format(rate: float, one: Speed | LoadPoint, digits: int) -> tuple[str, ...]:
    spread = f"{one.lowest_per_s:.0f}-{one.highest_per_s:.0f}"
    latency = f"{one.p50_ms:.{digits}f}", f"{one.p99_ms:.{digits}f}"
    return f"{rate:.0f}", spread, *latency, str(one.rounds)


def _sort_key(speed: Speed) -> tuple[str, bool, int]:
    """Return a key that puts systems under the same load next to each other."""
    return speed.model, speed.lengths != "mixed", speed.batch_size


def _name_load(point: LoadPoint) -> str:
    if point.offered_per_s is not None:
        return f"Poisson, {point.offered_per_s:.0f}/s"
    return f"{point.clients} client{'s' * (point.clients != 1)}"


def _list_entries(title: str, entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    return ["", f"## {title}", "", *(f"- {entry.what}: {entry.reason}" for entry in entries)]
