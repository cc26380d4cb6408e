"""What a terminal shows of a build: which layers were kept, and what that costs."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from triptych.cli.shown import print_built


class Done:
    """As much of a build's result as is shown."""

    unpacked = ""
    findings = ()

    def __init__(self, conversion: dict[str, Any]) -> None:
        self.gate = {"notes": (), "conversion": conversion}


def shown(conversion: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_built(console, Done(conversion))  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_kept_layers_are_shown_with_their_cost_and_nodes_of_the_converter_are_not() -> None:
    text = shown(
        {
            "kept": ["layer.1", "node_where_1", "layer.0"],
            "layer_errors": {"layer.0": 1e-3, "layer.1": 5e-3, "layer.2": 1e-6},
            "batch_ms": {"fp32": 20.0, "as kept": 12.5},
        }
    )
    lines = [line.strip() for line in text.splitlines()]
    assert lines == [
        "2 of 3 layers kept in higher precision:",
        "layer.1: alone an error of 5.0e-03",
        "layer.0: alone an error of 1.0e-03",
        "a batch takes, on one thread: fp32 20.0 ms, as kept 12.5 ms",
    ]


def test_where_nothing_was_looked_for_nothing_is_shown() -> None:
    assert shown({"kept": ["node_where_1"], "layer_errors": {}}) == ""
    assert shown({"kept": []}) == ""
