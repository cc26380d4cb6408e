"""The page of a bench, from the verdict down to where the numbers come from.

The figures of a bench beside the card of the very build that was measured: Markdown.

The report of a bench: ``report.html`` to read, ``bench.json`` and ``bench.csv`` to compute.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from triptych.base.errors import UserError
from triptych.base.files import told_to_user, write_files
from triptych.base.formatting import NOTHING, TIMES, milliseconds, number, percent, rounded
from triptych.interface.report.pages import render
from triptych.interface.report.plots import Bar, Dot, Series, compared, curves, histogram, waterfall
from triptych.repository.manifest import FIGURES_FILE, build_id
from triptych.repository.records import json_text
from triptych.repository.store import locked
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    Part,
    Point,
    Resources,
    StepUse,
    Subject,
    best_point,
    bottleneck_of,
    closed_loops,
    figures_of,
    headline,
    rates_say,
    to_json,
    verdict_of,
    warnings_of,
)
from triptych.spec.slo import MOMENTS, PERCENTILES, AnySlo, Slo

_TIMES = ("ttft p50", "ttft p99", "itl p50", "itl p99")


def write_figures(result: BenchResult, repository: Path) -> str:
    """Put the figures beside the card, if the build that was measured is still the one in place.

    Returns:
        In a line, what became of them.
    """
    subject = result.subject
    file = repository / subject.pipeline / FIGURES_FILE
    try:
        with told_to_user(repository), locked(repository):
            if subject.build != build_id(repository, subject.pipeline):
                return f"{file} was not written: what was measured has been built anew"
            write_files(file.parent, {FIGURES_FILE: figures(result)})
    except UserError as error:
        return f"{file} was not written: {error.message}"
    return str(file)


def figures(result: BenchResult) -> str:
    """The best figure, each load, and what they were measured on."""
    subject = result.subject
    others = [point for point in result.points if point.load.kind != "concurrency"]
    lines = [f"# Speed of {subject.pipeline}", "", f"{headline(result)}.", ""]
    if not result.slo.is_empty:
        lines += [verdict_of(result).says, ""]
    lines += ["| load | requests/s | p50, ms | p95, ms | p99, ms | errors |", "|" + " --- |" * 6]
    points = (*closed_loops(result.points), *others)
    lines += [_row(point) for point in points]
    if any(point.streamed for point in points):
        heads = ("load", "tokens/s", "goodput, requests/s", *(f"{name}, ms" for name in _TIMES))
        lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        lines += [_tokens_row(point) for point in points if point.streamed]
    machine = ", ".join(f"{name} {value}" for name, value in subject.machine.items())
    lines += [
        "",
        f"Measured by `triptych bench` at {subject.measured_at} with the pipeline's own traffic "
        f"({subject.requests} different requests) on: {machine}. {subject.precision}, "
        f"{subject.layout}. Server: {subject.server}. Build {subject.build[:12]} (SHA-256 of its "
        "lock).",
    ]
    return "\n".join(lines) + "\n"


def _tokens_row(point: Point) -> str:
    times = [milliseconds(point.latencies_us[name.replace(" ", "_")]) for name in _TIMES]
    rates = [rounded(point.median(name)) for name in ("tokens_per_s", "goodput_per_s")]
    return f"| {' | '.join([str(point.load), *rates, *times])} |"


def _row(point: Point) -> str:
    times = [milliseconds(point.median(f"{name}_us")) for name in ("p50", "p95", "p99")]
    rate = rounded(point.median("throughput_per_s"))
    return f"| {' | '.join([str(point.load), rate, *times, str(sum(point.errors.values()))])} |"


CURVES = ("p50", "p95", "p99")
"""Percentiles that are drawn."""

STEPS = {"preprocess": "s1", "core": "s2", "postprocess": "s3"}
"""Step to its color; what is none of them has another."""

_CLOSED = (
    "Each point a number of clients that send their next request when the last is answered. "
    "Thin lines: from the lowest to the highest round."
)
_OPEN = "Requests sent at a given rate, whatever comes back."
_RATES = "Latency over the rate that was offered. Dashed: the promise."

_TOKENS = {
    "ttft": "From a request to the first response with a token.",
    "itl": "Between two responses of an answer. Dashed: the promise.",
}

Plot = tuple[Markup, str]
Rate = Callable[[Point], float]


def page(result: BenchResult) -> str:
    rate = result.rate
    every = (*result.points, *result.baselines, *(rate.points if rate else ()))
    closed = closed_loops(result.points)
    other = [point for point in result.points if point.load.kind != "concurrency"]
    other = sorted(other, key=lambda point: point.load.value)
    shown = shown_points(result)
    return render(
        "bench.html.j2",
        result=result,
        slo=result.slo,
        verdict=verdict_of(result),
        headline=headline(result),
        bottleneck=bottleneck_of(result.points),
        curves=[
            _two(closed, result.slo, achieved, ("latency", "queues"), _CLOSED),
            _two(other, result.slo, offered, ("open", "open-queues"), _OPEN),
        ],
        rate=rate,
        rates_say=rates_say(rate) if rate else "",
        rate_curves=_two(rate.points, rate.slo, offered, ("rates", "rate-queues"), _RATES)
        if rate
        else [],
        streamed=[point for point in every if point.streamed],
        moments=MOMENTS,
        samples=samples,
        token_curves=_token_curves(closed or other, result.slo),
        budgets=[_budget(f"budget-{index}", point) for index, point in enumerate(shown)],
        every=every,
        latency=latency,
        warnings=warnings_of(every),
        contenders=_contenders(result),
        baselines=[(other, times_as_fast(result.points, other)) for other in result.baselines],
        cost=cost_entries(result.cost) if result.cost else {},
        watched=[point for point in shown if point.typical.resources],
        resources=_resources(shown),
        # An engine makes its own batches of what streams: Triton's say nothing of them.
        batches=_batches(shown[-1]) if shown and not shown[-1].streamed else [],
        largest=shown[-1].load if shown else None,
        lengths=histogram(
            "lengths", "Lengths of rows", result.subject.lengths, axes=("tokens a row", "rows")
        ),
        origin=origin(result.subject),
    )


def achieved(point: Point) -> float:
    """Requests answered a second."""
    return point.median("throughput_per_s")


def offered(point: Point) -> float:
    """Requests sent a second, by an open load."""
    return point.load.value


def latency(point: Point, percentile: str) -> str:
    """In milliseconds; of no answer there is none."""
    return milliseconds(point.median(f"{percentile}_us") if point.median("requests") else None)


def samples(point: Point, moment: str) -> int:
    """How many times there are of a moment, in all rounds."""
    if moment == "e2e":
        return sum(one.requests for one in point.rounds)
    return sum(getattr(one, moment).samples for one in point.streamed)


def _token_curves(points: Sequence[Point], slo: AnySlo) -> list[Plot]:
    """First token and inter-token latency over the tokens a second, each with its limits."""
    told = [point for point in points if point.streamed]
    plots = []
    for moment in ("ttft", "itl"):
        series = []
        for index, which in enumerate(CURVES, 1):
            dots = []
            for point in told:
                name = f"{moment}_{which}"
                rounds = [one.latencies_us.get(name, 0.0) / 1e3 for one in point.rounds]
                dots.append(
                    Dot(
                        x=point.median("tokens_per_s"),
                        y=point.latencies_us[name] / 1e3,
                        tip=f"{figures_of(point)}, {which} {milliseconds(median(rounds) * 1e3)} ms",
                        note=f"{point.load.value:g}" if which == CURVES[-1] else "",
                        x_span=point.span("tokens_per_s"),
                        y_span=(min(rounds), max(rounds)),
                    )
                )
            series.append(Series(which, f"q{index}", tuple(dots)))
        limits = {
            f"{name.removeprefix(moment + '_')} limit {most / 1e3:g} ms": most / 1e3
            for name, most in slo.limits_us.items()
            if name.startswith(moment)
        }
        title = f"{MOMENTS[moment].capitalize()} over tokens a second"
        axes = ("tokens a second", f"{MOMENTS[moment]}, ms")
        plots.append((curves(moment, title, series, axes=axes, limits=limits), _TOKENS[moment]))
    return plots


def shown_points(result: BenchResult) -> list[Point]:
    """The best load and the largest; where they are the same, the lightest and that."""
    closed = closed_loops(result.points) or list(result.points)
    best = best_point(closed, result.slo)
    if best is None:
        return []
    first = closed[0] if best == closed[-1] else best
    return [first] if first == closed[-1] else [first, closed[-1]]


def origin(subject: Subject) -> dict[str, object]:
    """What was measured, and on what: name to value."""
    return {
        "Pipeline": subject.pipeline,
        "Task": subject.task,
        "Architecture": subject.architecture,
        "Layout": subject.layout,
        "Precision": subject.precision,
        "Server": subject.server,
        "Measured at": subject.measured_at,
        **{f"Set: {name}": value for name, value in subject.overrides.items()},
        **{f"Machine: {name}": value for name, value in subject.machine.items()},
        **subject.versions,
    }


def part_name(part: Part) -> str:
    """``core queue``, ``core`` for its compute, ``transport``."""
    if part.what == "queue":
        return f"{part.where} queue"
    return part.where if part.what == "compute" else part.what


def times_as_fast(points: Sequence[Point], other: Point) -> str:
    """``2.31 x as fast``: throughput at the same load as `other`, else the best, over `other`'s."""
    same = [point for point in points if point.load == other.load]
    rival = same[0] if same else best_point(points, Slo())
    rate = achieved(other)
    if rival is None or rate <= 0 or not rival.median("requests"):
        return NOTHING
    return f"{rounded(achieved(rival) / rate)}\N{NO-BREAK SPACE}{TIMES} as fast"


def cost_entries(found: Cost) -> dict[str, str]:
    """What to tell of a cost: name to value, for people."""
    money = f"{found.currency} "
    entries = {"A million inferences": money + rounded(found.per_million)}
    if found.per_million_tokens is not None:
        entries["A million generated tokens"] = money + rounded(found.per_million_tokens)
    entries |= {
        "At": f"{rounded(found.rate_per_s)}/s a device",
        "Price": f"{money}{rounded(found.price_per_hour)} an hour",
    }
    if found.monthly is not None:
        entries["A month"] = f"{money}{rounded(found.monthly)}"
        entries["Of requests a day"] = rounded(found.daily_requests)
    if found.machines is not None:
        entries["Machines"] = f"{found.machines:,} for a peak of {rounded(found.peak_per_s)}/s"
    if found.monthly is not None or found.machines is not None:
        entries["Kept free"] = percent(found.headroom)
    return entries


def latency_dot(point: Point, which: str, tip: str, *, rate: Rate, note: bool) -> Dot:
    """A latency percentile over the rate, with its rounds; `note` tells the number of clients."""
    low, high = point.span(f"{which}_us")
    return Dot(
        x=rate(point),
        y=point.median(f"{which}_us") / 1e3,
        tip=tip,
        note=f"{point.load.value:g}" if note else "",
        x_span=point.span("throughput_per_s") if rate is achieved else None,
        y_span=(low / 1e3, high / 1e3),
    )


def _two(
    points: Sequence[Point], slo: AnySlo, rate: Rate, names: tuple[str, str], says: str
) -> list[Plot]:
    """Latency and queues over the rate, each where it has something to show."""
    # A load that only met errors has no latency.
    points = [point for point in points if point.median("requests") > 0]
    closed = rate is achieved
    across = f"requests {'answered' if closed else 'offered'} a second"
    limits = {
        f"{which.replace('_', '.')} limit {most / 1e3:g} ms": most / 1e3
        for which, most in slo.limits_us.items()
        if which in CURVES
    }
    title = "Latency over throughput" if closed else "Latency over offered rate"
    series = []
    for index, which in enumerate(CURVES, 1):
        dots = []
        for point in points:
            tip = f"{figures_of(point)}, {which} {milliseconds(point.median(f'{which}_us'))} ms"
            note = closed and which == CURVES[-1]
            dots.append(latency_dot(point, which, tip, rate=rate, note=note))
        series.append(Series(which, f"q{index}", tuple(dots)))
    latency = curves(names[0], title, series, axes=(across, "latency, ms"), limits=limits)
    steps = dict.fromkeys(use.step for point in points for use in point.typical.steps)
    waits = [
        Series(step, STEPS.get(step, "s4"), tuple(_queue_dots(points, step, rate)))
        for step in steps
    ]
    queues = curves(names[1], "Queue over rate", waits, axes=(across, "mean queue, ms"))
    return [(latency, says), (queues, "Mean time a request waits in front of each step.")]


def _queue_dots(points: Sequence[Point], step: str, rate: Rate) -> Iterator[Dot]:
    for point in points:
        uses = [use for one in point.rounds for use in one.steps if use.step == step]
        if waits := [use.queue_us / 1e3 for use in uses]:
            tip = f"{point.load}: {step} {rounded(median(waits))} ms"
            yield Dot(rate(point), median(waits), tip, y_span=(min(waits), max(waits)))


def _budget(name: str, point: Point) -> Plot:
    """Where a request's mean time goes at one load, part by part."""
    parts = [part for part in point.typical.parts if number(part.us) is not None]
    positive = sum(max(part.us, 0.0) for part in parts)
    whole = sum(part.us for part in parts)
    bars = []
    for part in parts:
        share = percent(part.us / positive if positive else 0.0)
        kind = f"{STEPS.get(part.where, 's4')}{' waits' if part.what == 'queue' else ''}"
        text = f"{milliseconds(part.us)} ms, {share}"
        bars.append(Bar(part_name(part), max(part.us, 0.0) / 1e3, text, kind))
    total = f"{milliseconds(whole)} ms"
    says = f"{str(point.load).capitalize()}: {total} in the mean"
    if not point.streamed:  # the queue of an engine is not told
        waits = sum(part.us for part in parts if part.what == "queue")
        says += f", {percent(waits / whole) if whole > 0 else 'none'} of it in queues"
    return waterfall(name, f"A request's time with {point.load}", bars, total), f"{says}."


def _contenders(result: BenchResult) -> Markup:
    best = best_point(result.points, Slo())
    held = [("own", best)] if best else []
    held += [("other", other) for other in result.baselines]
    bars = []
    for kind, point in held:
        rate = achieved(point)
        bars.append(Bar(f"{point.contender}, {point.load}", rate, f"{rounded(rate)}/s", kind))
    return compared("contenders", "Throughput of the pipeline and of the baselines", bars)


def _resources(points: Sequence[Point]) -> dict[str, list[str]]:
    """Process to cores and memory at each of `points` that was watched."""
    columns = [_used(used) for point in points if (used := point.typical.resources)]
    names = dict.fromkeys(name for column in columns for name in column)
    return {
        name: [text for column in columns for text in column.get(name, (NOTHING, NOTHING))]
        for name in names
    }


def _used(used: Resources) -> dict[str, tuple[str, str]]:
    """Name to cores and memory, for people."""
    found = {
        process.name: (rounded(process.cpu_cores), rounded(process.memory_mib))
        for process in used.processes
    }
    found["load generator"] = (rounded(used.client_cpu_cores), NOTHING)
    if used.machine_cpu is not None:
        found["whole machine"] = (f"{percent(used.machine_cpu)} of {used.cores}", NOTHING)
    for gpu in used.gpus:
        found[f"GPU {gpu.name}"] = (f"{percent(gpu.utilization)} busy", rounded(gpu.memory_mib))
    return found


def _batches(point: Point) -> list[tuple[StepUse, Markup]]:
    """How large the batches of each step were, where it ran any."""
    axes = ("rows a batch", "batches")
    drawn = []
    for index, use in enumerate(point.typical.steps):
        name, title = f"batches-{index}", f"Batches of {use.step}"
        if svg := histogram(name, title, use.batch_sizes, axes=axes, height=110):
            drawn.append((use, svg))
    return drawn


_LATENCIES = ("mean_us", *(f"{name}_us" for name in PERCENTILES))
_ROUND = ("seconds", "requests", "throughput_per_s", *_LATENCIES, "is_stable")
_TIME_COLUMNS = tuple(f"{moment}_{name}" for moment in ("ttft", "itl") for name in PERCENTILES)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_COUNTS = ("ttft_samples", "itl_samples")
_STREAMED = ("tokens_per_s", "goodput_per_s", *_COUNTS, *(f"{name}_us" for name in _TIME_COLUMNS))
_STEP = ("queue_us", "compute_us", "mean_batch", "executions", "busy")


def write_bench_report(result: BenchResult, folder: Path) -> Path:
    """Write the three files into `folder`, made where it is missing; each appears whole or not.

    Returns:
        The page.

    Raises:
        OSError: one of them cannot be written.
    """
    files = {
        "bench.json": json_text(to_json(result)),
        "bench.csv": as_csv(result),
        "report.html": page(result),
    }
    write_files(folder, files)
    return folder / "report.html"


def as_csv(result: BenchResult) -> str:
    """A row for each point and round; the columns of steps are empty where there are none.

    Those of tokens are there where answers were streamed.
    """
    points = [
        *(("pipeline", point) for point in result.points),
        *(("baseline", point) for point in result.baselines),
        *(("rate search", point) for point in (result.rate.points if result.rate else ())),
    ]
    steps = dict.fromkeys(use.step for _, p in points for one in p.rounds for use in one.steps)
    columns = [
        *("part", "contender", "load", "load_value", "burst", "round", "seconds", "requests"),
        *("throughput_per_s", *_LATENCIES),
        *("errors", "error_kinds", "is_stable"),
        *(_STREAMED if any(point.streamed for _, point in points) else ()),
        *(f"{step}_{name}" for step in steps for name in _STEP),
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writerow({column: _as_text(column) for column in columns})
    for part, point in points:
        for round_number, one in enumerate(point.rounds, 1):
            row = {
                "part": part,
                "contender": point.contender,
                "load": point.load.kind,
                "load_value": point.load.value,
                "burst": point.load.burst,
                "round": round_number,
                "errors": sum(one.errors.values()),
                "error_kinds": json.dumps(one.errors) if one.errors else "",
            }
            row |= {name: getattr(one, name) for name in _ROUND}
            if one.streamed is not None:
                row |= {"tokens_per_s": one.tokens_per_s, "goodput_per_s": one.goodput_per_s}
                row |= {
                    name: getattr(one.streamed, name.partition("_")[0]).samples for name in _COUNTS
                }
                row |= {f"{name}_us": one.latencies_us[name] for name in _TIME_COLUMNS}
            for use in one.steps:
                row |= {f"{use.step}_{name}": getattr(use, name) for name in _STEP}
            table.writerow({column: _as_text(value) for column, value in row.items()})
    return text.getvalue()


def _as_text(value: Any) -> Any:
    """A cell: a text that a spreadsheet would take for a formula is marked as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
