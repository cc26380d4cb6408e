"""The harness of the benchmarks: rounds, medians, tables, the page of results."""

import json
from collections.abc import Callable
from itertools import count
from math import inf
from pathlib import Path

import pytest

from benchmarks import harness, results
from benchmarks.harness import Series, Turn, run_rounds
from benchmarks.results import Table


def turn(name: str, order: list[str], *, breaks_at: float = inf) -> Turn:
    calls = count()

    def measure() -> list[tuple[str, dict[str, float]]]:
        order.append(name)
        if next(calls) >= breaks_at:
            raise RuntimeError("out of memory")
        return [("8 clients", {"rate_per_s": float(len(order))})]

    return Turn(name, measure)


def test_systems_take_turns_until_one_fails_or_the_time_is_over() -> None:
    order: list[str] = []
    found = run_rounds([[turn(name, order) for name in "abc"], [turn("d", order)]], 3)
    assert "".join(order) == "abcd" + "bcad" + "cabd"
    assert [(one.system, one.load, len(one.rounds)) for one in found] == [
        (name, "8 clients", 3) for name in "abcd"
    ]
    order.clear()
    errors: list[str] = []
    turns = [turn("a", order), turn("b", order, breaks_at=1)]
    found = run_rounds([turns], 3, on_error=lambda name, error: errors.append(f"{name}: {error}"))
    assert [one.system for one in found] == ["a"]
    assert (errors, order.count("b")) == (["b: out of memory"], 2)
    with pytest.raises(RuntimeError):
        run_rounds([[turn("b", order, breaks_at=0)]], 1)
    clock: Callable[[], float] = iter([0.0, 0.0, 50.0, 50.0, 110.0, 110.0]).__next__
    found = run_rounds([[turn("a", [])]], 9, max_minutes=2.0, clock=clock)
    assert len(found[0].rounds) == 2
    series = Series("a", "8", [{"p50_ms": value} for value in (3.0, 1.0, 8.25)])
    assert (series.text("p50_ms", 1), series.range("p50_ms")) == ("3.0", "1-8")


def test_results_are_printed_written_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "PUBLISHED", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "_LOAD_AT_START", 2.5)
    monkeypatch.setattr("sys.argv", [str(results.ROOT / "build_scripts/x.py"), "--only", "a b"])
    parser = harness.make_parser("Measure.\n\nMore.", "x", "X", rounds=1, seconds=1.0)
    output = tmp_path / "x.json"
    options = parser.parse_args(["--output", str(output), "--publish"])
    table = Table("Title", ("system", "texts/s"), [("a", "7")])
    harness.finish(options, [table], [Series("a", "", [{"rate_per_s": 7.0}])], ["note"])
    assert "| a | 7 |" in capsys.readouterr().out
    assert json.loads(output.read_text())["measurements"][0]["rounds"] == [{"rate_per_s": 7.0}]
    page = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "## X\n" in page
    assert "| a | 7 |" in page
    assert "- note" in page
    assert "- Renew: `python build_scripts/x.py --only 'a b'`" in page
    assert "load average 2.5" in page


def test_the_page_of_results_is_that_of_the_published_files() -> None:
    files = sorted(results.PUBLISHED.glob("*.json"))
    page = results.render_page([json.loads(file.read_text(encoding="utf-8")) for file in files])
    assert results.PAGE.read_text(encoding="utf-8") == page
