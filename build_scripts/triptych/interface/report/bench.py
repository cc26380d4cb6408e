"""Reports of a load test: page, JSON, CSV, and a Markdown summary beside the model card."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from markupsafe import Markup

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors, write_files
from triptych.base.formatting import NOTHING, milliseconds, number, percent, rounded
from triptych.interface.report.pages import render, write_report
from triptych.interface.report.plots import (
    Dot,
    PlotBar,
    Series,
    curves,
    histogram,
    waterfall,
)
from triptych.repository.manifest import FIGURES_FILE, build_id
from triptych.repository.records import json_text
from triptych.repository.store import locked
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    LoadPoint,
    Part,
    Resources,
    StepUse,
    Subject,
    closed_loop_points,
    collect_warnings,
    find_best_point,
    find_limiting_bottleneck,
    format_headline,
    format_point,
    format_rates,
    judge_slo,
    to_json,
)
from triptych.spec.slo import MOMENTS, PERCENTILES, AnySlo

_TIMES = ("ttft p50", "ttft p99", "itl p50", "itl p99")


def write_figures(result: BenchResult, repository: Path) -> str:
    """Write the summary beside the model card, if the measured build is still active.

    Returns:
        The file, or the reason why it was not written.
    """
    subject = result.subject
    file = repository / subject.pipeline / FIGURES_FILE
    try:
        with os_errors_as_user_errors(repository), locked(repository):
            if subject.build != build_id(repository, subject.pipeline):
                return f"{file} was not written: the pipeline was rebuilt since the measurement"
            write_files(file.parent, {FIGURES_FILE: figures(result)})
    except UserError as error:
        return f"{file} was not written: {error.message}"
    return str(file)


def figures(result: BenchResult) -> str:
    """Return the summary as Markdown: best result, each load, and the machine."""
    subject = result.subject
    others = [point for point in result.points if point.load.kind != "concurrency"]
    lines = [f"# Speed of {subject.pipeline}", "", f"{format_headline(result)}.", ""]
    if not result.slo.is_empty:
        lines += [judge_slo(result).explanation, ""]
    lines += ["| load | requests/s | p50, ms | p95, ms | p99, ms | errors |", "|" + " --- |" * 6]
    points = (*closed_loop_points(result.points), *others)
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
        "manifest).",
    ]
    return "\n".join(lines) + "\n"


def _tokens_row(point: LoadPoint) -> str:
    times = [milliseconds(point.latencies_us[name.replace(" ", "_")]) for name in _TIMES]
    rates = [rounded(point.median(name)) for name in ("tokens_per_s", "goodput_per_s")]
    return f"| {' | '.join([str(point.load), *rates, *times])} |"


def _row(point: LoadPoint) -> str:
    times = [milliseconds(point.median(f"{name}_us")) for name in ("p50", "p95", "p99")]
    rate = rounded(point.median("throughput_per_s"))
    return f"| {' | '.join([point.load_text, rate, *times, str(sum(point.errors.values()))])} |"


CURVES = ("p50", "p95", "p99")
"""Percentiles that the plots show."""

STEPS = {"preprocess": "s1", "core": "s2", "postprocess": "s3"}
"""CSS class of each step; other steps have another class."""

_CLOSED = (
    "Each point is a number of clients, which wait for a response before the next request. "
    "Thin lines: minimum to maximum of the rounds."
)
_OPEN = "Requests sent at a given rate, without waiting for responses."
_RATES = "Latency over the offered rate. Dashed: the SLO."

_TOKENS = {
    "ttft": "Time from the request to the first response with a token.",
    "itl": "Time between two responses of an answer. Dashed: the SLO.",
}

Plot = tuple[Markup, str]
Rate = Callable[[LoadPoint], float]


def page(result: BenchResult) -> str:
    rate = result.rate
    every = (*result.points, *(rate.points if rate else ()))
    closed = closed_loop_points(result.points)
    other = [point for point in result.points if point.load.kind != "concurrency"]
    other = sorted(other, key=lambda point: point.load.value)
    shown = shown_points(result)
    return render(
        "bench.html.j2",
        result=result,
        slo=result.slo,
        verdict=judge_slo(result),
        headline=format_headline(result),
        bottleneck=find_limiting_bottleneck(result.points),
        curves=[
            _two(closed, result.slo, achieved, ("latency", "queues"), _CLOSED),
            _two(other, result.slo, offered, ("open", "open-queues"), _OPEN),
        ],
        rate=rate,
        rates_say=format_rates(rate) if rate else "",
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
        warnings=collect_warnings(every),
        cost=cost_entries(result.cost) if result.cost else {},
        watched=[point for point in shown if point.typical.resources],
        resources=_resources(shown),
        # An engine batches streamed answers itself, so Triton's batch sizes are meaningless.
        batches=_batches(shown[-1]) if shown and not shown[-1].streamed else [],
        largest=shown[-1].load if shown else None,
        lengths=histogram(
            "lengths", "Lengths of rows", result.subject.lengths, axes=("tokens per row", "rows")
        ),
        origin=origin(result.subject),
    )


def achieved(point: LoadPoint) -> float:
    """Return the throughput in requests/s."""
    return point.median("throughput_per_s")


def offered(point: LoadPoint) -> float:
    """Return the offered load in requests/s."""
    return point.load.value


def latency(point: LoadPoint, percentile: str) -> str:
    """Return a latency percentile in ms; a dash without responses."""
    return milliseconds(point.median(f"{percentile}_us") if point.median("requests") else None)


def samples(point: LoadPoint, moment: str) -> int:
    """Return the number of samples of a latency metric, over all rounds."""
    if moment == "e2e":
        return sum(one.requests for one in point.rounds)
    return sum(getattr(one, moment).samples for one in point.streamed)


def _token_curves(points: Sequence[LoadPoint], slo: AnySlo) -> list[Plot]:
    """Return plots of first-token and inter-token latency over tokens/s, with their limits."""
    streamed = [point for point in points if point.streamed]
    plots = []
    for moment in ("ttft", "itl"):
        series = []
        for index, which in enumerate(CURVES, 1):
            dots = []
            for point in streamed:
                name = f"{moment}_{which}"
                rounds = [one.latencies_us.get(name, 0.0) / 1e3 for one in point.rounds]
                dots.append(
                    Dot(
                        x=point.median("tokens_per_s"),
                        y=point.latencies_us[name] / 1e3,
                        tip=f"{format_point(point)},"
                        f" {which} {milliseconds(median(rounds) * 1e3)} ms",
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
        title = f"{MOMENTS[moment].capitalize()} over tokens/s"
        axes = ("tokens/s", f"{MOMENTS[moment]}, ms")
        plots.append((curves(moment, title, series, axes=axes, limits=limits), _TOKENS[moment]))
    return plots


def shown_points(result: BenchResult) -> list[LoadPoint]:
    """Return the best and the largest load; if they are the same, the smallest and the largest."""
    closed = closed_loop_points(result.points) or list(result.points)
    best = find_best_point(closed, result.slo)
    if best is None:
        return []
    first = closed[0] if best == closed[-1] else best
    return [first] if first == closed[-1] else [first, closed[-1]]


def origin(subject: Subject) -> dict[str, object]:
    """Return name and value of each property of the pipeline and the machine."""
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
    """Return the name of a part, such as ``core queue``, ``core`` or ``transport``."""
    if part.what == "queue":
        return f"{part.where} queue"
    return part.where if part.what == "compute" else part.what


def cost_entries(found: Cost) -> dict[str, str]:
    """Return name and formatted value of each part of a cost."""
    money = f"{found.currency} "
    entries = {"Per million inferences": money + rounded(found.per_million)}
    if found.per_million_tokens is not None:
        entries["Per million generated tokens"] = money + rounded(found.per_million_tokens)
    entries |= {
        "At": f"{rounded(found.rate_per_s)} requests/s per device",
        "Price": f"{money}{rounded(found.price_per_hour)} per hour",
    }
    if found.monthly is not None:
        entries["Per month"] = f"{money}{rounded(found.monthly)}"
        entries["Requests per day"] = rounded(found.daily_requests)
    if found.machines is not None:
        entries["Machines"] = (
            f"{found.machines:,} for a peak of {rounded(found.peak_per_s)} requests/s"
        )
    if found.monthly is not None or found.machines is not None:
        entries["Headroom"] = percent(found.headroom)
    return entries


def latency_dot(point: LoadPoint, which: str, tip: str, *, rate: Rate, note: bool) -> Dot:
    """Return a latency percentile over the rate, with its rounds.

    With `note`, the number of clients is drawn beside the dot.
    """
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
    points: Sequence[LoadPoint], slo: AnySlo, rate: Rate, names: tuple[str, str], says: str
) -> list[Plot]:
    """Return plots of latency and queue time over the rate."""
    # Exclude loads without a response: they have no latency.
    points = [point for point in points if point.median("requests") > 0]
    closed = rate is achieved
    across = f"requests/s {'answered' if closed else 'offered'}"
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
            tip = f"{format_point(point)}, {which} {milliseconds(point.median(f'{which}_us'))} ms"
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
    return [(latency, says), (queues, "Mean queue time of a request at each step.")]


def _queue_dots(points: Sequence[LoadPoint], step: str, rate: Rate) -> Iterator[Dot]:
    for point in points:
        uses = [use for one in point.rounds for use in one.steps if use.step == step]
        if waits := [use.queue_us / 1e3 for use in uses]:
            tip = f"{point.load}: {step} {rounded(median(waits))} ms"
            yield Dot(rate(point), median(waits), tip, y_span=(min(waits), max(waits)))


def _budget(name: str, point: LoadPoint) -> Plot:
    """Return a plot of the parts of a request's mean time at one load, with its caption."""
    parts = [part for part in point.typical.parts if number(part.us) is not None]
    positive = sum(max(part.us, 0.0) for part in parts)
    whole = sum(part.us for part in parts)
    bars = []
    for part in parts:
        share = percent(part.us / positive if positive else 0.0)
        kind = f"{STEPS.get(part.where, 's4')}{' waits' if part.what == 'queue' else ''}"
        text = f"{milliseconds(part.us)} ms, {share}"
        bars.append(PlotBar(part_name(part), max(part.us, 0.0) / 1e3, text, kind))
    total = f"{milliseconds(whole)} ms"
    says = f"{str(point.load).capitalize()}: {total} on average"
    if not point.streamed:  # An engine does not report its queue.
        waits = sum(part.us for part in parts if part.what == "queue")
        says += f", {percent(waits / whole) if whole > 0 else 'none'} of it in queues"
    return waterfall(name, f"A request's time with {point.load}", bars, total), f"{says}."


def _resources(points: Sequence[LoadPoint]) -> dict[str, list[str]]:
    """Return CPU cores and memory of each process, at each point with measured resources."""
    columns = [_used(used) for point in points if (used := point.typical.resources)]
    names = dict.fromkeys(name for column in columns for name in column)
    return {
        name: [text for column in columns for text in column.get(name, (NOTHING, NOTHING))]
        for name in names
    }


def _used(used: Resources) -> dict[str, tuple[str, str]]:
    """Return formatted CPU cores and memory of each process, and of the machine."""
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


def _batches(point: LoadPoint) -> list[tuple[StepUse, Markup]]:
    """Return a histogram of batch sizes for each step that ran batches."""
    axes = ("rows per batch", "batches")
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
    """Write the report into `folder`; see `write_report`."""
    files = {"bench.json": json_text(to_json(result)), "bench.csv": as_csv(result)}
    return write_report(folder, page(result), files)


def as_csv(result: BenchResult) -> str:
    """Return CSV with a row for each point and round.

    Columns of steps may be empty. Columns of tokens exist only if answers were streamed.
    """
    points = [
        *(("pipeline", point) for point in result.points),
        *(("rate search", point) for point in (result.rate.points if result.rate else ())),
    ]
    steps = dict.fromkeys(use.step for _, p in points for one in p.rounds for use in one.steps)
    columns = [
        *("part", "load", "load_value", "burst", "round", "seconds", "requests"),
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


def _as_text(value: object) -> object:
    """Return a cell value; a text that looks like a formula is quoted for spreadsheets."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
