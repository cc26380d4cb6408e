"""What a terminal shows of a bench and of a comparison."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from load_samples import NASTY, bench, hostile, subject
from report_pages import typed
from triptych.interface.cli.measured_tables import print_bench, print_comparison
from triptych.serving.bench.comparison import compare_results
from triptych.serving.bench.results import BenchResult


def printed(result: BenchResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_bench(console, result)
    return text_of(console)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    return text


def test_a_bench_is_printed() -> None:
    text = typed(printed(bench()))
    for wanted in (
        "minilm: SLO met",
        "Best: 145/s at 4 clients, p50 25.9 ms, p99 50.5 ms",
        "8 clients: 44.8 ms: core queue 55 %, core 30 %",
        "Bottleneck: compute.",
        "-> Try precision int8",
        "2.03 x as fast",
        "met up to 150/s",
        "Cost: per million inferences USD 0.630",
        "missed",
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize("name", NASTY)
def test_any_bench_is_printed(name: str) -> None:
    assert "nan" not in printed(NASTY[name])


def test_errors_and_warnings_are_printed() -> None:
    text = typed(printed(NASTY["errors only"]))
    assert "error: deadline (minilm, 1 client: 9" in text
    assert "SLO NOT MET" in text
    unstable = typed(printed(NASTY["nothing stable"]))
    wanted = "the windows differ by 31 %, 6 similar warnings (minilm, 1 client; minilm, 8 clients)"
    assert wanted in unstable


def test_markup_is_printed_as_it_is() -> None:
    text = printed(hostile("[red]x[/red]"))
    assert text.count("[red]x[/red]") > 5


def test_a_comparison_is_printed() -> None:
    console = Console(file=io.StringIO(), width=100)
    after = bench(drift=1.2, subject=subject(machine={"processor": "[bold]"}))
    print_comparison(console, compare_results(bench(), after))
    text = typed(text_of(console))
    for wanted in ("the machines differ", "[bold]", "minilm, 4 clients", "+20 %", "better", "same"):
        assert wanted in text, wanted
    assert "core queue ms" in text  # changed
    assert "core batch" not in text  # did not
