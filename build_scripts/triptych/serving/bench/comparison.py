"""Compare two results of bench by the confidence intervals of their rounds, and compute costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import JsonValue

from triptych.base.confidence import MARGIN, Ratio, separate_ratio
from triptych.base.errors import UserError
from triptych.serving.bench.results import (
    BenchResult,
    Cost,
    LoadPoint,
    Measurement,
    OfferedLoad,
    RateSearch,
    StepUse,
    read_result,
    to_json,
)

Significance = Literal["better", "worse", "changed", "within 10 %", "same", "cannot tell"]
Better = Literal["higher", "lower", ""]
_SUBJECT = ("pipeline", "task", "architecture", "precision", "layout", "server", "requests")


@dataclass(frozen=True)
class MetricChange:
    """Medians of a metric before and after.

    The weight is ``better`` or ``worse`` (``changed`` for metrics without a direction) only if the
    confidence interval of the ratio excludes 1, and ``within 10 %`` only if the whole interval is.
    """

    name: str  # name with unit, such as `p99 ms`
    before: float
    after: float
    ratio: Ratio | None  # ratio of `after` to `before`; None if a value is 0
    weight: Significance
    of_step: bool = False  # whether it is a server-side metric of a step


@dataclass(frozen=True)
class ComparedPoint:
    """A load that both results contain."""

    load: OfferedLoad
    changes: tuple[MetricChange, ...]


@dataclass(frozen=True)
class BenchComparison:
    before: str  # pipeline and time of the first result
    after: str
    pairs: tuple[ComparedPoint, ...]  # points of both results, in the order of the second
    totals: tuple[MetricChange, ...]
    """Highest rate and cost, if both results have the same SLO or price."""
    only_before: tuple[str, ...]  # points of the first result only
    only_after: tuple[str, ...]
    differences: dict[str, tuple[str, str]]  # differences of the subjects, before and after
    warnings: tuple[str, ...]  # other reasons for changes than the pipeline, and missing evidence

    def as_dict(self) -> JsonValue:
        return to_json(self)


def read_bench(path: Path) -> BenchResult:
    """Return the result in a ``bench.json`` or in its folder.

    Raises:
        UserError: The file does not exist or has another format.
    """
    return read_result(BenchResult, path / "bench.json" if path.is_dir() else path, "bench")


def compare_results(before: BenchResult, after: BenchResult) -> BenchComparison:
    """Compare two results, also of pipelines with different names."""
    first, second = ({point.load: point for point in each.points} for each in (before, after))
    both = [load for load in second if load in first]
    return BenchComparison(
        before=f"{before.subject.pipeline}, {before.subject.measured_at}",
        after=f"{after.subject.pipeline}, {after.subject.measured_at}",
        pairs=tuple(ComparedPoint(load, _changes(first[load], second[load])) for load in both),
        totals=_totals(before, after),
        only_before=tuple(str(load) for load in first if load not in second),
        only_after=tuple(str(load) for load in second if load not in first),
        differences=_differences(before, after),
        warnings=(
            *_warnings(before, after),
            *_missing_evidence([(first[load], second[load]) for load in both]),
        ),
    )


def _changes(before: LoadPoint, after: LoadPoint) -> tuple[MetricChange, ...]:
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
    stable = _is_stable_pair(before, after)
    found = [
        _compare([*map(read, before.rounds)], [*map(read, after.rounds)], name, up, stable=stable)
        for name, read, up in figures
    ]
    for step in dict.fromkeys(use.step for one in before.rounds for use in one.steps):
        ours, theirs = (
            [use for one in point.rounds for use in one.steps if use.step == step]
            for point in (before, after)
        )
        for name, of, up in _STEP_FIGURES if theirs else ():
            values = [*map(of, ours)], [*map(of, theirs)]
            change = _compare(*values, f"{step} {name}", up, stable=stable)
            found.append(replace(change, of_step=True))
    return tuple(found)


_STEP_FIGURES: tuple[tuple[str, Callable[[StepUse], float], Better], ...] = (
    ("queue ms", lambda use: use.queue_us / 1e3, "lower"),
    ("compute ms", lambda use: use.compute_us / 1e3, "lower"),
    ("batch", lambda use: use.mean_batch, ""),
)


def _failed(one: Measurement) -> float:
    """Return the percentage of failed requests of a round."""
    failed = sum(one.errors.values())
    return 100 * failed / (failed + one.requests) if failed else 0.0


def _compare(
    before: Sequence[float], after: Sequence[float], name: str, better: Better, *, stable: bool
) -> MetricChange:
    """Compare a metric of all rounds before and after."""
    ratio = separate_ratio(before, after) if min(*before, *after) > 0 else None
    if min(len(before), len(after)) > 1 and sorted(before) == sorted(after):
        weight: Significance = "same"
    elif not stable:
        weight = "cannot tell"
    elif ratio is not None:
        weight = _weigh(ratio, better)
    else:
        weight = _weigh_zeros(before, after, better)
    return MetricChange(name, float(median(before)), float(median(after)), ratio, weight)


def _weigh(ratio: Ratio, better: Better) -> Significance:
    if ratio.is_between(1 / (1 + MARGIN), 1 + MARGIN):
        return "within 10 %"
    side = ratio.side_of(1.0)
    return "cannot tell" if side == "open" else _direction(better, is_higher=side == "above")


def _direction(better: Better, *, is_higher: bool) -> Significance:
    if not better:
        return "changed"
    return "better" if is_higher == (better == "higher") else "worse"


MIN_SEPARATE_ROUNDS = 3
"""Minimum number of rounds of each side that are all lower or all higher than the other side's.

By chance, the three highest of six rounds are of one given side with a probability of 5 %."""


def _weigh_zeros(before: Sequence[float], after: Sequence[float], better: Better) -> Significance:
    """Return the weight of a metric that may be 0, such as the errors."""
    if min(len(before), len(after)) < MIN_SEPARATE_ROUNDS:
        return "cannot tell"
    if min(after) > max(before):
        return _direction(better, is_higher=True)
    return _direction(better, is_higher=False) if max(after) < min(before) else "cannot tell"


def _totals(before: BenchResult, after: BenchResult) -> tuple[MetricChange, ...]:
    found = []
    if before.rate and after.rate and before.rate.slo == after.rate.slo:
        ratio = _compare_rates(before.rate, after.rate)
        weight: Significance = "cannot tell" if ratio is None else _weigh(ratio, "higher")
        old, new = before.rate.highest_per_s, after.rate.highest_per_s
        found.append(MetricChange("highest rate/s", old, new, ratio, weight))
    first, last = before.cost, after.cost
    if first and last and first.has_price_of(last):
        was, now = first.per_million, last.per_million
        # The cost derives from the rate, so it has the same significance.
        weight = found[0].weight if found else "cannot tell"
        found.append(MetricChange(f"{last.currency} a million", was, now, None, weight))
    return tuple(found)


def _compare_rates(before: RateSearch, after: RateSearch) -> Ratio | None:
    """Return the ratio of the highest rates, each between its highest met and lowest missed."""
    old, new = before.highest_per_s, after.highest_per_s
    if not old or not new:
        return None
    if before.lowest_broken_per_s is None or after.lowest_broken_per_s is None:
        return Ratio(new / old, None, 1, None)
    bounds = new / before.lowest_broken_per_s, after.lowest_broken_per_s / old
    return Ratio(new / old, bounds, 1, None)


def _conditions(result: BenchResult) -> dict[str, str]:
    subject = result.subject
    found = {name: str(getattr(subject, name)) for name in _SUBJECT}
    found |= {name: str(value) for name, value in subject.overrides.items()}
    found |= {f"machine {name}": value for name, value in subject.machine.items()}
    found |= {f"version of {name}": value for name, value in subject.versions.items()}
    return found | {"slo": str(result.slo)}


def _differences(before: BenchResult, after: BenchResult) -> dict[str, tuple[str, str]]:
    ours, theirs = _conditions(before), _conditions(after)
    names = dict.fromkeys([*ours, *theirs])
    pairs = {name: (ours.get(name, "not set"), theirs.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _warnings(before: BenchResult, after: BenchResult) -> tuple[str, ...]:
    ours, theirs = before.subject, after.subject
    found = []
    if ours.machine != theirs.machine:
        found.append("the machines differ, which affects every change")
    if (ours.requests, ours.lengths) != (theirs.requests, theirs.lengths):
        found.append("the traffic differs, which affects every change")
    if ours.server != theirs.server:
        found.append("the servers differ, which affects every change")
    return tuple(found)


def _missing_evidence(pairs: Sequence[tuple[LoadPoint, LoadPoint]]) -> Iterator[str]:
    """Yield why nothing is said about some loads, and what it takes."""
    unstable = [str(after.load) for before, after in pairs if not _is_stable_pair(before, after)]
    if unstable:
        yield (
            f"cannot tell at {', '.join(unstable)}: rounds were unstable; use a quiet machine or"
            " longer --window-seconds"
        )
    few = [str(two.load) for one, two in pairs if min(len(one.rounds), len(two.rounds)) < 2]
    if few:
        yield f"cannot tell at {', '.join(few)}: one round does not show the noise; use --rounds 3"


def _is_stable_pair(before: LoadPoint, after: LoadPoint) -> bool:
    """Return whether no round of either result was marked unstable."""
    return all(one.is_stable is not False for one in (*before.rounds, *after.rounds))


HOURS_A_MONTH = 365 / 12 * 24  # 730

_SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Price:
    """Price of one device and the expected volume."""

    price_per_hour: float
    daily_requests: float | None = None  # requests per day; None omits the monthly cost
    peak_per_s: float | None = None  # peak requests per second; None omits the number of machines
    _: KW_ONLY
    currency: str
    headroom: float  # unused share of each machine's rate, at least 0 and below 1

    def cost(self, rate_per_s: float, tokens: float | None = None) -> Cost | None:
        """Return the cost per million requests and per month; None if the rate is 0.

        The cost of a million requests assumes the full rate, without idle time and headroom. A
        month has 730 hours (365 days / 12) of whole machines. Their number is the peak rate, or
        else the day's mean rate, divided by the sustained rate minus `headroom`, rounded up.
        Network, storage and spare machines are not included.

        Args:
            rate_per_s: Sustained requests per second of one device, within the SLO if there is one.
            tokens: Mean number of tokens of an answer; None without text generation.

        Raises:
            UserError: A number is out of range.
        """
        if rate_per_s == 0:
            return None
        _above_zero(
            "rate", rate_per_s, "Lower the load or the SLO, so that a rate can be sustained"
        )
        _above_zero("price", self.price_per_hour, "Give the price of the device per hour")
        if self.daily_requests is not None:
            _above_zero("daily requests", self.daily_requests, "Omit it if it is unknown")
        if self.peak_per_s is not None:
            _above_zero("peak rate", self.peak_per_s, "Omit it if it is unknown")
        if not 0 <= self.headroom < 1:
            remedy = "Use for example 0.3 to keep 30 % of each machine free"
            raise UserError(
                "headroom", "must be from 0 up to 1", given=self.headroom, remedy=remedy
            )
        mean = None if self.daily_requests is None else self.daily_requests / _SECONDS_A_DAY
        if mean is not None and self.peak_per_s is not None and self.peak_per_s < mean:
            raise UserError(
                "peak rate",
                "must be at least the mean rate of the day",
                given=f"{self.peak_per_s:g}/s, and {self.daily_requests:g} a day are {mean:.4g}/s",
                remedy="Give the rate of the busiest seconds",
            )
        usable = rate_per_s * (1 - self.headroom)
        machines = None if self.peak_per_s is None else _machines(self.peak_per_s, usable)
        monthly = None
        if mean is not None:
            monthly = (machines or _machines(mean, usable)) * HOURS_A_MONTH * self.price_per_hour
        per_million = self.price_per_hour / 3600 / rate_per_s * 1e6
        return Cost(
            rate_per_s=rate_per_s,
            price_per_hour=self.price_per_hour,
            per_million=per_million,
            monthly=monthly,
            machines=machines,
            currency=self.currency,
            daily_requests=self.daily_requests,
            peak_per_s=self.peak_per_s,
            headroom=self.headroom,
            per_million_tokens=per_million / tokens if tokens else None,
        )


def core_ms_per_request(one: Measurement) -> float | None:
    """Return the server's processor time per request, in core milliseconds; None if unknown."""
    used = one.resources
    if used is None or not used.processes or not one.throughput_per_s:
        return None
    return 1e3 * sum(process.cpu_cores for process in used.processes) / one.throughput_per_s


def gpu_ms_per_request(one: Measurement) -> float | None:
    """Return the GPU time per request, in milliseconds; None without GPUs.

    Other work on the machine's GPUs counts too.
    """
    used = one.resources
    if used is None or not used.gpus or not one.throughput_per_s:
        return None
    return 1e3 * sum(gpu.utilization for gpu in used.gpus) / one.throughput_per_s


def _machines(per_s: float, usable_per_s: float) -> int:
    """Return the number of machines, rounded up except for floating-point errors."""
    return max(1, ceil(per_s / usable_per_s * (1 - 1e-12)))


def _above_zero(field: str, value: float, remedy: str) -> None:
    if not (isfinite(value) and value > 0):
        raise UserError(field, "must be above 0", given=value, remedy=remedy)
