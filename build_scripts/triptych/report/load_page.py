"""The page of a bench, from the verdict down to where the numbers come from."""

from __future__ import annotations

from pathlib import Path

from triptych.bench.points import BenchResult, Point, StepUse, Subject
from triptych.bench.verdict import (
    best_point,
    bottleneck_of,
    closed_loops,
    headline,
    rates_say,
    verdict_of,
)
from triptych.formatting import amount, milliseconds, percent, plain, rounded, shown
from triptych.pipeline.slo import Slo
from triptych.report import load_figures as figures
from triptych.report import load_tables as tables
from triptych.report.bars import Bar, compared
from triptych.report.html import PROSE, document, facts, figure_of, section

STYLE = Path(__file__).with_name("load.css")


def page(result: BenchResult) -> str:
    """The whole page."""
    verdict = verdict_of(result)
    every = (*result.points, *result.baselines, *(result.rate.points if result.rate else ()))
    body = "".join(
        (
            _header(result),
            _curves(result),
            _rates(result),
            _budget(result),
            section("All loads", tables.all_points(result.points, result.slo)),
            section("Errors", tables.errors(every)),
            section("Warnings", tables.warnings(every)),
            _baselines(result),
            _cost(result),
            _resources(result),
            _batches(result),
            _traffic(result.subject),
            provenance(result.subject),
        )
    )
    title = f"{result.subject.pipeline}: {verdict.word.lower()}"
    return document(title, body, STYLE)


def _header(result: BenchResult) -> str:
    verdict = verdict_of(result)
    kind = {"met": "passed", "not met": "failed", "none": "accepted"}[verdict.kind]
    held = bottleneck_of(result.points)
    bottleneck = ""
    if held is not None:
        bottleneck = (
            f"<p>Bottleneck: {plain(held.kind)}. {shown(held.says, PROSE)} "
            f'<span class="remedy">{shown(held.remedy, PROSE) if held.remedy else ""}</span></p>'
        )
    subject = result.subject
    entries = {
        "Task": plain(subject.task),
        "Precision": plain(subject.precision),
        "Layout": plain(subject.layout),
        "Server": plain(subject.server),
        "Measured": plain(subject.measured_at),
    }
    return (
        f'<header><p class="eyebrow">Load test</p><h1>{shown(subject.pipeline)}</h1>'
        f'<div class="verdict {kind}"><p class="word">{verdict.word}</p>'
        f"<p>{promise(verdict.says)}</p><p>{plain(headline(result))}</p>{bottleneck}</div>"
        f"{facts('facts', entries)}</header>"
    )


def promise(text: object) -> str:
    """A promise as HTML, its signs as in print."""
    return plain(str(text).replace("<=", "≤"))


def _curves(result: BenchResult) -> str:
    """Closed loops: latency and queues over what was answered."""
    closed = closed_loops(result.points)
    other = sorted(
        (p for p in result.points if p.load.kind != "concurrency"), key=lambda p: p.load.value
    )
    parts = [
        _two(
            figures.latency("latency", closed, result.slo, rate=figures.achieved),
            "Each point a number of clients that send their next request when the last is "
            "answered. Thin lines: from the lowest to the highest round.",
            figures.queues("queues", closed, rate=figures.achieved),
            "Mean time a request waits in front of each step.",
        ),
        _two(
            figures.latency("open", other, result.slo, rate=figures.offered),
            "Requests sent at a given rate, whatever comes back.",
            figures.queues("open-queues", other, rate=figures.offered),
            "Mean time a request waits in front of each step.",
        ),
    ]
    return section("Throughput and latency", *parts)


def _two(first: str, caption: str, second: str, other_caption: str) -> str:
    """Two plots side by side, each where it has something to show."""
    drawn = [
        figure_of(svg, words) for svg, words in ((first, caption), (second, other_caption)) if svg
    ]
    return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""


def _rates(result: BenchResult) -> str:
    rate = result.rate
    if rate is None:
        return ""
    return section(
        "Highest rate",
        f"<p>{promise(rate.slo)} {plain(rates_say(rate))}. Requests arrive as a Poisson process: "
        "independent of each other and of the answers.</p>",
        _two(
            figures.latency("rates", rate.points, rate.slo, rate=figures.offered),
            "Latency over the rate that was offered. Dashed: the promise.",
            figures.queues("rate-queues", rate.points, rate=figures.offered),
            "Mean time a request waits in front of each step.",
        ),
        tables.rates(rate),
    )


def shown_points(result: BenchResult) -> list[Point]:
    """The best load and the largest; where they are the same, the lightest and that."""
    closed = closed_loops(result.points) or list(result.points)
    best = best_point(closed, result.slo)
    if best is None:
        return []
    first = closed[0] if best == closed[-1] else best
    return [first] if first == closed[-1] else [first, closed[-1]]


def _budget(result: BenchResult) -> str:
    drawn = [
        figure_of(svg, f"{plain(point.load).capitalize()}: {_share_of_queues(point)}")
        for index, point in enumerate(shown_points(result))
        if (svg := figures.budget(f"budget-{index}", point))
    ]
    if not drawn:
        return ""
    words = "<p>A request's mean time, part by part. Pale parts are waiting.</p>"
    return section("Where the time goes", words, f'<div class="pair">{"".join(drawn)}</div>')


def _share_of_queues(point: Point) -> str:
    parts = figures.mean_parts(point)
    whole = sum(part.us for part in parts)
    waits = sum(part.us for part in parts if part.what == "queue")
    share = percent(waits / whole) if whole > 0 else "none"
    return f"{milliseconds(whole)} ms in the mean, {share} of it in queues."


def _baselines(result: BenchResult) -> str:
    if not result.baselines:
        return ""
    best = best_point(result.points, Slo())
    held = [("own", best)] if best else []
    held += [("other", other) for other in result.baselines]
    bars = [
        Bar(
            f"{point.contender}, {point.load}",
            point.median("throughput_per_s"),
            f"{rounded(point.median('throughput_per_s'))}/s",
            kind,
        )
        for kind, point in held
    ]
    chart = compared("contenders", "Throughput of the pipeline and of the baselines", bars)
    return section(
        "Baselines",
        "<p>Measured in the same rounds. Each is compared with the pipeline at the same load, or "
        "with its best where there is none.</p>",
        figure_of(chart, "Requests answered a second.") if chart else "",
        tables.baselines(result.points, result.baselines),
    )


def _cost(result: BenchResult) -> str:
    if result.cost is None:
        return ""
    words = (
        "<p>A million inferences: an hour's price for the time they take at the full rate. "
        "A month: whole machines, paid for 730 hours.</p>"
    )
    return section("Cost", words, tables.cost(result.cost))


def _resources(result: BenchResult) -> str:
    return section("Resources", tables.resources(shown_points(result)))


def _batches(result: BenchResult) -> str:
    point = next(iter(reversed(shown_points(result))), None)
    if point is None:
        return ""
    drawn = [
        f"<div><h3>{shown(use.step)}</h3>{figure_of(svg, _mean_batch(use))}</div>"
        for index, use in enumerate(point.typical.steps)
        if (svg := figures.batches(f"batches-{index}", use))
    ]
    words = f"<p>Rows that each step ran at once, with {plain(point.load)}.</p>"
    return section("Batches", words, f'<div class="three">{"".join(drawn)}</div>') if drawn else ""


def _mean_batch(use: StepUse) -> str:
    return f"{rounded(use.mean_batch)} rows in the mean of {amount(use.executions, 'batch', 'es')}."


def _traffic(subject: Subject) -> str:
    said = f"<p>{amount(subject.requests, 'different request')}. "
    svg = figures.lengths("lengths", subject.lengths)
    if not svg:
        return section("Traffic", f"{said}Its rows have no lengths: they are of one size.</p>")
    padding = (
        f"{percent(subject.padding)} of the computed tokens are padding."
        if subject.padding
        else "No computed token is padding."
    )
    return section("Traffic", f"{said}{padding}</p>", figure_of(svg, "Tokens of the core's rows."))


def provenance(subject: Subject) -> str:
    """What was measured, and on what."""
    entries: dict[str, object] = {
        "Pipeline": subject.pipeline,
        "Task": subject.task,
        "Architecture": subject.architecture,
        "Layout": subject.layout,
        "Precision": subject.precision,
        "Server": subject.server,
        "Measured at": subject.measured_at,
    }
    entries |= {f"Set: {name}": value for name, value in subject.overrides.items()}
    entries |= {f"Machine: {name}": value for name, value in subject.machine.items()}
    entries |= subject.versions
    shown_entries = {name: shown(value) for name, value in entries.items()}
    return section("Provenance", facts("provenance", shown_entries))
