"""Results of the GPU test as tables, notes and an exit code; results on fakes are marked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.engines import BuiltPipeline
from benchmarks.gpu.ledger import Ledger
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.served import Served
from benchmarks.gpu.targets import Target
from benchmarks.harness import tabulate, write_result
from benchmarks.results import Table

ALL_MET, BAD, INCOMPLETE = 0, 1, 3
"""Exit codes; 2 is an invalid option."""
FAKE = "FAKE"


@dataclass
class GpuResults:
    """Results of a run so far; `speeds` are those in process."""

    machine: Machine
    fakes: tuple[str, ...]
    finished: bool = False
    built: list[BuiltPipeline] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def exit_code(results: GpuResults, ledger: Ledger, *, judged: bool = True) -> int:
    """Return 0 if everything ran on real hardware and, if `judged`, every target was met."""
    statuses = {target.status for target in results.targets}
    if ledger.failed or "missed" in statuses:
        return BAD
    undecided = judged and statuses != {"met"}
    if ledger.not_run or results.fakes or not results.finished or undecided:
        return INCOMPLETE
    return ALL_MET


def make_notes(results: GpuResults, ledger: Ledger) -> list[str]:
    """Return the facts about machine and models, and whatever did not run or failed."""
    notes = []
    if results.fakes:
        fakes = ", ".join(results.fakes)
        notes.append(f"{FAKE}: {fakes}. No figure here describes a GPU.")
    if not results.finished:
        notes.append("Not finished: the run was interrupted.")
    notes.append("; ".join(f"{name}: {text}" for name, text in results.machine.facts.items()))
    models = dict.fromkeys(built.pipeline.model for built in results.built)
    notes += [f"{model.name}: {model.weights}" for model in models]
    notes += [f"failed: {what}: {reason}" for what, reason in ledger.failed]
    notes += [f"not run: {what}: {reason}" for what, reason in ledger.not_run]
    return [*notes, *ledger.notes, f"{len(ledger.failed)} failed, {len(ledger.not_run)} not run."]


def make_tables(results: GpuResults) -> list[Table]:
    """Return the tables that have rows: targets, engines, speed in process, served."""
    mark = f"{FAKE} " if results.fakes else ""

    def make_columns(rate: str, digits: int) -> dict[str, Callable[[Speed], str]]:
        return {
            "system": lambda one: f"{mark}{one.system}",
            "load": lambda one: one.load,
            rate: lambda one: f"{one.rate_per_s:.0f}",
            "lowest-highest": lambda one: f"{one.lowest_per_s:.0f}-{one.highest_per_s:.0f}",
            "p50 ms": lambda one: f"{one.p50_ms:.{digits}f}",
            "p99 ms": lambda one: f"{one.p99_ms:.{digits}f}",
            "rounds": lambda one: str(one.rounds),
        }

    # Systems under the same load are next to each other.
    speeds = sorted(results.speeds, key=lambda one: (one.model, one.lengths, one.batch_size))
    tables = [
        tabulate(
            "Targets",
            results.targets,
            {
                "model": lambda one: one.model,
                "target": lambda one: one.text,
                "status": lambda one: f"{mark}{one.status}",
                "figures": lambda one: one.figures,
            },
        ),
        tabulate(
            "Engines and their parity with PyTorch fp32",
            results.built,
            {
                "pipeline": lambda one: one.pipeline.name,
                "layout": lambda one: one.plan.layout,
                "graph's gate (CPU)": lambda one: "FAILED" if one.graph_failures else "passed",
                "engine": lambda one: _describe_engine(one.engine, mark),
                "engine's gate (GPU)": lambda one: _describe_parity(one.parity, mark),
            },
        ),
        tabulate(
            "In process, on one GPU",
            speeds,
            {"model": lambda one: one.model, **make_columns("rows/s", 3)},
        ),
        tabulate(
            "Served by tritonserver, one text a request",
            [point for one in results.served for point in (*one.closed, one.poisson)],
            make_columns("texts/s", 2),
        ),
    ]
    return [table for table in tables if table.rows]


def write(results: GpuResults, ledger: Ledger, options: argparse.Namespace) -> dict[str, Any]:
    """Write the JSON result and the page beside it; return the result of `write_result`."""
    data = {
        "finished": results.finished,
        "fakes": results.fakes,
        "machine": asdict(results.machine),
        "pipelines": [_to_dict(built) for built in results.built],
        "speeds": results.speeds,
        "served": results.served,
        "targets": results.targets,
        "not_run": [entry._asdict() for entry in ledger.not_run],
        "failed": [entry._asdict() for entry in ledger.failed],
    }
    return write_result(options, make_tables(results), data, make_notes(results, ledger))


def _to_dict(built: BuiltPipeline) -> dict[str, Any]:
    return {
        "name": built.pipeline.name,
        "weights": built.pipeline.model.weights,
        "max_batch_size": built.plan.max_batch_size,
        "graph_failures": built.graph_failures,
        "engine": built.engine,
        "parity": built.parity,
    }


def _describe_engine(engine: dict[str, Any] | None, mark: str) -> str:
    if engine is None:
        return "none"
    counts = engine.get("matmuls") or {}
    matmuls = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
    return f"{mark}matmuls {matmuls or 'unknown'}"


def _describe_parity(parity: dict[str, Any] | None, mark: str) -> str:
    if parity is None:
        return "not checked"
    values = [
        f"{verdict['metric']} "
        + ("not a number" if verdict["value"] is None else f"{verdict['value']:.4g}")
        for verdict in parity["verdicts"]
        if verdict["limit"] is not None
    ]
    return f"{mark}{'FAILED' if parity['failures'] else 'passed'}: {', '.join(values)}"
