"""Propose settings for ``tuned.yaml`` from a cost model, and estimate capacity for new traffic.

Proposals are limited to fields whose cost the model knows; `tune` measures all others. The estimate
assumes that the core's work grows with its tokens, and waiting times grow with the work.
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
from triptych.operate.tune.fields import (
    Observation,
    Propose,
    propose_bucket_count,
    propose_layout,
)
from triptych.operate.tune.results import TuneResult
from triptych.serving.bench.results import BenchResult, LoadPoint, RateSearch, Subject, read_result
from triptych.spec.plan import Plan, expected_cost, make_plan
from triptych.spec.slo import PERCENTILES, AnySlo
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import TUNED_FILE

_STEPS = 1000

Curves = Mapping[str, Sequence[float]]
"""Latencies in microseconds, one per rate, by percentile name."""


@dataclass(frozen=True)
class MeasuredLoad:
    """Result of a load test of a build."""

    highest_per_s: float  # highest rate, within the SLO if there is one
    slo: AnySlo
    points: tuple[LoadPoint, ...]  # Poisson rates ascending, for the latencies; may be empty
    core_share: float | None  # core's share of the steps' work; None if unknown
    row_tokens: float | None = None  # computed tokens per row; None if unknown

    @classmethod
    def of(
        cls,
        points: Sequence[LoadPoint],
        rate: RateSearch | None,
        slo: AnySlo,
        subject: Subject | None = None,
    ) -> MeasuredLoad:
        """Return the load from a result of bench or tune.

        Args:
            points: Points of the pipeline in closed loops.
            rate: Search for the highest rate; None without one.
            slo: SLO; the SLO of `rate` takes precedence.
            subject: Measured build; None assumes the pipeline as it is.
        """
        tried = rate.points if rate is not None else ()
        shares = [share for share in map(_core_share, (*points, *tried)) if share is not None]
        # Percentiles are not finite if the server answered nothing.
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


def read_measured_load(reports: Path) -> MeasuredLoad | None:
    """Return the latest result of bench or tune in a pipeline's reports; None without one.

    Raises:
        UserError: The file was not written by this version.
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
            remedy="Run `triptych bench` again, or remove the file",
        ) from error
    winner = tuned.winner
    return MeasuredLoad.of(winner.points, winner.rate, tuned.slo, tuned.subject)


@dataclass(frozen=True)
class Capacity:
    work: float  # work per request, relative to the measurement
    highest_before_per_s: float  # measured
    highest_per_s: float  # estimated for the new traffic
    p99_us: float | None  # estimated p99 at the given rate; None if unknown
    holds: bool | None  # whether the SLO is met at that rate; None if unknown


def estimate_capacity(
    measured: MeasuredLoad, core_work: float, rate_per_s: float | None
) -> Capacity:
    """Estimate the capacity for requests with more or less work.

    With `work` times the work per request, latencies at rate r are `work` times the latencies that
    were measured at ``work * r``. This is exact if only work takes time; queue delays do not scale.

    Args:
        measured: Result of a load test.
        core_work: Work of the core per request, relative to the measurement.
        rate_per_s: Requests per second; None if unknown.
    """
    share = 1.0 if measured.core_share is None else measured.core_share
    work = 1.0 - share + share * core_work
    rates = [point.load.value for point in measured.points]
    highest = measured.highest_per_s
    if rates:
        tried = np.linspace(0.0, measured.highest_per_s, _STEPS + 1).tolist()
        curves = _scale_latencies(measured.points, tried, work)
        highest = max(
            (
                rate
                for place, rate in enumerate(tried)
                if measured.slo.slo_ratio({name: curve[place] for name, curve in curves.items()})
                <= 1
            ),
            default=0.0,
        )
    p99, holds = None, None
    if rate_per_s is not None:
        if rates and rate_per_s * work <= max(rates):
            p99 = _scale_latencies(measured.points, [rate_per_s * work], work)["p99"][0]
        holds = max(rate_per_s, measured.slo.throughput or 0.0) * work <= highest
    return Capacity(work, measured.highest_per_s, highest / work, p99, holds)


def _scale_latencies(points: Sequence[LoadPoint], at: Sequence[float], work: float) -> Curves:
    """Interpolate the measured latencies at other rates, and multiply them by `work`."""
    rates = [point.load.value for point in points]
    curves = [point.latencies_us for point in points]
    return {
        name: (work * np.interp(at, rates, [curve[name] for curve in curves])).tolist()
        for name in PERCENTILES
    }


def _core_share(point: LoadPoint) -> float | None:
    """Return the core's share of the busy time; a batch counts once for all its requests."""
    busy = {
        step.step: step.compute_us * step.executions / step.requests
        for step in point.typical.steps
        if step.requests
    }
    total = sum(busy.values())
    return busy["core"] / total if "core" in busy and total > 0 else None


PRICED: tuple[Propose, ...] = (propose_layout, propose_bucket_count)
"""Fields whose savings and costs the cost model knows."""

MIN_SAVING = 0.1
"""Minimum saving of the core's work, as a share of the present work, for other settings to be
proposed. The estimates of both layouts are not more exact than that."""


@dataclass(frozen=True)
class TunedProposal:
    """Proposed settings for a build with the new traffic, and their expected effect.

    Attributes:
        before: Present settings of ``tuned.yaml``.
        after: Proposed settings; equal to `before` if only the traffic should change.
        core_work: Work of the core per row, relative to the present build with the new rows.
        capacity: Expected capacity; None without a measurement.
        servers: Number of servers that meet the SLO at the rate; None if unknown.
    """

    before: Mapping[str, JsonValue]
    after: Mapping[str, JsonValue]
    core_work: float
    capacity: Capacity | None = None
    servers: int | None = None

    @property
    def changes(self) -> Mapping[str, JsonValue]:
        """Changed settings."""
        return {key: v for key, v in self.after.items() if self.before.get(key) != v}


def propose_settings(
    plan: Plan,
    lengths: Lengths,
    core_work: float,
    *,
    measured: MeasuredLoad | None,
    rate_per_s: float | None,
) -> TunedProposal:
    """Return the settings with the lowest expected cost for rows of new `lengths`.

    Args:
        plan: Plan of the build, with its lengths.
        lengths: Lengths of the new rows.
        core_work: Work per new row in the present build, relative to the measurement.
        measured: Result of a load test; None omits the estimates.
        rate_per_s: Requests per second; None if unknown.
    """
    present = _cost(plan, lengths, plan.bucket_edges)
    best = _replan(plan, {}, lengths)
    change: dict[str, JsonValue] = {}
    for field in PRICED if plan.spec.core.shared_from is None else ():
        proposal = field(Observation(best, None, cores=1, limits_us={}))
        for value in (*proposal.values, *proposal.others):
            other = _replan(plan, {**change, proposal.key: value}, lengths)
            least = _cost(best, lengths, best.bucket_edges)
            if _cost(other, lengths, other.bucket_edges) < (1 - MIN_SAVING) * least:
                best, change = other, {**change, proposal.key: value}
    work = _cost(best, lengths, best.bucket_edges) / present
    before = dict(plan.spec.tuned)
    capacity = servers = None
    if measured is not None:
        capacity = estimate_capacity(measured, core_work * work, rate_per_s)
        if rate_per_s is not None and capacity.highest_per_s > 0:
            servers = max(1, math.ceil(rate_per_s / capacity.highest_per_s))
    return TunedProposal(before, {**before, **change}, work, capacity, servers)


def _cost(plan: Plan, lengths: Lengths, edges: tuple[int, ...]) -> float:
    """Return the device time per row of `lengths` in the plan's layout, in microseconds."""
    cost = expected_cost(plan.encoder_spec, plan.info, lengths, edges, plan.max_length)
    return cost.packed if plan.packed else cost.bucketed


def _replan(plan: Plan, change: Mapping[str, JsonValue], lengths: Lengths) -> Plan:
    """Return the plan for new lengths with changed fields of `core`."""
    fields = {key.removeprefix("core."): value for key, value in change.items()}
    core = plan.spec.core.model_copy(update=fields)
    spec = plan.encoder_spec.model_copy(update={"core": core})
    chosen: Any = fields.get("layout", plan.layout)
    return make_plan(spec, plan.info, plan.task, plan.parameters, lengths, layout=chosen)


def diff_tuned(proposal: TunedProposal) -> tuple[str, ...]:
    """Return the unified diff of ``tuned.yaml``'s settings; empty without changes."""
    before, after = (
        yaml.safe_dump({"set": dict(values)}, sort_keys=False).splitlines() if values else []
        for values in (proposal.before, proposal.after)
    )
    names = (TUNED_FILE, f"{TUNED_FILE} (proposed)")
    return tuple(difflib.unified_diff(before, after, *names, lineterm=""))


def format_proposal(proposal: TunedProposal, rate_per_s: float | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a proposal, each with its style."""
    diff = diff_tuned(proposal)
    change = f"and changes of {TUNED_FILE}:" if diff else f"{TUNED_FILE} unchanged"
    yield f"  proposed: a build with the new requests, {change}", "bold"
    for line in diff:
        yield f"    {line}", ""
    yield f"  expected: {estimate_effect(proposal, rate_per_s)}", ""


def estimate_effect(proposal: TunedProposal, rate_per_s: float | None) -> str:
    """Return text about the expected effect."""
    saved = 1.0 - proposal.core_work
    words = f"{saved:.0%} less work of the core per row"
    if abs(saved) < 0.005:
        words = "the same work of the core per row"
    capacity = proposal.capacity
    if capacity is None:
        return f"{words}; no rate without a measurement (`triptych bench`)"
    words += f"; up to about {capacity.highest_per_s:.4g} requests/s"
    if rate_per_s is None:
        return words
    p99 = "" if capacity.p99_us is None else f", p99 about {capacity.p99_us / 1e3:.1f} ms"
    state = "is met" if capacity.holds else "is missed"
    words += f"; at {rate_per_s:.4g}/s the SLO {state}{p99}"
    if not capacity.holds and proposal.servers is not None and proposal.servers > 1:
        words += f": about {proposal.servers} servers meet it"
    return words
