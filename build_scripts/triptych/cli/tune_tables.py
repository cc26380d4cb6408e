"""What `tune` found, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.cli.bench_tables import STYLES, print_cost, width
from triptych.formatting import rounded
from triptych.report.tuning_trial_table import change_of, grown
from triptych.tune.results import TuneResult


def print_tuned(console: Console, result: TuneResult) -> None:
    """The verdict, every trial, before and after, what else would help."""
    word = "tuned" if result.slo.is_empty else "SLO met" if result.met else "SLO NOT MET"
    style = "bold" if result.slo.is_empty else STYLES["met" if result.met else "not met"]
    console.print(Text(f"{result.subject.pipeline}: {word}", style))
    console.print(Text(f"  {result.verdict}"))
    console.print(Text(f"  maximised: {result.objective}"))
    if result.trials:
        console.print(_trials(result), width=width(console))
    console.print(_before_after(result), width=width(console))
    overrides = result.winner.overrides
    console.print(Text(f"Settings: {written(overrides)}" if overrides else "Settings: as before"))
    held = result.winner.bottleneck
    console.print(Text(f"Bottleneck: {held.kind}. {held.says}"))
    if result.winner.cost is not None:
        print_cost(console, result.winner.cost)
    for text in result.advice:
        console.print(Text(f"  -> {text}"))
    skipped = len(result.skipped)
    took = f"{rounded(result.seconds)} s, {len(result.trials)} trials, {skipped} settings not tried"
    console.print(Text(f"Stopped after {took}: {result.stopped}"))


def written(change: Mapping[str, Any]) -> str:
    """``core.instances=2, core.queue_delay_us=0``."""
    return ", ".join(f"{key}={value}" for key, value in change.items())


def _trials(result: TuneResult) -> Table:
    table = Table(title="Trials", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("change", overflow="fold", ratio=3)
    for head in ("score", "against", "gain"):
        table.add_column(head, justify="right")
    table.add_column("verdict", overflow="fold", ratio=4)
    for one in result.trials:
        numbers = (rounded(one.score), rounded(one.against), grown(one.against, one.score))
        verdict = Text.assemble((one.verdict, STYLES.get(one.verdict, "")), f": {one.says}")
        table.add_row(*map(Text, (str(one.number), written(one.change), *numbers)), verdict)
    return table


def _before_after(result: TuneResult) -> Table:
    table = Table(title="Before and after", title_justify="left")
    for index, head in enumerate(("", "before", "after", "change")):
        table.add_column(head, justify="right" if index else "left")
    for name, (old, new) in change_of(result).items():
        table.add_row(*map(Text, (name, rounded(old), rounded(new), grown(old, new))))
    return table
