"""What `tune` found, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from triptych.base.formatting import rounded
from triptych.interface.cli.bench_tables import print_cost
from triptych.interface.cli.tables import STYLES, print_table, say
from triptych.interface.report.tuning_report import change_of, gained, grown
from triptych.operate.tune.results import TuneResult


def print_tuned(console: Console, result: TuneResult) -> None:
    """The verdict, every trial, before and after, what else would help."""
    word = "tuned" if result.slo.is_empty else "SLO met" if result.met else "SLO NOT MET"
    style = "bold" if result.slo.is_empty else STYLES["met" if result.met else "not met"]
    say(console, f"{result.subject.pipeline}: {word}", style)
    say(console, f"  {result.verdict}")
    say(console, f"  maximised: {result.objective}")
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
        for name, (old, new) in change_of(result).items()
    ]
    print_table(console, "Before and after", ("", "before", "after", "change"), changes)
    say(console, f"Settings: {_written(result.winner.overrides) or 'as before'}")
    held = result.winner.bottleneck
    say(console, f"Bottleneck: {held.kind}. {held.says}")
    if result.winner.cost is not None:
        print_cost(console, result.winner.cost)
    for text in result.advice:
        say(console, f"  -> {text}")
    skipped = len(result.skipped)
    took = f"{rounded(result.seconds)} s, {len(result.trials)} trials, {skipped} settings not tried"
    say(console, f"Stopped after {took}: {result.stopped}")


def _written(change: Mapping[str, object]) -> str:
    """``core.instances=2, core.queue_delay_us=0``."""
    return ", ".join(f"{key}={value}" for key, value in change.items())
