"""Harness of the benchmarks: interleaved rounds, medians with their range, one JSON result.

In each round every system under test has one turn, and each round starts with another system, so
that a disturbance of the machine affects all systems alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.model import CACHE
from benchmarks.results import Table, describe, publish, render_page
from triptych.base.files import write_files
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.measure import WINDOWS, run_longer
from triptych.serving.bench.perf_analyzer import TENSORS, Duration, RequestForm
from triptych.serving.bench.results import OfferedLoad

Item = TypeVar("Item")
Metrics = Mapping[str, float]
"""Values of one measurement by the name of the metric, which ends with its unit."""


@dataclass(frozen=True)
class Turn:
    """One turn of a system under test: measures one load or several.

    Attributes:
        measure: Returns the metrics of each load by the name of the load.
    """

    system: str
    measure: Callable[[], Iterable[tuple[str, Metrics]]]


@dataclass
class Series:
    """Measurements of one system under one load, one for each round."""

    system: str
    load: str
    rounds: list[Metrics] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """Return the value of each round."""
        return [metrics[metric] for metrics in self.rounds]

    def median(self, metric: str) -> float:
        """Return the median over the rounds."""
        return median(self.values(metric))

    def text(self, metric: str, digits: int = 0) -> str:
        """Return the median with `digits` decimals."""
        return f"{self.median(metric):.{digits}f}"

    def range(self, metric: str, digits: int = 0) -> str:
        """Return the lowest and the highest value, joined by a hyphen."""
        values = self.values(metric)
        return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def run_rounds(
    groups: Sequence[Sequence[Turn]],
    rounds: int,
    *,
    max_minutes: float = math.inf,
    on_error: Callable[[str, Exception], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Series]:
    """Measure the turns of every group in interleaved rounds.

    Args:
        groups: Groups of turns that are compared with each other, such as one for each load.
        max_minutes: Bound of the duration. A round that would not fit is left out, the first one
            excepted.
        on_error: Receives a system and its error; the system then has no further turns. Without
            it an error ends the benchmark.

    Returns:
        Series in the order of the turns; series of systems that failed are left out.
    """
    found: dict[tuple[int, str, str], Series] = {}
    failed: set[str] = set()
    began, longest_s = clock(), 0.0
    for number in range(rounds):
        round_began = clock()
        if number and round_began + longest_s - began > 60 * max_minutes:
            say(f"{number} instead of {rounds} rounds: --max-minutes is reached")
            break
        for index, turns in enumerate(groups):
            shift = number * len(turns) // rounds
            for turn in [*turns[shift:], *turns[:shift]]:
                if turn.system in failed:
                    continue
                try:
                    for load, metrics in turn.measure():
                        key = index, turn.system, load
                        found.setdefault(key, Series(turn.system, load)).rounds.append(metrics)
                        say(
                            f"round {number + 1}/{rounds}  {turn.system}, {load}: {_brief(metrics)}"
                        )
                except Exception as error:
                    if on_error is None:
                        raise
                    failed.add(turn.system)
                    on_error(turn.system, error)
        longest_s = max(longest_s, clock() - round_began)
    order = [(index, turn.system) for index, turns in enumerate(groups) for turn in turns]
    keys = sorted((key for key in found if key[1] not in failed), key=lambda k: order.index(k[:2]))
    return [found[key] for key in keys]


def run_load(
    url: str,
    model: str,
    requests: Sequence[perf_analyzer.Request],
    seconds: float,
    load: OfferedLoad,
    *,
    warmup_requests: int = 0,
    form: RequestForm = TENSORS,
) -> dict[str, float]:
    """Return throughput and latency of a load of perf_analyzer; see `perf_analyzer.run`."""

    def run(windows_s: float) -> perf_analyzer.LoadResult:
        span = Duration(window_s=windows_s / WINDOWS, warmup_requests=warmup_requests)
        return perf_analyzer.run(url, model, requests, load, span, form=form)

    result = run_longer(run, seconds)
    latencies = {"p50_ms": result.percentile_us(50) / 1e3, "p99_ms": result.percentile_us(99) / 1e3}
    return {"rate_per_s": result.throughput_per_s, **latencies}


def closed_loop(
    url: str,
    model: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    clients: int,
    seconds: float,
    http_path: str | None = None,
) -> dict[str, float]:
    """Return the metrics of `clients` with one request in flight each, after a short warm-up."""
    load, form = OfferedLoad("concurrency", clients), RequestForm(http_path=http_path)
    warmup_requests = 2 * clients + 20
    return run_load(url, model, requests, seconds, load, warmup_requests=warmup_requests, form=form)


def make_parser(
    doc: str | None,
    name: str,
    title: str,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    only: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks.

    Args:
        doc: Docstring of the benchmark; its first line is the description.
        name: Name of the result below `CACHE` and below ``results/``.
        title: Title of the result on the page.
        rounds: Default number of rounds; None for a benchmark without rounds.
        seconds: Default duration of a measurement, in seconds; None for one without a duration.
        only: Whether to add ``--only``, which `is_wanted` reads.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.set_defaults(name=name, title=title)
    if rounds is not None:
        parser.add_argument("--rounds", type=_positive_int, default=rounds, help="number of rounds")
        limit_help = "no round begins after it"
        parser.add_argument("--max-minutes", type=positive, default=math.inf, help=limit_help)
    if seconds is not None:
        length_help = "duration of a measurement"
        parser.add_argument("--seconds", type=positive, default=seconds, help=length_help)
    if only:
        parser.add_argument("--only", nargs="+", default=[], help="parts of the names to measure")
    output = CACHE / f"{name}.json"
    parser.add_argument("--output", type=Path, default=output, help="JSON file of the result")
    publish_help = "store the tables and write RESULTS.md again"
    parser.add_argument("--publish", action="store_true", help=publish_help)
    return parser


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    """Return whether ``--only`` selects a system under test."""
    return not options.only or any(part in name for part in options.only)


def tabulate(
    title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]
) -> Table:
    """Return a table with a row for each item; each column has a function from item to cell."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return Table(title, [*columns], rows)


def write_result(
    options: argparse.Namespace, tables: Sequence[Table], data: Any, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the JSON result and its page beside it; return the result without measurements.

    Args:
        data: Every measurement as plain data; dataclasses are converted.
    """
    result = describe(options.title, tables, notes)
    text = json.dumps({**result, "measurements": data}, indent=1, default=vars) + "\n"
    page = options.output.with_suffix(".md").name
    write_files(options.output.parent, {options.output.name: text, page: render_page([result])})
    return result


def finish(
    options: argparse.Namespace, tables: Sequence[Table], data: Any, notes: Sequence[str] = ()
) -> None:
    """Print the tables and notes, write the result, and publish it where that is requested."""
    for part in (*tables, *notes):
        print(f"{part}\n")
    result = write_result(options, tables, data, notes)
    say(f"written: {options.output}")
    if options.publish:
        publish(options.name, result)


def say(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def progress(stage: str, line: str) -> None:
    """Print a step of a build."""
    say(f"  {stage:8} {line}")


def quiet(_stage: str, _line: str) -> None:
    """Ignore a step of a build."""


def _brief(metrics: Metrics) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in [*metrics.items()][:6])


def positive(text: str) -> float:
    """Return a number above 0 from the command line."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _positive_int(text: str) -> int:
    return int(positive(str(int(text))))
