"""What a run found, as JSON and as a page of Markdown; where a fake took part, it says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.engines import Built
from benchmarks.gpu.ledger import Entry, Ledger
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.served import Loop, Served
from benchmarks.gpu.targets import Target
from triptych.base.files import write_files

ALL_MET, BAD, INCOMPLETE = 0, 1, 3
"""Exit codes; 2 is a mistake in what was asked."""

FAKE = "FAKE"


@dataclass
class Findings:
    """All that a run found so far.

    Attributes:
        machine: what was there.
        fakes: names of the modules that were fakes.
        started_at: when, in UTC.
        finished: whether the run came to its end.
        built: pipelines.
        speeds: in process.
        served: on a server.
        targets: judged at the end.
    """

    machine: Machine
    fakes: tuple[str, ...]
    started_at: str
    finished: bool = False
    built: list[Built] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def exit_code(findings: Findings, ledger: Ledger, *, judged: bool = True) -> int:
    """0 where everything ran and every target was met; never so where a fake took part.

    Args:
        findings: of the run.
        ledger: of the run.
        judged: whether targets were to be judged.
    """
    statuses = {target.status for target in findings.targets}
    if ledger.failed or "missed" in statuses:
        return BAD
    undecided = judged and statuses != {"met"}
    if ledger.not_run or findings.fakes or not findings.finished or undecided:
        return INCOMPLETE
    return ALL_MET


def write(findings: Findings, ledger: Ledger, path: Path) -> None:
    """Write the report, whole or not at all: ``.json`` as named, and the page beside it."""
    report = {
        "started_at": findings.started_at,
        "finished": findings.finished,
        "fakes": findings.fakes,
        "machine": asdict(findings.machine),
        "pipelines": [_pipeline(built) for built in findings.built],
        "speeds": [asdict(speed) for speed in findings.speeds],
        "served": [asdict(served) for served in findings.served],
        "targets": [asdict(target) for target in findings.targets],
        "not_run": [asdict(entry) for entry in ledger.not_run],
        "failed": [asdict(entry) for entry in ledger.failed],
        "notes": ledger.notes,
    }
    files = {
        path.name: json.dumps(report, indent=2) + "\n",
        path.with_suffix(".md").name: page(findings, ledger) + "\n",
    }
    write_files(path.parent, files)


def page(findings: Findings, ledger: Ledger) -> str:
    """The tables, then what was not run and what failed, each with its reason."""
    facts = findings.machine.facts
    lines = [f"# GPU test, {findings.started_at}", ""]
    if findings.fakes:
        lines += [
            f"**{FAKE}: {', '.join(findings.fakes)}. No figure here says anything of a GPU.**",
            "",
        ]
    if not findings.finished:
        lines += ["**Not finished: the run was cut short.**", ""]
    lines += ["; ".join(f"{name}: {text}" for name, text in facts.items()), ""]
    models = dict.fromkeys(built.subject.model for built in findings.built)
    lines += [f"- {model.name}: {model.weights}" for model in models]
    mark = f"{FAKE} " if findings.fakes else ""
    lines += [*_targets(findings.targets, mark), *_pipelines(findings.built, mark)]
    lines += [*_speeds(findings.speeds, mark), *_served(findings.served, mark)]
    lines += _entries("Failed", ledger.failed) + _entries("Not run", ledger.not_run)
    lines += ["", *(f"Note: {note}" for note in ledger.notes)] if ledger.notes else []
    lines += ["", f"{len(ledger.failed)} failed, {len(ledger.not_run)} not run."]
    return "\n".join(lines)


def _pipeline(built: Built) -> dict[str, Any]:
    subject = built.subject
    return {
        "name": subject.name,
        "model": subject.model.name,
        "weights": subject.model.weights,
        "precision": subject.precision,
        "layout": built.plan.layout,
        "max_batch_size": built.plan.max_batch_size,
        "graph_failures": built.graph_failures,
        "engine": built.engine,
        "parity": built.parity,
    }


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"## {title}", "", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _targets(targets: Sequence[Target], mark: str) -> list[str]:
    rows = [(t.model, t.promise, f"{mark}{t.status}", t.figures) for t in targets]
    return _table("Targets", ("model", "target", "status", "figures"), rows)


def _pipelines(every: Sequence[Built], mark: str) -> list[str]:
    rows = []
    for built in every:
        engine = "none"
        if built.engine is not None:
            engine = f"{mark}matmuls {_matmuls(built.engine)}"
        worst = "not checked"
        if built.parity is not None:
            worst = f"{mark}{'FAILED' if built.parity['failures'] else 'passed'}: "
            worst += ", ".join(
                f"{verdict['metric']} {_figure(verdict['value'])}"
                for verdict in built.parity["verdicts"]
                if verdict["limit"] is not None
            )
        graph = "FAILED" if built.graph_failures else "passed"
        rows.append((built.subject.name, built.plan.layout, graph, engine, worst))
    head = ("pipeline", "layout", "graph's gate (CPU)", "engine", "engine's gate (GPU)")
    return _table("Engines and their parity with PyTorch fp32", head, rows)


def _matmuls(engine: dict[str, Any]) -> str:
    counts = engine.get("matmuls") or {}
    return ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count) or "unknown"


def _figure(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4g}"


def _speeds(speeds: Sequence[Speed], mark: str) -> list[str]:
    rows = [
        (
            speed.model,
            speed.load,
            f"{mark}{speed.contender}",
            f"{speed.rows_per_s:.0f}",
            f"{speed.lowest_per_s:.0f}-{speed.highest_per_s:.0f}",
            f"{speed.p50_ms:.3f}",
            f"{speed.p99_ms:.3f}",
            str(speed.rounds),
        )
        for speed in sorted(speeds, key=_place)
    ]
    head = ("model", "load", "contender", "rows/s", "lowest-highest", "p50 ms", "p99 ms", "rounds")
    return _table("In process, on one GPU", head, rows)


def _place(speed: Speed) -> tuple[str, bool, int]:
    """What is to be compared stands together."""
    return speed.model, speed.lengths != "mixed", speed.batch_size


def _served(every: Sequence[Served], mark: str) -> list[str]:
    rows = [
        (
            f"{mark}{one.model} {one.precision} {one.layout}",
            _load(loop),
            f"{loop.rate_per_s:.0f}",
            f"{loop.lowest_per_s:.0f}-{loop.highest_per_s:.0f}",
            f"{loop.p50_ms:.2f}",
            f"{loop.p99_ms:.2f}",
            str(loop.rounds),
        )
        for one in every
        for loop in (*one.closed, one.poisson)
    ]
    head = ("pipeline", "load", "texts/s", "lowest-highest", "p50 ms", "p99 ms", "rounds")
    return _table("Served by tritonserver, one text a request", head, rows)


def _load(loop: Loop) -> str:
    if loop.offered_per_s is not None:
        return f"Poisson, {loop.offered_per_s:.0f}/s"
    return f"{loop.clients} client{'s' * (loop.clients != 1)}"


def _entries(title: str, entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    return ["", f"## {title}", "", *(f"- {entry.what}: {entry.reason}" for entry in entries)]
