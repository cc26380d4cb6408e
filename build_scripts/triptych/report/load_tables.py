"""The tables of a bench: all points, baselines, resources, rates, cost."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.bench.points import Cost, Point, RateSearch, Resources
from triptych.bench.verdict import best_point, warnings_of
from triptych.formatting import NOTHING, amount, milliseconds, percent, plain, rounded, shown
from triptych.pipeline.slo import Slo
from triptych.report.html import facts, listed, table

_PERCENTILES = ("p50", "p90", "p95", "p99", "p99_9")
_TIMES = "\N{MULTIPLICATION SIGN}"


def n(head: str) -> str:
    """The head of a column of numbers."""
    return f'<span class="n">{head}</span>'


def all_points(points: Sequence[Point], slo: Slo, name: str = "Points") -> str:
    """Medians of the rounds, their lowest and highest below."""
    heads = ["Load", n("Requests/s"), *(n(f"{p.replace('_', '.')}, ms") for p in _PERCENTILES)]
    heads += [n("Errors"), "Stable"]
    if not slo.is_empty:
        heads.append("SLO")
    return table("points", name, heads, [_point(point, slo) for point in points])


def _point(point: Point, slo: Slo) -> str:
    rate = _cell(rounded(point.median("throughput_per_s")), _spread(point, "throughput_per_s", 1))
    times = "".join(
        _cell(_latency(point, p), _spread(point, f"{p}_us", 1e-3)) for p in _PERCENTILES
    )
    failed = sum(point.errors.values())
    errors = f'<span class="bad">{failed:,}</span>' if failed else "0"
    held = "" if slo.is_empty else f"<td>{held_mark(held=point.meets(slo))}</td>"
    return (
        f'<tr><th scope="row">{plain(point.load)}<span class="says">'
        f"{amount(len(point.rounds), 'round')}</span></th>{rate}{times}"
        f'<td class="n">{errors}</td><td>{_stable(point)}</td>{held}</tr>'
    )


def _cell(value: str, spread: str) -> str:
    return f'<td class="n">{value}{spread}</td>'


def _latency(point: Point, percentile: str) -> str:
    """In milliseconds; of no answer there is none."""
    return milliseconds(point.median(f"{percentile}_us") if point.median("requests") else None)


def _spread(point: Point, name: str, scale: float) -> str:
    if len(point.rounds) < 2 or not point.median("requests"):
        return ""
    low, high = (rounded(end * scale) for end in point.span(name))
    return f'<span class="says">{low} to {high}</span>'


def _stable(point: Point) -> str:
    told = [one.is_stable for one in point.rounds if one.is_stable is not None]
    if not told:
        return f'<span class="quiet">{NOTHING}</span>'
    if all(told):
        return "yes"
    return f'<span class="warn">{sum(told)} of {len(told)}</span>'


def held_mark(*, held: bool) -> str:
    """A cell that says whether a promise holds, in colour and in words."""
    return f'<span class="{"good" if held else "bad"}">{"✓ holds" if held else "✗ broken"}</span>'


def errors(points: Sequence[Point]) -> str:
    """Every kind of error with how often it came at which load; "" where there were none."""
    rows = [
        f'<tr><th scope="row">{shown(kind)}</th><td>{plain(point.contender)}</td>'
        f'<td>{plain(point.load)}</td><td class="n">{count:,}</td></tr>'
        for point in points
        for kind, count in point.errors.items()
    ]
    heads = ["Error", "Contender", "Load", n("Times")]
    return table("errors", "Errors", heads, rows) if rows else ""


def warnings(points: Sequence[Point]) -> str:
    """What to know before the figures are used; "" where there is nothing."""
    return listed("notes", warnings_of(points))


def baselines(points: Sequence[Point], others: Sequence[Point]) -> str:
    """What is compared with, and how many times as fast the pipeline is."""
    heads = ["Contender", "Load", n("Requests/s"), n("p50, ms"), n("p99, ms"), n("Pipeline is")]
    rows = []
    for other in others:
        rival = rival_of(points, other)
        cells = [
            rounded(other.median("throughput_per_s")) + _spread(other, "throughput_per_s", 1),
            _latency(other, "p50"),
            _latency(other, "p99"),
            times_as_fast(rival, other),
        ]
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(
            f'<tr><th scope="row">{shown(other.contender)}</th>'
            f"<td>{plain(other.load)}</td>{numbers}</tr>"
        )
    return table("baselines", "Baselines", heads, rows)


def rival_of(points: Sequence[Point], other: Point) -> Point | None:
    """The pipeline's point at the same load, else its best."""
    same = [point for point in points if point.load == other.load]
    return same[0] if same else best_point(points, Slo())


def times_as_fast(rival: Point | None, other: Point) -> str:
    """``2.31 x as fast``: throughput of the pipeline over that of `other`."""
    rate = other.median("throughput_per_s")
    if rival is None or rate <= 0 or not rival.median("requests"):
        return NOTHING
    return f"{rounded(rival.median('throughput_per_s') / rate)}\N{NO-BREAK SPACE}{_TIMES} as fast"


def resources(shown_points: Sequence[Point]) -> str:
    """Cores and memory by process at each of `shown_points`; "" where nothing was watched."""
    watched = [
        (point, used) for point in shown_points if (used := point.typical.resources) is not None
    ]
    if not watched:
        return ""
    columns = [_used(used) for _, used in watched]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = ["Process"]
    for point, _ in watched:
        heads += [n(f"Cores, {plain(point.load)}"), n("Memory, MiB")]
    rows = []
    for name in names:
        cells = "".join(
            f'<td class="n">{cell}</td>'
            for column in columns
            for cell in column.get(name, (NOTHING, NOTHING))
        )
        rows.append(f'<tr><th scope="row">{shown(name)}</th>{cells}</tr>')
    return table("resources", "Resources", heads, rows)


def _used(used: Resources) -> dict[str, tuple[str, str]]:
    """Name to cores and memory, for people."""
    found = {
        process.name: (rounded(process.cpu_cores), rounded(process.memory_mib))
        for process in used.processes
    }
    found["load generator"] = (rounded(used.client_cpu_cores), NOTHING)
    if used.machine_cpu is not None:
        busy = f"{percent(used.machine_cpu)} of {used.cores}"
        found["whole machine"] = (busy, NOTHING)
    for gpu in used.gpus:
        found[f"GPU {gpu.name}"] = (f"{percent(gpu.utilization)} busy", rounded(gpu.memory_mib))
    return found


def rates(rate: RateSearch) -> str:
    """Every rate tried: whether the promise held, and its figures."""
    heads = ["Offered", n("Answered/s"), n("p50, ms"), n("p95, ms"), n("p99, ms"), "SLO"]
    rows = []
    for point in rate.points:
        times = "".join(f'<td class="n">{_latency(point, p)}</td>' for p in ("p50", "p95", "p99"))
        held = point.load.value <= rate.highest_per_s
        rows.append(
            f'<tr><th scope="row">{plain(point.load)}</th>'
            f'<td class="n">{rounded(point.median("throughput_per_s"))}</td>{times}'
            f"<td>{held_mark(held=held)}</td></tr>"
        )
    return table("rates", "Rates", heads, rows) if rows else ""


def cost(found: Cost) -> str:
    """The price of a million inferences, of a month, and how many machines."""
    return facts("facts", {name: plain(value) for name, value in cost_entries(found).items()})


def cost_entries(found: Cost) -> dict[str, str]:
    """What to tell of a cost: name to value, for people."""
    money = f"{found.currency} "
    entries = {
        "A million inferences": money + rounded(found.per_million),
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
