"""Report of an accuracy gate: ``report.html`` and ``gate.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from markupsafe import Markup

from triptych.base.formatting import NOTHING, code, figure, number
from triptych.interface.report import plots
from triptych.interface.report.pages import render, write_report
from triptych.repository.records import GateResult, PrecisionTrial, json_text
from triptych.tasks.accuracy import find_metric, is_lower_better


@dataclass(frozen=True)
class GateHeader:
    """Header data of a gate report; `versions` maps libraries to their versions."""

    pipeline: str
    task: str
    architecture: str
    layout: str
    versions: Mapping[str, str]


def write_gate_report(gate: GateResult, about: GateHeader, folder: Path) -> Path:
    """Write the report into `folder`; see `write_report`."""
    record = {"conversion": None, "accepted": None, **gate.as_dict(), **asdict(about)}
    return write_report(folder, page(gate, about), {"gate.json": json_text(record)})


def page(gate: GateResult, about: GateHeader) -> str:
    labeled, failures = gate.labeled, list(gate.failures)
    if labeled and labeled.failure and labeled.failure not in failures:
        failures.append(labeled.failure)
    verdicts = (*gate.verdicts, *(gate.probe.verdicts if gate.probe else ()))
    bound = [verdict for verdict in verdicts if verdict.limit is not None]
    differences = [v for each in gate.row_differences if (v := number(each)) is not None]
    limits = [each.limit for each in gate.verdicts if each.metric == "max_difference"]
    kind, word = _outcome(gate, failures)
    return render(
        "gate.html.j2",
        gate=gate,
        about=about,
        kind=kind,
        word=word,
        failures=failures,
        bound=len(bound),
        broken=sum(not verdict.passed for verdict in bound),
        find_metric=find_metric,
        differences=sorted(max(value, 0.0) for value in differences),
        difference_limit=number(limits[0]) if limits else None,
        interval=_interval(gate),
        ranges=_ranges(gate),
        candidate_lines=_candidate_lines(gate.candidates),
        scatter=_scatter(gate),
        origin={
            "Pipeline": about.pipeline,
            "Task": about.task,
            "Architecture": about.architecture,
            "Layout": about.layout,
            "Precision": gate.precision,
            **about.versions,
        },
        remarks=[(each.label, _remarks(each)) for each in gate.candidates],
    )


def _outcome(gate: GateResult, failures: Sequence[str]) -> tuple[str, str]:
    """Return the kind and the text of the verdict; it is passed only if everything passed."""
    measured = gate.finite and bool(gate.verdicts)
    probe = gate.probe.verdicts if gate.probe else ()
    if not failures and measured and all(verdict.passed for verdict in (*gate.verdicts, *probe)):
        return "passed", "Passed"
    if gate.accepted:
        return "accepted", "Accepted despite failure"
    return "failed", "FAILED"


def _interval(gate: GateResult) -> Markup:
    """Return the plot of the labeled metric, or "" if a value is not finite."""
    found = gate.labeled
    ends = (found.difference, found.low, found.high, found.max_drop) if found else (None,)
    held = [value for end in ends if (value := number(end)) is not None]
    return plots.interval(*held) if len(held) == 4 else Markup()


def _ranges(gate: GateResult) -> dict[str, float]:
    """Return the finite ranges, as magnitudes."""
    given = gate.conversion.ranges if gate.conversion else {}
    return {name: abs(v) for name, held in given.items() if (v := number(held)) is not None}


def _verdicts(candidate: PrecisionTrial) -> Mapping[str, float]:
    return candidate.verdicts or {}


def _metrics(candidates: Sequence[PrecisionTrial]) -> list[str]:
    """Return the metrics of all candidates, in order of first appearance."""
    return list(dict.fromkeys(metric for each in candidates for metric in _verdicts(each)))


def _candidate_lines(candidates: Sequence[PrecisionTrial]) -> dict[str, list[str]]:
    """Return a table line for each measure, with a cell for each candidate."""
    speeds = [number(each.throughput_per_s) for each in candidates]
    slow = dict(zip((each.label for each in candidates), speeds, strict=True)).get("fp32")
    sizes = [number(each.size_bytes) for each in candidates]
    lines: dict[str, list[str]] = {
        "Rows/s": [figure(speed, 1) for speed in speeds],
        "Ratio to fp32": [NOTHING if speed is None else f"{speed / slow:.2f}" for speed in speeds]
        if slow
        else [],
        "p99, ms": [figure(each.p99_ms, 1) for each in candidates],
        "Size, MB": [figure(None if size is None else size * 1e-6, 1) for size in sizes],
        "Layers excluded": [f"{len(each.excluded_layers):,}" for each in candidates],
    }
    for metric in _metrics(candidates):
        lines[code(metric)] = [figure(_verdicts(each).get(metric)) for each in candidates]
    return {name: cells for name, cells in lines.items() if cells}


@dataclass(frozen=True)
class _Scatter:
    svg: Markup
    metric: str
    limit: float | None
    missing: list[str]


def _scatter(gate: GateResult) -> _Scatter | None:
    """Return the plot of throughput over the metric with the smallest margin; None if empty."""
    metric, limit = _tightest(gate, _metrics(gate.candidates))
    points, missing = [], []
    for each in gate.candidates:
        x, y = number(_verdicts(each).get(metric)), number(each.throughput_per_s)
        if x is None or y is None or each.status == "not runnable":
            missing.append(each.label)
        else:
            points.append(plots.PrecisionPoint(each.label, each.status, x, max(y, 0.0)))
    if not points:
        return None
    svg = plots.candidates(points, metric, limit, higher=not is_lower_better(metric))
    return _Scatter(svg, metric, limit, missing)


def _tightest(gate: GateResult, metrics: Sequence[str]) -> tuple[str, float | None]:
    """Return the metric that is nearest to its limit, and the limit."""
    used: list[tuple[float, str, float]] = []
    for verdict in gate.verdicts:
        value, limit = number(verdict.value), number(verdict.limit)
        if verdict.metric in metrics and value is not None and limit is not None:
            low = is_lower_better(verdict.metric)
            lost, allowed = (value, limit) if low else (1 - value, 1 - limit)
            used.append((lost / allowed if allowed > 0 else 0.0, verdict.metric, limit))
    if not used:
        return (metrics[0] if metrics else ""), None
    _, metric, limit = max(used)
    return metric, limit


def _remarks(candidate: PrecisionTrial) -> list[str]:
    """Return the failures and the notes of a candidate."""
    remarks, kept = [*candidate.failures], candidate.excluded_layers
    if candidate.note:
        remarks.append(candidate.note)
    if kept:
        more = f" and {len(kept) - 3:,} more" if len(kept) > 3 else ""
        remarks.append(f"excluded: {', '.join(kept[:3])}{more}")
    return remarks
