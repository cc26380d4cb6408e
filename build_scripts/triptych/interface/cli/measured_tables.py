"""Terminal output of `bench`, `bench-diff` and `tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from triptych.base.confidence import CONFIDENCE
from triptych.base.formatting import amount, milliseconds, percent, rounded
from triptych.interface.cli.options import (
    STYLES,
    Row,
    print_table,
    say,
)
from triptych.interface.report.bench import cost_entries, part_name, samples
from triptych.interface.report.tune import before_and_after, gained, grown, verdict_word
from triptych.operate.tune.results import TuneResult
from triptych.serving.bench.comparison import BenchComparison, MetricChange
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    LoadPoint,
    collect_warnings,
    find_limiting_bottleneck,
    format_headline,
    format_rates,
    judge_slo,
)
from triptych.spec.slo import MOMENTS, AnySlo

_TIMES = ("p50_us", "p95_us", "p99_us")
_SHOWN = ("p50", "p95", "p99")
_MAX_PARTS = 4
_MORE_THAN_NOISE = ("better", "worse", "changed")


def print_bench(console: Console, result: BenchResult) -> None:
    """Print the verdict, all loads, the bottleneck and cost."""
    verdict = judge_slo(result)
    say(console, f"{result.subject.pipeline}: {verdict.word}", STYLES.get(verdict.kind, "bold"))
    say(console, f"  {verdict.explanation}")
    if best := format_headline(result):
        say(console, f"  {best}")
    _print_points(console, result.points, result.slo)
    if result.points:
        say(console, f"{amount(max(len(p.rounds) for p in result.points), 'round')} of each load")
    _print_tokens(console, result.points)
    _print_budget(console, result.points)
    bottleneck = find_limiting_bottleneck(result.points)
    if bottleneck is not None:
        say(console, f"Bottleneck: {bottleneck.kind}. {bottleneck.explanation}", "bold")
        if bottleneck.remedy:
            say(console, f"  -> {bottleneck.remedy}")
    if result.rate is not None:
        say(console, f"Highest rate: {result.rate.slo} {format_rates(result.rate)}")
    if result.cost is not None:
        print_cost(console, result.cost)
    _print_errors_and_warnings(console, result)


def print_comparison(console: Console, comparison: BenchComparison) -> None:
    """Print the differences of two results, and whether they exceed noise."""
    say(console, f"before: {comparison.before}")
    say(console, f"after:  {comparison.after}")
    for warning in comparison.warnings:
        say(console, f"warning: {warning}", "yellow")
    for name, (before, after) in comparison.differences.items():
        say(console, f"  {name}: {before} -> {after}")
    rows: list[Row | None] = []
    for title, changes in _groups(comparison):
        rows += [None, [Text(title, "bold")]]
        for one in changes:
            change = "-" if one.ratio is None else one.ratio.brief
            weight = Text(one.weight, STYLES.get(one.weight, ""))
            rows.append([f"  {one.name}", rounded(one.before), rounded(one.after), change, weight])
    heads = ("", "before", "after", f"times, {100 * CONFIDENCE:g} % confidence", "")
    print_table(console, "Changes", heads, rows)
    say(console, "A change of the machine between the two measurements is not covered.")
    say(console, "  -> `triptych shadow` measures two builds in turns.")
    for when, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        for name in names:
            say(console, f"  only {when}: {name}")


def _groups(comparison: BenchComparison) -> list[tuple[str, Sequence[MetricChange]]]:
    """Return titles with their changes; for steps, only changes beyond noise."""
    groups: list[tuple[str, Sequence[MetricChange]]] = []
    for pair in comparison.pairs:
        changes = [
            change
            for change in pair.changes
            if not change.of_step or change.weight in _MORE_THAN_NOISE
        ]
        groups.append((str(pair.load), changes))
    return [*groups, *([("Total", comparison.totals)] if comparison.totals else [])]


def print_cost(console: Console, cost: Cost) -> None:
    """Print the cost in one line."""
    say(console, "Cost: " + "; ".join(f"{k.lower()} {v}" for k, v in cost_entries(cost).items()))


def _print_points(console: Console, points: Sequence[LoadPoint], slo: AnySlo) -> None:
    heads = ["load", "requests/s", *(f"{name.removesuffix('_us')} ms" for name in _TIMES)]
    heads += ["errors", "stable", *(["SLO"] if not slo.is_empty else [])]
    rows = []
    for point in points:
        answered = point.median("requests") > 0
        stable = [one.is_stable for one in point.rounds if one.is_stable is not None]
        row: list[str | Text] = [
            point.load_text,
            rounded(point.median("throughput_per_s")),
            *(milliseconds(point.median(name)) if answered else "-" for name in _TIMES),
            f"{sum(point.errors.values()):,}",
            "-" if not stable else "yes" if all(stable) else "no",
        ]
        if not slo.is_empty:
            state = point.judge(slo)
            row.append(Text(state, {"met": "green", "missed": "red"}.get(state, "yellow")))
        rows.append(row)
    print_table(console, "Loads", heads, rows)


def _print_tokens(console: Console, points: Sequence[LoadPoint]) -> None:
    """Print the metrics of streamed answers; `n` is the number of samples of the percentiles."""
    heads = ("load", "tokens/s", "goodput/s", "", *(f"{name} ms" for name in _SHOWN), "n")
    rows: list[Row | None] = []
    for point in points:
        if not point.streamed:
            continue
        first = [
            str(point.load),
            *(rounded(point.median(name)) for name in ("tokens_per_s", "goodput_per_s")),
        ]
        for moment in MOMENTS:
            times = (point.latencies_us[f"{moment}_{name}"] for name in _SHOWN)
            count = f"{samples(point, moment):,}"
            rows.append([*first, moment, *map(milliseconds, times), count])
            first = ["", "", ""]
    if rows:
        print_table(console, "Tokens", heads, rows, text_columns=(0, 3))


def _print_budget(console: Console, points: Sequence[LoadPoint]) -> None:
    """Print the parts of a request's mean time, largest first, with a line for each load."""
    measured = [point for point in points if point.typical.parts]
    if measured:
        say(console, "Mean time of a request", "bold")
    for point in measured:
        parts = sorted(point.typical.parts, key=lambda part: -part.us)
        whole = sum(part.us for part in parts)
        if whole <= 0:
            continue
        words = [f"{part_name(p)} {percent(p.us / whole)}" for p in parts[:_MAX_PARTS] if p.us > 0]
        say(console, f"  {point.load}: {milliseconds(whole)} ms: {', '.join(words)}")


def _print_errors_and_warnings(console: Console, result: BenchResult) -> None:
    every = (*result.points, *(result.rate.points if result.rate else ()))
    for text in collect_warnings(every):
        say(console, f"warning: {text}", "yellow")
    errors: dict[str, list[str]] = {}
    for point in every:
        for kind, count in point.errors.items():
            errors.setdefault(kind, []).append(f"{point.load}: {count:,}")
    for kind, loads in errors.items():
        say(console, f"error: {kind} ({'; '.join(loads)})", "red")


def print_tuned(console: Console, result: TuneResult) -> None:
    """Print the verdict, all trials, values before and after, and further advice."""
    style = STYLES.get(result.slo_kind, "bold")
    say(console, f"{result.subject.pipeline}: {verdict_word(result)}", style)
    say(console, f"  {result.verdict}")
    say(console, f"  maximized: {result.objective}")
    trials = [
        (
            str(one.number),
            _written(one.change),
            rounded(one.score),
            rounded(one.against),
            gained(one),
            Text.assemble((one.verdict, STYLES.get(one.verdict, "")), f": {one.says}"),
        )
        for one in result.trials
    ]
    heads = ("", "change", "score", "against", "gain", "verdict")
    print_table(console, "Trials", heads, trials, text_columns=(1, 5))
    changes = [
        (name, rounded(old), rounded(new), grown(old, new))
        for name, (old, new) in before_and_after(result).items()
    ]
    print_table(console, "Before and after", ("", "before", "after", "change"), changes)
    say(console, f"Settings: {_written(result.winner.overrides) or 'as before'}")
    bottleneck = result.winner.bottleneck
    say(console, f"Bottleneck: {bottleneck.kind}. {bottleneck.explanation}")
    if result.winner.cost is not None:
        print_cost(console, result.winner.cost)
    for text in result.advice:
        say(console, f"  -> {text}")
    say(console, f"Stopped after {rounded(result.seconds)} s: {result.stopped}")
    say(console, f"Trials: {len(result.trials)}; settings not tried: {len(result.skipped)}")


def _written(change: Mapping[str, object]) -> str:
    """``core.instances=2, core.queue_delay_us=0``."""
    return ", ".join(f"{key}={value}" for key, value in change.items())
