"""Terminal output of trees, findings, builds and accuracy gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from triptych.base.errors import Finding
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    output,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from triptych.building.build import BuildOutcome
    from triptych.repository.records import Conversion, GateResult, PrecisionTrial


def print_finding(console: Console, finding: Mapping[str, str]) -> None:
    """Print a finding of `lint` or `doctor`."""
    style = {"error": "red", "warning": "yellow"}.get(finding["severity"], "")
    where = f" {finding['file']}" if finding["file"] else ""
    say(console, f"{finding['severity']}: {finding['id']}{where}", style)
    say(console, f"  {finding['rule']}. Given: {finding['given']}")
    if finding["remedy"]:
        say(console, f"  -> {finding['remedy']}")


def exit_with_findings(results: Sequence[Finding], as_json: bool) -> NoReturn:
    """Print the findings of a check, and exit with its code."""
    findings = [finding.as_dict() for finding in results]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            print_finding(output, finding)
        output.print(f"{errors} errors, {len(findings) - errors} other findings", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines with their styles."""
    for line, style in lines:
        output.print(line, style=style, markup=False)


def exit_with_verdict(
    data: object, lines: Iterable[tuple[str, str]], *, passed: bool, as_json: bool
) -> NoReturn:
    """Print a verdict, as JSON or as lines with their styles, and exit with its code."""
    if as_json:
        print_json(data)
    else:
        print_lines(lines)
    raise typer.Exit(0 if passed else EXIT_FINDINGS)


def print_tree(console: Console, value: Mapping[str, object], indent: int = 0) -> None:
    """Print nested plain data."""
    pad = "  " * indent
    for key, item in value.items():
        if isinstance(item, dict):
            say(console, f"{pad}{key}", "bold")
            print_tree(console, item, indent + 1)
        else:
            say(console, f"{pad}{key:22} {item}")


def print_built(console: Console, built: BuildOutcome) -> None:
    """Print notes, warnings and the chosen precision of a build."""
    gate = built.gate
    for note in gate.notes:
        say(console, f"  {note}")
    if gate.accepted:
        print_failed_gate(console, gate)
        say(console, f"  accepted despite the failed accuracy gate: {gate.accepted}", "red")
    print_candidates(console, gate.candidates)
    if gate.conversion:
        _print_excluded_layers(console, gate.conversion)
    if built.not_packed_reason:
        say(console, f"  built bucketed, not packed: {built.not_packed_reason}", "yellow")
    if built.attention:
        say(console, f"  attention: {built.attention}")
    for finding in built.findings:
        if finding.severity == "warning":
            print_finding(console, finding.as_dict())


def print_candidates(console: Console, candidates: Sequence[PrecisionTrial]) -> None:
    """Print speed, size and gate metrics of each precision that `auto` compared."""
    if not candidates:
        return

    def line(label: str, values: Sequence[float | None], form: str) -> list[str]:
        return [label, *("-" if value is None else format(value, form) for value in values)]

    sizes = [None if one.size_bytes is None else one.size_bytes / 1e6 for one in candidates]
    verdicts = [one.verdicts or {} for one in candidates]
    rows = [
        ["", *(one.status for one in candidates)],
        line("requests/s", [one.throughput_per_s for one in candidates], ".0f"),
        line("p99 ms", [one.p99_ms for one in candidates], ".0f"),
        line("MB", sizes, ".1f"),
        ["layers excluded", *(str(len(one.excluded_layers)) for one in candidates)],
        *(line(metric, [one.get(metric) for one in verdicts], ".4g") for metric in verdicts[0]),
    ]
    print_table(console, "Precision", ["", *(one.label for one in candidates)], rows)
    for one in candidates:
        for text in (*one.failures, one.note):
            if text:
                say(console, f"  {one.label}: {text}")


def _print_excluded_layers(console: Console, conversion: Conversion) -> None:
    """Print the layers that stay in higher precision for accuracy, and their cost in time."""
    errors = conversion.layer_errors
    # Layers without an error were excluded by the converter itself, not by the search.
    kept = [name for name in conversion.excluded_layers if name in errors]
    if not kept:
        return
    say(console, f"  {len(kept)} of {len(errors)} layers stay in higher precision:")
    for name in sorted(kept, key=lambda name: -errors[name]):
        say(console, f"    {name}: error {errors[name]:.1e} if converted alone")
    times = ", ".join(f"{name} {time:.1f} ms" for name, time in conversion.batch_ms.items())
    if times:
        say(console, f"  time of a batch on one thread: {times}")


def print_failed_gate(console: Console, gate: GateResult) -> None:
    """Print the failed metrics of a gate, and the rows with the largest errors."""
    probe = () if gate.probe is None else gate.probe.verdicts
    named = [(verdict.metric, verdict) for verdict in gate.verdicts]
    named += [(f"{verdict.metric}, outside your traffic", verdict) for verdict in probe]
    failed = [
        (name, _number(verdict.value), _number(verdict.limit))
        for name, verdict in named
        if not verdict.passed
    ]
    columns = ["metric", "measured", "limit"]
    print_table(console, "Failed metrics", columns, failed, text_columns=range(3))
    for failure in gate.failures:
        say(console, f"  {failure}")
    worst = [
        (row.preview, _number(row.row_error), _number(row.difference), row.expected, row.actual)
        for row in (*gate.worst, *(() if gate.probe is None else gate.probe.worst))
    ]
    columns = ["row", "row error", "difference", "reference", "artifact"]
    print_table(console, "Rows with the largest errors", columns, worst, text_columns=range(5))


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and isfinite(value) else "not a number"
