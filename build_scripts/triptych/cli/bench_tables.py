"""What `bench` and its comparison found, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.bench.comparison import Change, Comparison
from triptych.bench.points import BenchResult, Cost, Point
from triptych.bench.verdict import bottleneck_of, headline, rates_say, verdict_of, warnings_of
from triptych.formatting import milliseconds, percent, rounded, signed_percent
from triptych.pipeline.slo import Slo
from triptych.report.load_figures import part_name
from triptych.report.load_tables import cost_entries, rival_of, times_as_fast

WIDEST = 100
STYLES = {"met": "green", "not met": "bold red", "better": "green", "worse": "red"}
_TIMES = ("p50_us", "p95_us", "p99_us")
_MOST_PARTS = 4
TOLD = ("better", "worse", "changed")


def print_bench(console: Console, result: BenchResult) -> None:
    """The verdict, every load, what holds the pipeline back, baselines, and cost."""
    verdict = verdict_of(result)
    _say(console, f"{result.subject.pipeline}: {verdict.word}", STYLES.get(verdict.kind, "bold"))
    _say(console, f"  {verdict.says}")
    if best := headline(result):
        _say(console, f"  {best}")
    if result.points:
        console.print(_points(result.points, result.slo), width=width(console))
    _print_budget(console, result.points)
    held = bottleneck_of(result.points)
    if held is not None:
        _say(console, f"Bottleneck: {held.kind}. {held.says}", "bold")
        if held.remedy:
            _say(console, f"  -> {held.remedy}")
    if result.baselines:
        console.print(_baselines(result), width=width(console))
    if result.rate is not None:
        _say(console, f"Highest rate: {result.rate.slo} {rates_say(result.rate)}")
    if result.cost is not None:
        print_cost(console, result.cost)
    _print_troubles(console, result)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What changed between two results, and whether it is more than noise."""
    _say(console, f"before: {comparison.before}")
    _say(console, f"after:  {comparison.after}")
    for warning in comparison.warnings:
        _say(console, f"warning: {warning}", "yellow")
    for name, (before, after) in comparison.differences.items():
        _say(console, f"  {name}: {before} -> {after}")
    table = _table(Text("Changes"), "", "before", "after", "change", "")
    for title, changes in _groups(comparison):
        table.add_section()
        table.add_row(Text(title, "bold"))
        for one in changes:
            grown = "-" if one.relative is None else signed_percent(one.relative)
            numbers = (f"  {one.name}", rounded(one.before), rounded(one.after), grown)
            table.add_row(*map(Text, numbers), Text(one.weight, STYLES.get(one.weight, "")))
    if table.row_count:
        console.print(table, width=width(console))
    for when, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        for name in names:
            _say(console, f"  only {when}: {name}")


def _groups(comparison: Comparison) -> list[tuple[str, Sequence[Change]]]:
    """Titles with their changes; of a step only those that are more than noise."""
    found: list[tuple[str, Sequence[Change]]] = []
    for pair in comparison.pairs:
        told = [one for one in pair.changes if not one.of_step or one.weight in TOLD]
        found.append((f"{pair.contender}, {pair.load}", told))
    return [*found, *([("Altogether", comparison.totals)] if comparison.totals else [])]


def print_cost(console: Console, cost: Cost) -> None:
    """In a line."""
    _say(console, "Cost: " + "; ".join(f"{k.lower()} {v}" for k, v in cost_entries(cost).items()))


def width(console: Console) -> int:
    """Columns of a table: the terminal's, up to `WIDEST`; that many where they are not known."""
    return min(console.width, WIDEST) if console.is_terminal else WIDEST


def _points(points: Sequence[Point], slo: Slo) -> Table:
    heads = ["load", "requests/s", *(f"{name.removesuffix('_us')} ms" for name in _TIMES)]
    table = _table(
        Text("Loads"), *heads, "errors", "stable", *(["SLO"] if not slo.is_empty else [])
    )
    for point in points:
        answered = point.median("requests") > 0
        times = [milliseconds(point.median(name)) if answered else "-" for name in _TIMES]
        told = [one.is_stable for one in point.rounds if one.is_stable is not None]
        stable = "-" if not told else "yes" if all(told) else "no"
        cells = [str(point.load), rounded(point.median("throughput_per_s")), *times]
        cells += [f"{sum(point.errors.values()):,}", stable]
        held = point.meets(slo)
        last = Text("holds" if held else "broken", "green" if held else "red")
        table.add_row(*map(Text, cells), *([] if slo.is_empty else [last]))
    return table


def _print_budget(console: Console, points: Sequence[Point]) -> None:
    """A request's mean time, its largest parts first, a line for each load."""
    told = [point for point in points if point.typical.parts]
    if told:
        _say(console, "Where a request's mean time goes", "bold")
    for point in told:
        parts = sorted(point.typical.parts, key=lambda part: -part.us)
        whole = sum(part.us for part in parts)
        if whole <= 0:
            continue
        words = [f"{part_name(p)} {percent(p.us / whole)}" for p in parts[:_MOST_PARTS] if p.us > 0]
        _say(console, f"  {point.load}: {milliseconds(whole)} ms: {', '.join(words)}")


def _baselines(result: BenchResult) -> Table:
    table = _table(
        Text("Baselines"), "contender", "load", "requests/s", "p50 ms", "p99 ms", "the pipeline is"
    )
    for other in result.baselines:
        times = (milliseconds(other.median(name)) for name in ("p50_us", "p99_us"))
        ratio = times_as_fast(rival_of(result.points, other), other)
        rate = rounded(other.median("throughput_per_s"))
        table.add_row(*map(Text, (other.contender, str(other.load), rate, *times, ratio)))
    return table


def _print_troubles(console: Console, result: BenchResult) -> None:
    every = (*result.points, *result.baselines, *(result.rate.points if result.rate else ()))
    for text in warnings_of(every):
        _say(console, f"warning: {text}", "yellow")
    found: dict[str, list[str]] = {}
    for point in every:
        for kind, count in point.errors.items():
            found.setdefault(kind, []).append(f"{point.contender}, {point.load}: {count:,}")
    for kind, places in found.items():
        _say(console, f"error: {kind} ({'; '.join(places)})", "red")


def _table(title: Text, *heads: str) -> Table:
    """The first column is a name, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table


def _say(console: Console, text: str, style: str = "") -> None:
    """A line in which nothing is markup, as names may hold what rich takes for it."""
    console.print(Text(text, style), highlight=False)
