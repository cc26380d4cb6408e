"""Results as a terminal shows them: trees, findings, what a build did, why a gate failed."""

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
from triptych.repository.records import Conversion, GateResult, PrecisionTrial

if TYPE_CHECKING:
    from triptych.building.build import Built


def print_finding(console: Console, finding: Mapping[str, str]) -> None:
    """A finding of `lint` or `doctor`."""
    style = {"error": "red", "warning": "yellow"}.get(finding["severity"], "")
    where = f" {finding['file']}" if finding["file"] else ""
    say(console, f"{finding['severity']}: {finding['id']}{where}", style)
    say(console, f"  {finding['rule']}. Given: {finding['given']}")
    if finding["remedy"]:
        say(console, f"  -> {finding['remedy']}")


def exit_with_findings(found: Sequence[Finding], as_json: bool) -> NoReturn:
    """Print what a check of files found, and end with its exit code."""
    findings = [finding.as_dict() for finding in found]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            print_finding(output, finding)
        output.print(f"{errors} errors, {len(findings) - errors} other findings", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


def exit_with_verdict(
    data: object, lines: Iterable[tuple[str, str]], *, passed: bool, as_json: bool
) -> NoReturn:
    """Print a verdict, as plain data or in lines with their styles, and end with its exit code."""
    if as_json:
        print_json(data)
    else:
        for line, style in lines:
            output.print(line, style=style, markup=False)
    raise typer.Exit(0 if passed else EXIT_FINDINGS)


def print_tree(console: Console, value: Mapping[str, object], indent: int = 0) -> None:
    """Nested plain data."""
    pad = "  " * indent
    for key, item in value.items():
        if isinstance(item, dict):
            say(console, f"{pad}{key}", "bold")
            print_tree(console, item, indent + 1)
        else:
            say(console, f"{pad}{key:22} {item}")


def print_built(console: Console, built: Built) -> None:
    """What a user should know of a build that is done."""
    gate = built.gate
    for note in gate.notes:
        say(console, f"  {note}")
    if gate.accepted:
        print_failed_gate(console, gate)
        say(console, f"  accepted although the accuracy gate failed: {gate.accepted}", "red")
    print_candidates(console, gate.candidates)
    if gate.conversion:
        _print_kept(console, gate.conversion)
    if built.unpacked:
        say(console, f"  built bucketed, not packed: {built.unpacked}", "yellow")
    for finding in built.findings:
        if finding.severity == "warning":
            print_finding(console, finding.as_dict())


def print_candidates(console: Console, candidates: Sequence[PrecisionTrial]) -> None:
    """What `auto` chose from: speed, size and the gate's figures of each precision."""
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
        ["kept in higher precision", *(str(len(one.kept)) for one in candidates)],
        *(line(metric, [one.get(metric) for one in verdicts], ".4g") for metric in verdicts[0]),
    ]
    print_table(console, "Precision", ["", *(one.precision for one in candidates)], rows)
    for one in candidates:
        for text in (*one.failures, one.note):
            if text:
                say(console, f"  {one.precision}: {text}")


def _print_kept(console: Console, conversion: Conversion) -> None:
    """Which layers stayed as they were for accuracy, and what that costs in time."""
    errors = conversion.layer_errors
    # What a converter keeps by itself, as the nodes of fp16, costs nothing that was looked for.
    kept = [name for name in conversion.kept if name in errors]
    if not kept:
        return
    say(console, f"  {len(kept)} of {len(errors)} layers kept in higher precision:")
    for name in sorted(kept, key=lambda name: -errors[name]):
        say(console, f"    {name}: alone an error of {errors[name]:.1e}")
    times = ", ".join(f"{name} {time:.1f} ms" for name, time in conversion.batch_ms.items())
    if times:
        say(console, f"  a batch takes, on one thread: {times}")


def print_failed_gate(console: Console, gate: GateResult) -> None:
    """What of a gate (or of its plain data) failed, and the rows furthest from the reference."""
    probe = () if gate.probe is None else gate.probe.verdicts
    named = [(verdict.metric, verdict) for verdict in gate.verdicts]
    named += [(f"{verdict.metric}, outside your traffic", verdict) for verdict in probe]
    failed = [
        (name, _number(verdict.value), _number(verdict.limit))
        for name, verdict in named
        if not verdict.passed
    ]
    columns = ["metric", "measured", "limit"]
    print_table(console, "What failed", columns, failed, text_columns=range(3))
    for failure in gate.failures:
        say(console, f"  {failure}")
    worst = [
        (row.shown, _number(row.badness), _number(row.difference), row.wanted, row.got)
        for row in (*gate.worst, *(() if gate.probe is None else gate.probe.worst))
    ]
    columns = ["row", "wrong by", "differs by", "reference", "artifact"]
    print_table(console, "Worst rows", columns, worst, text_columns=range(5))


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and isfinite(value) else "not a number"
