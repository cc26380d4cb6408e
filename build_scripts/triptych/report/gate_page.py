"""The report's page: what a gate found, from the verdict down to where the numbers come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.formatting import (
    NOTHING,
    amount,
    code,
    figure,
    figures,
    number,
    plain,
    shown,
)
from triptych.report import gate_plots as plots
from triptych.report.gate_metric import better, says
from triptych.report.gate_precision import layers, tried
from triptych.report.html import PROSE, document, facts, figure_of, listed, section, table

STYLE = Path(__file__).with_name("gate.css")

RESULT = 120
"""Characters of a decoded result that are shown."""

NOT_FINITE = "not finite"

_SIGN = {"higher": "≥", "lower": "≤", "": ""}


def page(gate: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; arguments as `write_report` takes them, with None for what is not finite."""
    word = _outcome(gate)[1]
    title = f"{gate.get('pipeline')}, {gate.get('precision')}: {word.lower()}"
    body = "".join(
        (
            _header(gate),
            f'<div class="pair">{_limits(gate)}{_differences(gate)}</div>',
            _labelled(gate),
            layers(gate),
            tried(gate, candidates),
            _worst(gate),
            section("Notes", listed("notes", _notes(gate))),
            _provenance(gate),
        )
    )
    return document(title, body, STYLE)


def _outcome(gate: Mapping[str, Any]) -> tuple[str, str]:
    """The kind and the word of the verdict: passed only where nothing at all says otherwise."""
    good = (
        gate.get("failures") in ([], ())
        and gate.get("finite") is True
        and bool(gate.get("verdicts"))
        and all(verdict["passed"] is True for verdict in gate["verdicts"])
        and not (gate.get("labelled") or {}).get("failure")
    )
    if good:
        return "passed", "Passed"
    if gate.get("accepted"):
        return "accepted", "Accepted in spite of failure"
    return "failed", "FAILED"


def _header(gate: Mapping[str, Any]) -> str:
    kind, word = _outcome(gate)
    kept = (gate.get("conversion") or {}).get("kept")
    entries = {
        "Task": plain(gate.get("task") or NOTHING),
        "Precision": plain(gate.get("precision") or NOTHING),
        "Rows compared": _count(gate.get("rows")),
        "Generated edge rows": _count(gate.get("edge_rows")),
        "Outputs": "all finite" if gate.get("finite") else '<span class="bad">not finite</span>',
        "Layers kept": NOTHING if kept is None else _count(len(kept)),
    }
    reason = ""
    if gate.get("accepted"):
        unused = " (not needed: the gate passed)" if kind == "passed" else ""
        reason = f"<p>Accepted{unused} because: “{shown(gate['accepted'], PROSE)}”</p>"
    return (
        f'<header><p class="eyebrow">Accuracy gate</p><h1>{shown(gate.get("pipeline"))}</h1>'
        f'<div class="verdict {kind}"><p class="word">{word}</p><p>{_sentence(gate)}</p>{reason}'
        f"{listed('failures', _failures(gate))}</div>{facts('facts', entries)}</header>"
    )


def _failures(gate: Mapping[str, Any]) -> list[Any]:
    failures = list(gate.get("failures") or ())
    of_labels = (gate.get("labelled") or {}).get("failure")
    return failures if not of_labels or of_labels in failures else [*failures, of_labels]


def _sentence(gate: Mapping[str, Any]) -> str:
    bound = [verdict for verdict in gate.get("verdicts") or () if verdict["limit"] is not None]
    held = sum(verdict["passed"] is True for verdict in bound)
    if not bound:
        return "No limit was checked."
    share = f"All {len(bound)} limits hold"
    if held < len(bound):
        share = f"{len(bound) - held} of {len(bound)} limits do not hold"
    return f"{share} against the reference, the model in PyTorch fp32."


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else NOTHING


def _finite(value: Any) -> str:
    return NOT_FINITE if number(value) is None else figure(value)


def _limits(gate: Mapping[str, Any]) -> str:
    rows = [_verdict(verdict) for verdict in gate.get("verdicts") or ()]
    if not rows:
        return section("Limits", '<p class="quiet">Nothing was measured.</p>')
    numbers = ['<span class="n">Value</span>', '<span class="n">Limit</span>']
    return section("Limits", table("limits", "Limits", ["Metric", *numbers, "Result"], rows))


def _verdict(verdict: Mapping[str, Any]) -> str:
    metric, limit = str(verdict["metric"]), verdict["limit"]
    value, bound = figures(verdict["value"], limit)
    if number(verdict["value"]) is None:
        value = NOT_FINITE
    if limit is None:
        bound, result = NOTHING, '<span class="quiet">no limit</span>'
    else:
        bound = f"{_SIGN[better(metric)]}\N{NO-BREAK SPACE}{bound}".strip()
        result = '<span class="good">✓ pass</span>'
    failed = verdict["passed"] is not True
    if failed:
        result = '<span class="bad">✗ fail</span>'
    words = f'<span class="says">{plain(says(metric))}</span>' if says(metric) else ""
    return (
        f'<tr{" class=failed" if failed else ""}><th scope="row">{code(metric)}{words}</th>'
        f'<td class="n">{value}</td><td class="n">{bound}</td><td>{result}</td></tr>'
    )


def _differences(gate: Mapping[str, Any]) -> str:
    given = gate.get("row_differences") or ()
    values = sorted(max(v, 0.0) for each in given if (v := number(each)) is not None)
    lost = len(given) - len(values)
    words = []
    if lost:
        words.append(f'<span class="bad">{amount(lost, "row")} not finite</span>, not drawn.')
    if not values:
        body = " ".join(words) or "No row was compared."
        return section("Differences", f'<p class="quiet">{body}</p>')
    of_difference = [v for v in gate.get("verdicts") or () if v["metric"] == "max_difference"]
    limit = number(of_difference[0]["limit"]) if of_difference else None
    half, most = values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)]
    words.insert(
        0,
        "Largest difference of each row from the reference, logarithmic. "
        f"Half are up to {figure(half)}, 99 % up to {figure(most)}.",
    )
    if limit is None:
        words.append("No limit is set on them.")
    return section("Differences", figure_of(plots.differences(values, limit), " ".join(words)))


def _labelled(gate: Mapping[str, Any]) -> str:
    found = gate.get("labelled")
    if not found:
        return ""
    entries = {
        "Metric": code(found.get("metric")),
        "Labelled rows": _count(found.get("rows")),
        "Reference": figure(found.get("reference")),
        "Candidate": figure(found.get("candidate")),
    }
    ends = [number(found.get(key)) for key in ("difference", "low", "high", "max_drop")]
    chart = f'<p class="quiet">The difference cannot be drawn: {NOTHING}.</p>'
    if None not in ends:
        svg = plots.interval(*(end for end in ends if end is not None))
        chart = figure_of(
            svg,
            "Point: the difference; line: its 95 % confidence interval. It fails where the whole "
            "interval is a loss.",
        )
    failure = found.get("failure")
    words = f"<p>{_labelled_words(found)}</p>"
    if failure:
        words += f'<p class="bad">✗ {shown(failure, PROSE)}</p>'
    parts = f'<div class="pair"><div>{facts("facts small", entries)}{words}</div>{chart}</div>'
    return section("Labelled rows", parts)


def _labelled_words(found: Mapping[str, Any]) -> str:
    drop, visible = number(found.get("max_drop")), number(found.get("smallest_visible_drop"))
    words = [f"A drop of up to {figure(drop)} is allowed." if drop else "No drop is allowed."]
    if visible is not None:
        words.append(f"This many rows show a drop of {figure(visible)} or more as one.")
    return " ".join(words)


def _worst(gate: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><td data-name="Input" class="text">{shown(row.get("shown"))}</td>'
        f'<td data-name="Reference" class="text">{shown(row.get("wanted"), RESULT)}</td>'
        f'<td data-name="Candidate" class="text">{shown(row.get("got"), RESULT)}</td>'
        f'<td data-name="Badness" class="n">{_finite(row.get("badness"))}</td>'
        f'<td data-name="Difference" class="n">{_finite(row.get("difference"))}</td></tr>'
        for row in gate.get("worst") or ()
    ]
    if not rows:
        return ""
    numbers = ['<span class="n">Badness</span>', '<span class="n">Difference</span>']
    return section(
        "Worst rows",
        "<p>Badness is the task's own measure, 0 where the answer is right and on generated rows; "
        "difference is that of the core's numbers.</p>",
        table("worst", "Worst rows", ["Input", "Reference", "Candidate", *numbers], rows),
    )


def _notes(gate: Mapping[str, Any]) -> list[Any]:
    return [*(gate.get("notes") or ()), *((gate.get("conversion") or {}).get("notes") or ())]


def _provenance(gate: Mapping[str, Any]) -> str:
    names = ("pipeline", "task", "architecture", "layout", "precision")
    entries = {name.capitalize(): shown(gate.get(name)) for name in names}
    entries |= {str(name): shown(given) for name, given in (gate.get("versions") or {}).items()}
    return section("Provenance", facts("provenance", entries))
