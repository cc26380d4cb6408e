"""Compare goodput and latency under overload: flow control, none, and Envoy in front of none.

Goodput is the rate of answers that come within the client's deadline, by the capacity: the rate of
`flow_control: none` for 32 clients without a deadline, in the same round. New requests arrive at
random times (Poisson), because a number of clients that wait for their answers cannot offer more
than a server answers. Each has a deadline that the server does not know, and is sent once more
50 ms after it was refused or expired. So the server receives up to twice the offered load.

MiniLM computes on the processors that also send and refuse requests, so its load ends at 5 times
the capacity. An emulated core of 50 rows per second leaves them alone: it ends at 20 times.
Every load has a server of its own.

Usage: ``python build_scripts/benchmarks/overload.py [--only default] [--loads 2 5]``.
``--publish`` also draws the figure of ``docker/overload.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import emulated_core
from benchmarks.envoy_proxy import adaptive_concurrency, admission_control, envoy_in_front
from benchmarks.harness import (
    Metrics,
    Series,
    Turn,
    finish,
    is_wanted,
    make_parser,
    positive,
    run_rounds,
    tabulate,
)
from benchmarks.model import CACHE, PIPELINE, ROOT, build
from benchmarks.overload_load import Load, capacity, run, waits_alone
from triptych.base.files import write_files
from triptych.interface.report import plots
from triptych.interface.report.svg import WIDTH
from triptych.serving.server import Server

PICTURE = ROOT / "docker" / "overload.svg"
PAUSE_S = 0.05
WARM_UP_S, SETTLE_S, AFTER_S = 2.0, 4.0, 3.0
"""Seconds of the load before, of the load that do not count, and of one client afterwards."""
MIN_GOODPUT = 0.05
"""Minimum goodput by the capacity for which the figure has a p99."""
_NAME = PIPELINE.name
_CAPACITY = "capacity"


class OverloadSystem(NamedTuple):
    """A system under test: a value of `serving.flow_control`, and a filter of Envoy or None."""

    flow_control: str
    limiter: dict[str, Any] | None


SYSTEMS = {
    "default": OverloadSystem("triptych", None),
    "none": OverloadSystem("none", None),
    "Envoy, adaptive concurrency": OverloadSystem("none", adaptive_concurrency()),
    "Envoy, admission control": OverloadSystem("none", admission_control()),
}


@dataclass
class OverloadedCore:
    """A core under load.

    Attributes:
        time: Times of an emulated core; None for the core of the pipeline.
        ratios: Offered loads by the capacity.
        capacity_per_s: Capacity in the current round.
    """

    name: str
    time: emulated_core.CoreTime | None
    ratios: Sequence[float]
    capacity_per_s: float = field(default=math.nan, init=False)

    def build(self, flow_control: str) -> Path:
        """Return the repository with a value of `serving.flow_control`."""
        built = build(CACHE / f"overload-{flow_control}", f"serving.flow_control={flow_control}")
        if self.time is None:
            return built
        target = CACHE / f"overload-{flow_control}-emulated"
        return emulated_core.write_pipeline(built, _NAME, target, self.time)


def make_cores() -> list[OverloadedCore]:
    """Return the cores under load."""
    emulated = emulated_core.CoreTime(batch_us=0.0, row_us=20_000.0, token_us=0.0)
    return [
        OverloadedCore("MiniLM", None, (0.5, 1.0, 2.0, 5.0)),
        OverloadedCore("emulated core", emulated, (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)),
    ]


@contextmanager
def _serving(system: OverloadSystem, repository: Path) -> Iterator[str]:
    """Run a system while the block runs; yield its address."""
    with ExitStack() as stack:
        url = stack.enter_context(Server(repository)).grpc_url
        if system.limiter is not None:
            url = stack.enter_context(envoy_in_front(url, system.limiter))
        yield url


def make_groups(
    core: OverloadedCore, names: Sequence[str], seconds: float, deadline_s: float
) -> list[list[Turn]]:
    """Return the turns of a core: the capacity, then all systems under each load."""
    flows = {"none", *(SYSTEMS[name].flow_control for name in names)}
    repositories = {flow: core.build(flow) for flow in flows}

    def measure_capacity() -> Iterator[tuple[str, Metrics]]:
        with _serving(SYSTEMS["none"], repositories["none"]) as url:
            core.capacity_per_s = capacity(url, _NAME)
        yield core.name, {"answers_per_s": core.capacity_per_s}

    def make_turn(name: str, ratio: float) -> Turn:
        system = SYSTEMS[name]

        def measure() -> Iterator[tuple[str, Metrics]]:
            load = Load(
                rate_per_s=ratio * core.capacity_per_s,
                deadlines_s=[deadline_s],
                pause_s=PAUSE_S,
                retries=1,
                seconds=SETTLE_S + seconds,
                settle_s=SETTLE_S,
            )
            with _serving(system, repositories[system.flow_control]) as url:
                yield f"{ratio:g}", measure_load(url, load, core.capacity_per_s)

        return Turn(name, measure)

    loads = [[make_turn(name, ratio) for name in names] for ratio in core.ratios]
    return [[Turn(_CAPACITY, measure_capacity)], *loads]


def measure_load(url: str, load: Load, capacity_per_s: float) -> Metrics:
    """Return the metrics of a load on a server that just started; NaN without answers."""
    capacity(url, _NAME, seconds=WARM_UP_S)
    found = run(url, _NAME, load)
    if found.failures:
        raise RuntimeError(f"requests failed: {found.failures}")
    after_s = waits_alone(url, _NAME, AFTER_S)
    return {
        "goodput": found.goodput_per_s / capacity_per_s,
        "answers_per_s": found.goodput_per_s,
        "refusals_per_s": found.refusals_per_s,
        "expiries_per_s": found.expiries_per_s,
        "p50_ms": math.nan if found.p50_ms is None else found.p50_ms,
        "p99_ms": math.nan if found.p99_ms is None else found.p99_ms,
        "after_ms": 1e3 * after_s[0] if after_s else math.inf,
        "load_cores": found.load_cores,
        "lag_ms": 1e3 * found.lag_s,
    }


def median_of(series: Series, metric: str) -> float:
    """Return the median over the rounds in which the metric has a value; NaN if none has."""
    values = [value for value in series.values(metric) if not math.isnan(value)]
    return median(values) if values else math.nan


def _text(series: Series, metric: str) -> str:
    value = median_of(series, metric)
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if math.isfinite(value) else f"over {1e3 * AFTER_S:.0f}"


def draw(found: Mapping[str, Sequence[Series]], deadline_s: float) -> str:
    """Return the figure: goodput and p99 of each core over the offered load.

    Args:
        found: Series of each core by its name, without that of the capacity.
    """
    metrics = {"goodput": "goodput / capacity", "p99_ms": "p99 of answers, ms"}
    panels = []
    for number, (core, series) in enumerate(found.items()):
        systems = list(dict.fromkeys(one.system for one in series))
        for metric, title in metrics.items():
            lines = [
                plots.Series(
                    system,
                    f"s{index + 1}",
                    tuple(
                        plots.Dot(
                            float(one.load), value, f"{one.load} times the capacity: {value:.3g}"
                        )
                        for one in series
                        if one.system == system
                        if not math.isnan(value := median_of(one, metric))
                        if metric == "goodput" or median_of(one, "goodput") >= MIN_GOODPUT
                    ),
                )
                for index, system in enumerate(systems)
            ]
            axes = f"offered load / capacity, {core}", title
            name = f"{metric}-{number}"
            limits = {"deadline": 1e3 * deadline_s} if metric == "p99_ms" else {"capacity": 1.0}
            panels.append(
                plots.curves(
                    name, f"{title} of {core}", lines,
                    axes=axes, limits=limits, log_x=True, log_y=metric == "p99_ms",
                )
            )  # fmt: skip
    return _join(panels)


_RULES = {
    "text": "font:13px system-ui,sans-serif;fill:#333",
    ".tick": "font-size:12px;fill:#555",
    ".grid": "stroke:#e4e4e4",
    ".axis": "stroke:#666",
    ".limit": "stroke:#888;stroke-dasharray:3 3",
    "text.limit": "fill:#666;stroke:none",
    ".curve": "fill:none;stroke-width:2",
    ".mark": "stroke:#fff",
}
_COLORS = {"s1": "#2a78d6", "s2": "#c2571a", "s3": "#1a8a5f", "s4": "#7d6a9c"}
_DASHES = {"s2": "7 3", "s3": "2 3", "s4": "9 3 2 3"}
_GAP = 24
_COLUMNS = 2


def _join(panels: Sequence[str]) -> str:
    """Return one SVG document of plots in two columns."""
    rules = [f"{name}{{{rule}}}" for name, rule in _RULES.items()]
    rules += [f".curve.{kind}{{stroke:{color}}}" for kind, color in _COLORS.items()]
    rules += [f".mark.{kind}{{fill:{color}}}" for kind, color in _COLORS.items()]
    rules += [f".curve.{kind}{{stroke-dasharray:{dash}}}" for kind, dash in _DASHES.items()]
    marks, top = [f"<style>{''.join(rules)}</style>"], float(_GAP)
    for start in range(0, len(panels), _COLUMNS):
        row = [panel for panel in panels[start : start + _COLUMNS] if panel]
        heights = [float(panel.split('"', 2)[1].split()[3]) for panel in row]  # of the viewBox
        for column, (panel, height) in enumerate(zip(row, heights, strict=True)):
            left = _GAP + column * (WIDTH + _GAP)
            place = f'<svg x="{left}" y="{top:g}" width="{WIDTH}" height="{height:g}" '
            marks.append(place + str(panel).removeprefix("<svg "))
        top += max(heights, default=0.0) + _GAP
    width = _COLUMNS * (WIDTH + _GAP) + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}">'
    background = f'<rect width="{width}" height="{top:g}" fill="#fff"/>'
    return f"{head}{background}{''.join(marks)}</svg>\n"


def main() -> int:
    """Measure each core in rounds, print the tables, and draw the figure."""
    title = "Overload (`make overload`)"
    parser = make_parser(__doc__, "overload", title, rounds=3, seconds=8.0, only=True)
    parser.add_argument("--deadline", type=positive, default=1.0, help="of a client, in seconds")
    parser.add_argument("--cores", nargs="+", default=[""], help="parts of the names of the cores")
    parser.add_argument("--loads", nargs="+", type=positive, help="by the capacity")
    parser.add_argument("--picture", type=Path, help="file of the figure")
    options = parser.parse_args()
    names = [name for name in SYSTEMS if is_wanted(name, options)]
    tables, notes = [], [f"deadline of a client: {options.deadline:g} s"]
    found: dict[str, list[Series]] = {}
    for core in make_cores():
        if not any(part in core.name for part in options.cores):
            continue
        core.ratios = options.loads or core.ratios
        groups = make_groups(core, names, options.seconds, options.deadline)
        measured = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
        rates = [one for one in measured if one.system == _CAPACITY]
        found[core.name] = [one for one in measured if one.system != _CAPACITY]
        rate = rates[0].text("answers_per_s"), rates[0].range("answers_per_s")
        notes.append(f"capacity of {core.name}: {rate[0]} answers/s ({rate[1]})")
        table = tabulate(
            f"{core.name}: medians of the rounds, goodput with the range",
            found[core.name],
            {
                "system": lambda one: one.system,
                "load / capacity": lambda one: one.load,
                "goodput / capacity": lambda one: (
                    f"{one.text('goodput', 2)} ({one.range('goodput', 2)})"
                ),
                "p50 ms": lambda one: _text(one, "p50_ms"),
                "p99 ms": lambda one: _text(one, "p99_ms"),
                "refused/s": lambda one: one.text("refusals_per_s"),
                "expired/s": lambda one: one.text("expiries_per_s"),
                "one request after the load, ms": lambda one: _text(one, "after_ms"),
                "delay of the load, ms": lambda one: one.text("lag_ms"),
            },
        )
        tables.append(table)
    finish(options, tables, found, notes)
    picture = options.picture or (PICTURE if options.publish else None)
    if picture is not None:
        write_files(picture.parent, {picture.name: draw(found, options.deadline)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
