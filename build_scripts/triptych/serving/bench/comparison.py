"""Two results side by side: what changed, and whether it is more than the noise of the rounds.

What inferences cost: money on a device, devices for a load, time of cores and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import JsonValue

from triptych.base.errors import UserError
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    Load,
    Measurement,
    Point,
    StepUse,
    read_result,
    to_json,
)

Weight = Literal[
    "better", "worse", "changed", "within noise", "same", "one round: cannot tell", "cannot tell"
]
Better = Literal["higher", "lower", ""]
_SUBJECT = ("pipeline", "task", "architecture", "precision", "layout", "server", "requests")


@dataclass(frozen=True)
class Change:
    """One figure before and after: medians of the rounds.

    The weight is ``better`` or ``worse`` (``changed`` where neither is) only where all rounds of
    one are beyond all of the other, by more than either's rounds are apart.
    """

    name: str  # with its unit, as `p99 ms`
    before: float
    after: float
    relative: float | None  # share of `before` it grew by; None where that is 0
    weight: Weight
    of_step: bool = False  # a figure of a step, as the server counts, not of the client


@dataclass(frozen=True)
class Pair:
    """A contender at a load that both results hold."""

    contender: str
    load: Load
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    before: str  # pipeline and time of the first
    after: str
    pairs: tuple[Pair, ...]  # what both measured, in the order of the second
    totals: tuple[Change, ...]
    """Highest rate and cost, where both have them for the same promise or price."""
    only_before: tuple[str, ...]  # contenders at loads that only the first measured
    only_after: tuple[str, ...]
    differences: dict[str, tuple[str, str]]  # between the subjects, each before and after
    warnings: tuple[str, ...]  # why figures may differ for another reason than the pipeline

    def as_dict(self) -> JsonValue:
        return to_json(self)


def read_bench(path: Path) -> BenchResult:
    """The result in a ``bench.json``, or in the folder that holds one.

    Raises:
        UserError: there is none, or it is of another form.
    """
    return read_result(BenchResult, path / "bench.json" if path.is_dir() else path, "bench")


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """What changed between two results; the pipelines are one contender, whatever their names."""
    first, second = _contenders(before), _contenders(after)
    both = [key for key in second if key in first]
    name = after.subject.pipeline
    return Comparison(
        before=f"{before.subject.pipeline}, {before.subject.measured_at}",
        after=f"{name}, {after.subject.measured_at}",
        pairs=tuple(
            Pair(key[0] or name, key[1], _changes(first[key], second[key])) for key in both
        ),
        totals=_totals(before, after),
        only_before=tuple(_named(key, before) for key in first if key not in second),
        only_after=tuple(_named(key, after) for key in second if key not in first),
        differences=_differences(before, after),
        warnings=_warnings(before, after),
    )


Key = tuple[str, Load]


def _contenders(result: BenchResult) -> dict[Key, Point]:
    """Contender ("" for the pipeline) and load to its point."""
    own: dict[Key, Point] = {("", point.load): point for point in result.points}
    return own | {(point.contender, point.load): point for point in result.baselines}


def _named(key: Key, result: BenchResult) -> str:
    return f"{key[0] or result.subject.pipeline}, {key[1]}"


def _changes(before: Point, after: Point) -> tuple[Change, ...]:
    figures: list[tuple[str, Callable[[Measurement], float], Better]] = [
        ("requests/s", lambda one: one.throughput_per_s, "higher"),
        ("p50 ms", lambda one: one.p50_us / 1e3, "lower"),
        ("p99 ms", lambda one: one.p99_us / 1e3, "lower"),
    ]
    if before.streamed and after.streamed:
        figures += [
            ("tokens/s", lambda one: one.tokens_per_s, "higher"),
            ("goodput/s", lambda one: one.goodput_per_s, "higher"),
            ("first token p99 ms", lambda one: one.latencies_us.get("ttft_p99", 0) / 1e3, "lower"),
            ("inter-token p99 ms", lambda one: one.latencies_us.get("itl_p99", 0) / 1e3, "lower"),
        ]
    if before.errors or after.errors:
        figures.append(("errors %", _failed, "lower"))
    found = [
        change_between(name, [*map(read, before.rounds)], [*map(read, after.rounds)], up)
        for name, read, up in figures
    ]
    for step in dict.fromkeys(use.step for one in before.rounds for use in one.steps):
        ours, theirs = (
            [use for one in point.rounds for use in one.steps if use.step == step]
            for point in (before, after)
        )
        for name, of, up in _STEP_FIGURES if theirs else ():
            change = change_between(f"{step} {name}", [*map(of, ours)], [*map(of, theirs)], up)
            found.append(replace(change, of_step=True))
    return tuple(found)


_STEP_FIGURES: tuple[tuple[str, Callable[[StepUse], float], Better], ...] = (
    ("queue ms", lambda use: use.queue_us / 1e3, "lower"),
    ("compute ms", lambda use: use.compute_us / 1e3, "lower"),
    ("batch", lambda use: use.mean_batch, ""),
)


def _failed(one: Measurement) -> float:
    """Percent of the requests of a round that ended in an error."""
    failed = sum(one.errors.values())
    return 100 * failed / (failed + one.requests) if failed else 0.0


def change_between(
    name: str, before: Sequence[float], after: Sequence[float], better: Better
) -> Change:
    """One figure of all rounds before, and of all after."""
    old, new = float(median(before)), float(median(after))
    relative = new / old - 1 if old else None
    return Change(name, old, new, relative, _weight(before, after, better))


def _weight(before: Sequence[float], after: Sequence[float], better: Better) -> Weight:
    if min(len(before), len(after)) < 2:
        return "one round: cannot tell"
    grown = median(after) - median(before)
    if not grown:
        return "same"
    apart = min(after) > max(before) or max(after) < min(before)
    spread = max(max(before) - min(before), max(after) - min(after))
    if not apart or abs(grown) <= spread:
        return "within noise"
    if not better:
        return "changed"
    return "better" if (grown > 0) == (better == "higher") else "worse"


def _totals(before: BenchResult, after: BenchResult) -> tuple[Change, ...]:
    found = []
    if before.rate and after.rate and before.rate.slo == after.rate.slo:
        # A search only brackets the rate: the bracket is its noise.
        old, new = (
            (rate.highest_per_s, rate.lowest_broken_per_s or rate.highest_per_s)
            for rate in (before.rate, after.rate)
        )
        relative = new[0] / old[0] - 1 if old[0] else None
        weight = _weight(old, new, "higher")
        found.append(Change("highest rate/s", old[0], new[0], relative, weight))
    first, last = before.cost, after.cost
    if (
        first
        and last
        and (first.currency, first.price_per_hour)
        == (
            last.currency,
            last.price_per_hour,
        )
    ):
        was, now = first.per_million, last.per_million
        # The cost is the rate in other words, and no surer than it.
        weight = found[0].weight if found else "cannot tell"
        found.append(Change(f"{last.currency} a million", was, now, now / was - 1, weight))
    return tuple(found)


def _facts(result: BenchResult) -> dict[str, str]:
    subject = result.subject
    found = {name: str(getattr(subject, name)) for name in _SUBJECT}
    found |= {name: str(value) for name, value in subject.overrides.items()}
    found |= {f"machine {name}": value for name, value in subject.machine.items()}
    found |= {f"version of {name}": value for name, value in subject.versions.items()}
    return found | {"slo": str(result.slo)}


def _differences(before: BenchResult, after: BenchResult) -> dict[str, tuple[str, str]]:
    ours, theirs = _facts(before), _facts(after)
    names = dict.fromkeys([*ours, *theirs])
    pairs = {name: (ours.get(name, "not set"), theirs.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _warnings(before: BenchResult, after: BenchResult) -> tuple[str, ...]:
    ours, theirs = before.subject, after.subject
    found = []
    if ours.machine != theirs.machine:
        found.append("the machines differ: their speed is part of every change")
    if (ours.requests, ours.lengths) != (theirs.requests, theirs.lengths):
        found.append("the traffic differs: longer or other requests take another time")
    if ours.server != theirs.server:
        found.append("the servers differ: their release or place is part of every change")
    return tuple(found)


HOURS_A_MONTH = 365 / 12 * 24  # 730

_SECONDS_A_DAY = 86_400


def cost_of(
    rate_per_s: float,
    *,
    price_per_hour: float,
    currency: str = "USD",
    daily_requests: float | None = None,
    peak_per_s: float | None = None,
    headroom: float = 0.3,
    tokens_per_s: float | None = None,
) -> Cost:
    """What a device that sustains `rate_per_s` makes of a price.

    A million inferences cost what the device costs for the time they take at the full rate: no
    idle time, no headroom. A month has 730 hours (365 days over 12), and whole machines are paid
    for all of them. There are as many as the rate needs with `headroom` kept free on each, at least
    one: the rate is the peak's where one is given, else the day's mean. Only devices are counted:
    no network, storage or spare machine.

    Args:
        rate_per_s: requests a second of one device, at the promise where there is one.
        price_per_hour: of one device.
        currency: a word to print.
        daily_requests: requests a day; without it there is no cost of a month.
        peak_per_s: most requests a second; without it machines are not told.
        headroom: share of each machine's rate that is kept free, 0 up to 1.
        tokens_per_s: generated at that rate; without it there is no cost of tokens.

    Raises:
        UserError: a number that no device or load can have.
    """
    _above_zero("rate", rate_per_s, "No rate held, so nothing can be priced")
    _above_zero("price", price_per_hour, "Give what an hour of the device costs")
    if daily_requests is not None:
        _above_zero("daily requests", daily_requests, "Leave it out where it is not known")
    if peak_per_s is not None:
        _above_zero("peak rate", peak_per_s, "Leave it out where it is not known")
    if not 0 <= headroom < 1:
        remedy = "0.3 keeps three tenths of each machine free"
        raise UserError("headroom", "must be from 0 up to 1", given=headroom, remedy=remedy)
    mean = None if daily_requests is None else daily_requests / _SECONDS_A_DAY
    if mean is not None and peak_per_s is not None and peak_per_s < mean:
        raise UserError(
            "peak rate",
            "must be at least the mean rate of the day",
            given=f"{peak_per_s:g}/s, and {daily_requests:g} a day are {mean:.4g}/s",
            remedy="Give the rate of the busiest seconds",
        )
    usable = rate_per_s * (1 - headroom)
    machines = None if peak_per_s is None else _machines(peak_per_s, usable)
    monthly = None
    if mean is not None:
        monthly = (machines or _machines(mean, usable)) * HOURS_A_MONTH * price_per_hour
    return Cost(
        rate_per_s=rate_per_s,
        price_per_hour=price_per_hour,
        per_million=price_per_hour / 3600 / rate_per_s * 1e6,
        monthly=monthly,
        machines=machines,
        currency=currency,
        daily_requests=daily_requests,
        peak_per_s=peak_per_s,
        headroom=headroom,
        per_million_tokens=price_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else None,
    )


def core_ms(one: Measurement) -> float | None:
    """Processor time of the server for a request, in ms of a core; None where nobody watched it."""
    used = one.resources
    if used is None or not used.processes or not one.throughput_per_s:
        return None
    return 1e3 * sum(process.cpu_cores for process in used.processes) / one.throughput_per_s


def gpu_ms(one: Measurement) -> float | None:
    """Time that GPUs were busy for a request, in ms; None where the server tells of none.

    The GPUs are the machine's: what others do on them counts, too.
    """
    used = one.resources
    if used is None or not used.gpus or not one.throughput_per_s:
        return None
    return 1e3 * sum(gpu.utilization for gpu in used.gpus) / one.throughput_per_s


def _machines(per_s: float, usable_per_s: float) -> int:
    """Whole machines; a rounding error of the division is no machine."""
    return max(1, ceil(per_s / usable_per_s * (1 - 1e-12)))


def _above_zero(field: str, value: float, remedy: str) -> None:
    if not (isfinite(value) and value > 0):
        raise UserError(field, "must be above 0", given=value, remedy=remedy)
