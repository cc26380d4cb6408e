"""The report's sections on precision: layers kept, their ranges, and the candidates of `auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from triptych.formatting import NOTHING, amount, code, figure, number, plain, shown
from triptych.report import gate_plots as plots
from triptych.report.gate_metric import better
from triptych.report.html import PROSE, figure_of, section, table

MOST_KEPT = 40
Status = Literal["chosen", "passed", "failed"]


def layers(gate: Mapping[str, Any]) -> str:
    """What stays in higher precision, why, and how large the values get; "" without conversion."""
    conversion = gate.get("conversion") or {}
    found = plots.finite(conversion.get("ranges") or {})
    kept = list(conversion.get("kept") or ())
    names = list(conversion.get("layers") or ())
    if not (found or kept or names):
        return ""
    precision = str(gate.get("precision"))
    said = f"{len(kept):,} of {amount(len(names), 'layer')} kept in higher precision than "
    chart = ""
    if found:
        svg = plots.ranges(found, kept, fp16=precision == "fp16")
        chart = figure_of(svg, _ranges_caption(found, kept))
    words = f"<p>{said}{plain(precision)}.</p>"
    reasons = conversion.get("reasons") or {}
    parts = f'<div class="pair"><div>{words}{_kept_table(kept, reasons, found)}</div>{chart}</div>'
    return section("Layers", parts)


def tried(gate: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> str:
    """What `precision: auto` tried, measured and chose; "" where it was not asked."""
    if not candidates:
        return ""
    return section(
        "Candidates",
        "<p>Each precision that this backend and device can run, held to the gate; "
        "of those that pass, the fastest is chosen.</p>",
        _candidate_table(candidates),
        f'<div class="pair">{_scatter(gate, candidates)}{_remarks(candidates)}</div>',
    )


def _ranges_caption(found: Mapping[str, float], kept: Sequence[str]) -> str:
    drawn = plots.charted(found, kept)
    head = plots.common_head(drawn)
    words = ["Largest magnitude that calibration rows showed; kept layers are marked."]
    if len(drawn) < len(found):
        words.append(f"{len(drawn)} of {len(found):,}: the kept ones and the largest.")
    if head:
        words.append(f"Names without their common start {code(head.rstrip('./'))}.")
    return " ".join(words)


def _kept_table(kept: Sequence[str], reasons: Mapping[str, Any], found: Mapping[str, float]) -> str:
    if not kept:
        return ""
    rows = [
        f"<tr><td>{code(name)}"
        + (f'<span class="says">{shown(reasons[name], PROSE)}</span>' if name in reasons else "")
        + f'</td><td class="n">{figure(found.get(name), 1)}</td></tr>'
        for name in kept[:MOST_KEPT]
    ]
    left_out = len(kept) - MOST_KEPT
    if left_out > 0:
        more = f"and {left_out:,} more, in gate.json"
        rows.append(f'<tr><td colspan="2" class="quiet">{more}</td></tr>')
    return table("kept", "Kept layers", ["Kept layer", '<span class="n">Range</span>'], rows)


def _status(candidate: Mapping[str, Any]) -> str:
    return str(candidate.get("status") or "not run")


def _candidate_table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """Candidates side by side, a metric a row: names are long and candidates are few."""
    heads = ['<span class="hidden">Measure</span>', *(_head(each) for each in candidates)]
    speeds = [number(each.get("throughput_per_s")) for each in candidates]
    base = dict(zip((each.get("precision") for each in candidates), speeds, strict=True))
    slow = base.get("fp32")
    lines = {
        "Per second": [figure(speed, 1) for speed in speeds],
        "Times fp32": [_times(speed, slow) for speed in speeds] if slow else [],
        "p99, ms": [figure(each.get("p99_ms"), 1) for each in candidates],
        "Size, MB": [figure(_scaled(each.get("size_bytes"), 1e-6), 1) for each in candidates],
        "Layers kept": [_count_kept(each) for each in candidates],
    }
    for metric in _metrics(candidates):
        lines[code(metric)] = [figure(_verdicts(each).get(metric)) for each in candidates]
    chosen = [_status(each) == "chosen" for each in candidates]
    rows = [_row(name, cells, chosen) for name, cells in lines.items() if cells]
    return table("candidates", "Candidates", heads, rows)


def _head(candidate: Mapping[str, Any]) -> str:
    status = _status(candidate)
    kind = status if status in ("chosen", "passed", "failed") else "idle"
    return f'{shown(candidate.get("precision"))}<span class="status {kind}">{plain(status)}</span>'


def _row(head: str, cells: Sequence[str], chosen: Sequence[bool]) -> str:
    body = "".join(
        f'<td class="n{" chosen" if bold else ""}">{cell}</td>'
        for cell, bold in zip(cells, chosen, strict=True)
    )
    return f'<tr><th scope="row">{head}</th>{body}</tr>'


def _verdicts(candidate: Mapping[str, Any]) -> Mapping[str, Any]:
    return candidate.get("verdicts") or {}


def _times(speed: float | None, slow: float) -> str:
    return "—" if speed is None else f"{speed / slow:.2f}"


def _count_kept(candidate: Mapping[str, Any]) -> str:
    kept = candidate.get("kept")
    return NOTHING if kept is None else f"{len(kept):,}"


def _scaled(value: Any, factor: float) -> float | None:
    given = number(value)
    return None if given is None else given * factor


def _metrics(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every metric of any candidate, in the order of their first appearance."""
    return list(dict.fromkeys(metric for c in candidates for metric in _verdicts(c)))


def _scatter(gate: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> str:
    metric, limit = _tightest(gate, _metrics(candidates))
    points, missing = [], []
    for candidate in candidates:
        x = number(_verdicts(candidate).get(metric))
        y = number(candidate.get("throughput_per_s"))
        name, status = str(candidate.get("precision")), _status(candidate)
        if x is None or y is None or status not in ("chosen", "passed", "failed"):
            missing.append(name)
        else:
            points.append(plots.Point(name, cast(Status, status), x, max(y, 0.0)))
    if not points:
        return ""
    higher = better(metric) != "lower"
    words = [f"Throughput over {code(metric)}, the metric with the least to spare."]
    if limit is not None:
        words.append(f"Dashed: the limit of {plain(gate.get('precision'))}, {figure(limit)}.")
    if missing:
        words.append(f"Not measured: {plain(', '.join(missing))}.")
    return figure_of(plots.candidates(points, metric, limit, higher=higher), " ".join(words))


def _tightest(gate: Mapping[str, Any], metrics: Sequence[str]) -> tuple[str, float | None]:
    """The metric of the gate that is nearest to its limit, and that limit."""
    used: list[tuple[float, str, float]] = []
    for verdict in gate.get("verdicts") or ():
        metric = verdict["metric"]
        value, limit = number(verdict["value"]), number(verdict["limit"])
        if metric in metrics and value is not None and limit is not None:
            lost, allowed = (value, limit) if better(metric) == "lower" else (1 - value, 1 - limit)
            used.append((lost / allowed if allowed > 0 else 0.0, metric, limit))
    if not used:
        return (metrics[0] if metrics else ""), None
    _, metric, limit = max(used)
    return metric, limit


def _remarks(candidates: Sequence[Mapping[str, Any]]) -> str:
    """What failed and what else is to say, candidate by candidate."""
    body = ""
    for candidate in candidates:
        said = [*(candidate.get("failures") or ())]
        if candidate.get("note"):
            said.append(candidate["note"])
        kept = candidate.get("kept") or []
        if kept:
            few = ", ".join(str(name) for name in kept[:3])
            said.append(f"kept: {few}" + (f" and {len(kept) - 3:,} more" if len(kept) > 3 else ""))
        if said:
            words = "".join(f"<dd>{shown(sentence, PROSE)}</dd>" for sentence in said)
            body += f"<div><dt>{shown(candidate.get('precision'))}</dt>{words}</div>"
    return f'<dl class="remarks">{body}</dl>' if body else ""
