"""What a terminal shows of a build: which layers were kept, and what that costs."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console

from report_pages import CANDIDATES, candidate, probe_of, typed
from triptych.interface.cli.tables import print_built
from triptych.repository.records import Conversion, GateResult, Verdict, WorstRow


class Done:
    """As much of a build's result as is shown."""

    not_packed_reason = ""
    findings = ()

    def __init__(self, gate: GateResult) -> None:
        self.gate = gate


def shown(**changes: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    empty = GateResult("int8", 8, 0, finite=True, verdicts=(), failures=())
    print_built(console, Done(replace(empty, **changes)))  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_kept_layers_are_shown_with_their_cost_and_nodes_of_the_converter_are_not() -> None:
    layers = ("layer.0", "layer.1", "layer.2", "node_where_1")
    text = shown(
        conversion=Conversion(
            layers,
            excluded_layers=("layer.1", "node_where_1", "layer.0"),
            layer_errors={"layer.0": 1e-3, "layer.1": 5e-3, "layer.2": 1e-6},
            batch_ms={"fp32": 20.0, "as kept": 12.5},
        )
    )
    lines = [line.strip() for line in text.splitlines()]
    assert lines == [
        "2 of 3 layers stay in higher precision:",
        "layer.1: error 5.0e-03 if converted alone",
        "layer.0: error 1.0e-03 if converted alone",
        "time of a batch on one thread: fp32 20.0 ms, as kept 12.5 ms",
    ]


def test_where_nothing_was_looked_for_nothing_is_shown() -> None:
    assert shown(conversion=Conversion((), excluded_layers=("node_where_1",))) == ""
    assert shown(conversion=Conversion(())) == ""
    assert shown() == ""


def test_candidates_and_what_failed_are_shown_as_they_are() -> None:
    text = typed(
        shown(
            candidates=(*CANDIDATES, candidate("[red]", "failed", note="[b]too slow[/b]")),
            accepted="a [bold]freeze",
            verdicts=(Verdict("mean_cosine", math.nan, 0.998, passed=False),),
            failures=("mean_cosine is not a number",),
            worst=(WorstRow("[i]a row[/i]", 0.25, math.nan, "wanted", "got"),),
            probe=probe_of(passed=False),
        )
    )
    for wanted in (
        "Failed metrics",
        "│ mean_cosine │ not a number │ 0.998",
        "[i]a row[/i] │ 0.25",
        "mean_neighbor_loss, outside your traffic │ 0.0023 │ 0.0015",
        "a text of the probe │ 0.75",
        "accepted despite the failed accuracy gate: a [bold]freeze",
        "│ requests/s │ 162 │ - │ 232 │ 218 │ 232",
        "│ nearest_neighbor_agreement │ 0.9775 │ - ",
        "int8_dynamic: 0.88 is below 0.97",
        "[red]: [b]too slow[/b]",
    ):
        assert wanted in text, wanted
