"""Results as a terminal shows them: trees, findings, what a build did, why a gate failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from triptych.build import Built

NARROWEST = 100
"""Columns of a table where the terminal's width is not known, or less."""


def print_finding(console: Console, finding: Mapping[str, str]) -> None:
    """A finding of `lint` or `doctor`."""
    style = {"error": "red", "warning": "yellow"}.get(finding["severity"], "")
    where = f" {finding['file']}" if finding["file"] else ""
    console.print(f"{finding['severity']}: {finding['id']}{where}", style=style, markup=False)
    console.print(f"  {finding['rule']}. Given: {finding['given']}", markup=False)
    if finding["remedy"]:
        console.print(f"  -> {finding['remedy']}", markup=False)


def print_tree(console: Console, value: Mapping[str, Any], indent: int = 0) -> None:
    """Nested plain data."""
    pad = "  " * indent
    for key, item in value.items():
        if isinstance(item, dict):
            console.print(f"{pad}{key}", style="bold", markup=False)
            print_tree(console, item, indent + 1)
        else:
            console.print(f"{pad}{key:22} {item}", markup=False)


def print_built(console: Console, built: Built) -> None:
    """What a user should know of a build that is done."""
    for note in built.gate["notes"]:
        console.print(f"  {note}", markup=False)
    if built.gate.get("accepted"):
        print_failed_gate(console, built.gate)
        console.print(
            f"  accepted although the accuracy gate failed: {built.gate['accepted']}",
            style="red",
            markup=False,
        )
    print_candidates(console, built.gate.get("candidates", ()))
    _print_kept(console, built.gate.get("conversion") or {})
    if built.unpacked:
        console.print(
            f"  built bucketed, not packed: {built.unpacked}", style="yellow", markup=False
        )
    for finding in built.findings:
        if finding.severity == "warning":
            print_finding(console, finding.as_dict())


def print_candidates(console: Console, candidates: Sequence[Mapping[str, Any]]) -> None:
    """What `auto` chose from: speed, size and the gate's figures of each precision.

    Args:
        console: to print to.
        candidates: `Candidate.as_dict()` each.
    """
    if not candidates:
        return
    metrics = [name for one in candidates[:1] for name in one["verdicts"] or ()]
    table = Table(title="Precision", title_justify="left")
    table.add_column("")
    for one in candidates:
        table.add_column(one["precision"], justify="right")
    table.add_row("", *(one["status"] for one in candidates))
    for name, label in (("throughput_per_s", "requests/s"), ("p99_ms", "p99 ms")):
        rates = (one[name] for one in candidates)
        table.add_row(label, *("-" if rate is None else f"{rate:.0f}" for rate in rates))
    sizes = (one["size_bytes"] for one in candidates)
    table.add_row("MB", *("-" if size is None else f"{size / 1e6:.1f}" for size in sizes))
    table.add_row("kept in higher precision", *(str(len(one["kept"])) for one in candidates))
    for metric in metrics:
        values = ((one["verdicts"] or {}).get(metric) for one in candidates)
        table.add_row(metric, *("-" if value is None else f"{value:.4g}" for value in values))
    console.print(table, width=max(console.width, NARROWEST))
    for one in candidates:
        for line in (*one["failures"], one["note"]):
            if line:
                console.print(f"  {one['precision']}: {line}", markup=False)


def _print_kept(console: Console, conversion: Mapping[str, Any]) -> None:
    """Which layers stayed as they were for accuracy, and what that costs in time."""
    layer_errors = conversion.get("layer_errors", {})
    # What a converter keeps by itself, as the nodes of fp16, costs nothing that was looked for.
    kept = [name for name in conversion.get("kept", ()) if name in layer_errors]
    if not kept:
        return
    console.print(
        f"  {len(kept)} of {len(layer_errors)} layers kept in higher precision:", markup=False
    )
    for name in sorted(kept, key=lambda name: -layer_errors[name]):
        console.print(f"    {name}: alone an error of {layer_errors[name]:.1e}", markup=False)
    times = conversion.get("batch_ms")
    if times:
        line = ", ".join(f"{name} {time:.1f} ms" for name, time in times.items())
        console.print(f"  a batch takes, on one thread: {line}", markup=False)


def print_failed_gate(console: Console, gate: Mapping[str, Any]) -> None:
    """What of a gate failed, and the rows that are furthest from the reference.

    Args:
        console: to print to.
        gate: `GateResult.as_dict()`.
    """
    width = max(console.width, NARROWEST)
    failed = Table(title="What failed", title_justify="left")
    for name in ("metric", "measured", "limit"):
        failed.add_column(name)
    for verdict in gate["verdicts"]:
        if not verdict["passed"]:
            measured, limit = _number(verdict["value"]), _number(verdict["limit"])
            failed.add_row(verdict["metric"], measured, limit)
    if failed.row_count:
        console.print(failed, width=width)
    for failure in gate["failures"]:
        console.print(f"  {failure}", markup=False)
    worst = Table(title="Worst rows", title_justify="left")
    for name in ("row", "wrong by", "differs by", "reference", "artifact"):
        worst.add_column(name)
    for row in gate["worst"]:
        numbers = _number(row["badness"]), _number(row["difference"])
        # As text objects: a row may hold what rich takes for markup.
        worst.add_row(*map(Text, (row["shown"], *numbers, row["wanted"], row["got"])))
    if worst.row_count:
        console.print(worst, width=width)


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4g}"
