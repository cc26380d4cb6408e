"""What would suit new traffic better, by arithmetic alone: settings for ``tuned.yaml``.

Of the values that `tune` would try, those that `plan.cost` can price; their effect is what
`tune.capacity` makes of it. What only a measurement tells is left to `tune`.

What a measured capacity becomes when a request of the core takes more work, or less.

An estimate: the work of the core grows with its tokens, and all waiting grows with the work.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import JsonValue

from triptych.base.errors import UserError
from triptych.operate.tune.fields import Evidence, Propose, Skip, bucket_count, layout
from triptych.operate.tune.results import TuneResult
from triptych.serving.bench.results import BenchResult, Point, RateSearch, Subject, read_result
from triptych.spec.plan import Plan, expected_cost, make_plan
from triptych.spec.slo import PERCENTILES, AnySlo
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import TUNED_FILE

_STEPS = 1000

Curves = Mapping[str, Sequence[float]]
"""Name of a percentile to its values, in microseconds, one a rate."""


@dataclass(frozen=True)
class MeasuredLoad:
    """What a load test found of a build of the pipeline."""

    highest_per_s: float  # that it can answer; within the promise, where there is one
    slo: AnySlo
    points: tuple[Point, ...]  # Poisson rates ascending, for the latencies; may be empty
    core_share: float | None  # of the steps' work; None where the server did not tell
    row_tokens: float | None = None  # computed for a row of its load; None where that is unknown

    @classmethod
    def of(
        cls,
        points: Sequence[Point],
        rate: RateSearch | None,
        slo: AnySlo,
        subject: Subject | None = None,
    ) -> MeasuredLoad:
        """What bench or tune found.

        Args:
            points: of the pipeline in closed loops.
            rate: the search for the highest rate, where there was one.
            slo: the promise; that of `rate` goes before it.
            subject: what was measured; None takes it for the pipeline as it is.
        """
        tried = rate.points if rate is not None else ()
        shares = [share for share in map(_core_share, (*points, *tried)) if share is not None]
        # A server that was too slow for any answer has percentiles that are no numbers.
        usable = [point for point in tried if all(map(isfinite, point.latencies_us.values()))]
        best = max((point.median("throughput_per_s") for point in points), default=0.0)
        return cls(
            highest_per_s=best if rate is None else rate.highest_per_s,
            slo=slo if rate is None else rate.slo,
            points=tuple(sorted(usable, key=lambda point: point.load.value)),
            core_share=float(np.median(shares)) if shares else None,
            row_tokens=None if subject is None else _row_tokens(subject),
        )


def _row_tokens(subject: Subject) -> float | None:
    rows = sum(subject.lengths.values())
    tokens = sum(length * count for length, count in subject.lengths.items())
    return tokens / rows / (1.0 - subject.padding) if tokens else None


def measured_in(reports: Path) -> MeasuredLoad | None:
    """The last result of bench or tune below a pipeline's folder of reports; None for none.

    Raises:
        UserError: it is not one that this version wrote.
    """
    files = [reports / "bench/bench.json", reports / "tune/tune.json"]
    newest = max(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    try:
        if newest.name == "bench.json":
            bench = read_result(BenchResult, newest, "bench")
            return MeasuredLoad.of(bench.points, bench.rate, bench.slo, bench.subject)
        tuned = read_result(TuneResult, newest, "tune")
    except UserError as error:
        raise UserError(
            str(newest),
            "must be a result of bench or tune",
            given=f"{error.given:.200}",
            remedy="Run `triptych bench` again, or remove it",
        ) from error
    winner = tuned.winner
    return MeasuredLoad.of(winner.points, winner.rate, tuned.slo, tuned.subject)


@dataclass(frozen=True)
class Capacity:
    work: float  # of a request, over what it was when it was measured
    highest_before_per_s: float  # requests, as measured
    highest_per_s: float  # requests, as estimated for the new traffic
    p99_us: float | None  # at the rate asked for; None where that is unknown or was not measured
    holds: bool | None  # whether the promise does at that rate; None where no rate is known


def estimate(measured: MeasuredLoad, core_work: float, rate_per_s: float | None) -> Capacity:
    """Stretch what was measured.

    With `work` times the work in a request, those that come at a rate r wait as others did at
    ``work * r``, only `work` times as long. This is exact where nothing but work takes time; a
    queue delay does not stretch.

    Args:
        measured: before.
        core_work: of the core in a request, over what it was.
        rate_per_s: requests a second; None where that is not known.
    """
    share = 1.0 if measured.core_share is None else measured.core_share
    work = 1.0 - share + share * core_work
    rates = [point.load.value for point in measured.points]
    highest = measured.highest_per_s
    if rates:
        tried = np.linspace(0.0, measured.highest_per_s, _STEPS + 1).tolist()
        curves = _stretched(measured.points, tried, work)
        highest = max(
            (
                rate
                for place, rate in enumerate(tried)
                if measured.slo.strain({name: curve[place] for name, curve in curves.items()}) <= 1
            ),
            default=0.0,
        )
    p99, holds = None, None
    if rate_per_s is not None:
        if rates and rate_per_s * work <= max(rates):
            p99 = _stretched(measured.points, [rate_per_s * work], work)["p99"][0]
        holds = max(rate_per_s, measured.slo.throughput or 0.0) * work <= highest
    return Capacity(work, measured.highest_per_s, highest / work, p99, holds)


def _stretched(points: Sequence[Point], at: Sequence[float], work: float) -> Curves:
    """Latencies at rates between those measured, times `work`."""
    rates = [point.load.value for point in points]
    curves = [point.latencies_us for point in points]
    return {
        name: (work * np.interp(at, rates, [curve[name] for curve in curves])).tolist()
        for name in PERCENTILES
    }


def _core_share(point: Point) -> float | None:
    """Of the steps' busy time; an execution's time counts once for all its requests."""
    busy = {
        step.step: step.compute_us * step.executions / step.requests
        for step in point.typical.steps
        if step.requests
    }
    total = sum(busy.values())
    return busy["core"] / total if "core" in busy and total > 0 else None


PRICED: tuple[Propose, ...] = (layout, bucket_count)
"""The fields of which `plan.cost` knows both what they save and what they cost."""

WORTH_A_REBUILD = 0.1
"""Minimum saving of the core's work, as a share of the present work, for other settings to be
proposed. The estimates of both layouts are not more exact than that."""


@dataclass(frozen=True)
class Proposal:
    """Settings to build with, beside the new traffic, and what is expected of them.

    Attributes:
        before: what ``tuned.yaml`` sets now.
        after: what it would set; the same where a build with the new traffic is all.
        core_work: of the core for a row, over that with the present build and the new rows.
        capacity: expected; None where nothing was measured.
        servers: like the one that was measured, that would keep the promise at the rate; None
            where that is not known.
    """

    before: Mapping[str, JsonValue]
    after: Mapping[str, JsonValue]
    core_work: float
    capacity: Capacity | None = None
    servers: int | None = None

    @property
    def changes(self) -> Mapping[str, JsonValue]:
        """Key to its new value, of what would be another."""
        return {key: v for key, v in self.after.items() if self.before.get(key) != v}


def propose(
    plan: Plan,
    lengths: Lengths,
    core_work: float,
    *,
    measured: MeasuredLoad | None,
    rate_per_s: float | None,
) -> Proposal:
    """The settings that are expected to cost least for rows of new `lengths`.

    Args:
        plan: as it was built, and with the lengths that it was built for.
        lengths: of the new rows.
        core_work: of the new rows in the present build, over that of those measured.
        measured: what a load test found; None leaves the estimates out.
        rate_per_s: requests a second; None where that is not known.
    """
    present = _cost(plan, lengths, plan.bucket_edges)
    best = _replanned(plan, {}, lengths)
    change: dict[str, JsonValue] = {}
    for field in PRICED if plan.spec.core.shared_from is None else ():
        found = field(Evidence(best, None, cores=1, limits_us={}))
        if isinstance(found, Skip):
            continue
        for value in (*found.values, *found.others):
            other = _replanned(plan, {**change, found.key: value}, lengths)
            least = _cost(best, lengths, best.bucket_edges)
            if _cost(other, lengths, other.bucket_edges) < (1 - WORTH_A_REBUILD) * least:
                best, change = other, {**change, found.key: value}
    work = _cost(best, lengths, best.bucket_edges) / present
    before = dict(plan.spec.tuned)
    capacity = servers = None
    if measured is not None:
        capacity = estimate(measured, core_work * work, rate_per_s)
        if rate_per_s is not None and capacity.highest_per_s > 0:
            servers = max(1, math.ceil(rate_per_s / capacity.highest_per_s))
    return Proposal(before, {**before, **change}, work, capacity, servers)


def _cost(plan: Plan, lengths: Lengths, edges: tuple[int, ...]) -> float:
    """Microseconds of the device for a row of `lengths`, in the plan's layout."""
    cost = expected_cost(plan.spec, plan.facts, lengths, edges, plan.max_length)
    return cost.packed if plan.packed else cost.bucketed


def _replanned(plan: Plan, change: Mapping[str, JsonValue], lengths: Lengths) -> Plan:
    """The plan for new lengths, with fields of `core` changed, in its layout unless that is one."""
    fields = {key.removeprefix("core."): value for key, value in change.items()}
    core = plan.spec.core.model_copy(update=fields)
    spec: PipelineSpec = plan.spec.model_copy(update={"core": core})
    chosen: Any = fields.get("layout", plan.layout)
    return make_plan(spec, plan.facts, plan.task, plan.parameters, lengths, layout=chosen)


def tuned_diff(proposal: Proposal) -> tuple[str, ...]:
    """The lines of a unified diff of what ``tuned.yaml`` sets; none where nothing changes."""
    before, after = (
        yaml.safe_dump({"set": dict(values)}, sort_keys=False).splitlines() if values else []
        for values in (proposal.before, proposal.after)
    )
    names = (TUNED_FILE, f"{TUNED_FILE} (proposed)")
    return tuple(difflib.unified_diff(before, after, *names, lineterm=""))


def describe_proposal(proposal: Proposal, rate_per_s: float | None) -> Iterator[tuple[str, str]]:
    """The lines that show it, each with its style."""
    diff = tuned_diff(proposal)
    what = f"and {TUNED_FILE} changed:" if diff else f"{TUNED_FILE} as it is"
    yield f"  proposed: a build with the new requests, {what}", "bold"
    for line in diff:
        yield f"    {line}", ""
    yield f"  expected: {estimate_effect(proposal, rate_per_s)}", ""


def estimate_effect(proposal: Proposal, rate_per_s: float | None) -> str:
    """The expected effect in words."""
    saved = 1.0 - proposal.core_work
    words = f"the core works {saved:.0%} less for a row than it does now"
    if abs(saved) < 0.005:
        words = "the core works as much for a row as it does now"
    capacity = proposal.capacity
    if capacity is None:
        return f"{words}; no rate, since nothing was measured (`triptych bench`)"
    words += f"; up to about {capacity.highest_per_s:.4g} requests/s"
    if rate_per_s is None:
        return words
    p99 = "" if capacity.p99_us is None else f", p99 about {capacity.p99_us / 1e3:.1f} ms"
    state = "holds" if capacity.holds else "does not hold"
    words += f"; at {rate_per_s:.4g}/s the promise {state}{p99}"
    if not capacity.holds and proposal.servers is not None and proposal.servers > 1:
        words += f": about {proposal.servers} such servers hold it"
    return words
