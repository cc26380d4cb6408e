"""Whether a pipeline's numbers still fit its traffic: what moved, what that costs, what to do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from triptych.core.inputs import PipelineInputs
from triptych.operate.tune.new_traffic import NewTraffic
from triptych.operate.tune.proposal import (
    WORTH_A_REBUILD,
    Capacity,
    MeasuredLoad,
    Proposal,
    describe_proposal,
    estimate,
    propose,
)
from triptych.repository.records import plain_data
from triptych.spec.plan import Plan, bucket_of, make_plan
from triptych.spec.traffic import TRAFFIC_FILE, Lengths

SIGNIFICANCE = 0.01
"""Significance level of the comparison of two length distributions."""

WORTH_TUNING = 1.25
"""Work of a row over what it was, or the reverse."""

FAR_LONGER = 1.5
"""The 99th percentile of the lengths over the longest row that was warmed up."""

Action = Literal["keep", "rebuild", "tune again"]


@dataclass(frozen=True)
class Shape:
    """Lengths in short, in tokens; `at_limit_share` of the rows have all that a row may have.

    Those are the rows that were cut off, the few that just fit, and a long context's windows.
    """

    rows: int
    mean_tokens: float
    p50_tokens: int
    p99_tokens: int
    at_limit_share: float


@dataclass(frozen=True)
class DerivedSettings:
    """What the plan derives from the traffic, and `batch_tokens` of a full batch, padding in it."""

    bucket_edges: tuple[int, ...]
    warm_up_tokens: tuple[int, ...]
    batch_tokens: float


@dataclass(frozen=True)
class Drift:
    pipeline: str
    layout: str  # how rows share a batch
    source: str  # of the new traffic
    before: Shape  # the lengths it was built for
    now: Shape
    distance: float  # largest difference of the two distributions (Kolmogorov-Smirnov), 0 to 1
    noise: float  # distance that chance alone rarely exceeds, for so many rows
    blur: float  # how far off a length may be, as a share of it; 0 where all are exact
    work: float  # tokens computed for a row, over those before, with the present settings
    excess: float
    """Tokens computed beyond those with the best edges, as a share of these; 0 unless bucketed."""
    settings: DerivedSettings  # at present
    best: DerivedSettings  # for the new lengths
    rate_per_s: float | None  # requests of one text a second; None where that is not known
    capacity: Capacity | None  # where a measurement was given
    action: Action = "keep"  # what to do
    reason: str = ""  # why, with its figures
    cost: str = ""  # of leaving all as it is
    first: str = ""  # what to do before `command`; empty for nothing
    command: str = ""  # to run; empty for none
    proposal: Proposal | None = None  # what would suit better; None where all may stay
    notes: tuple[str, ...] = ()  # what to know before the figures are used

    @property
    def drifted(self) -> bool:
        """The lengths differ by more than chance explains."""
        return self.distance > self.noise

    def as_dict(self) -> JsonValue:
        plain: JsonValue = plain_data({**asdict(self), "drifted": self.drifted})
        return plain


def check_drift(
    inputs: PipelineInputs,
    new: NewTraffic,
    *,
    measured: MeasuredLoad | None = None,
    rate_per_s: float | None = None,
    significance: float = SIGNIFICANCE,
) -> Drift:
    """Compare new traffic with that of the plan, and say what to do.

    Args:
        inputs: the pipeline as it was built, in the layout that it was built in.
        new: the lengths the core gets now.
        measured: what a load test found; None leaves the estimates out.
        rate_per_s: requests of one text a second; None takes the rows that were counted, then
            the throughput that is promised.
        significance: Significance level of the comparison of the length distributions.

    Raises:
        ValueError: the pipeline has no lengths, as those of images.
    """
    plan = inputs.plan
    if plan.lengths is None:
        raise ValueError("images have no lengths")
    best = make_plan(
        plan.spec, plan.facts, plan.task, plan.parameters, new.lengths, layout=plan.layout
    )
    computed = _computed(plan.bucket_edges, new.lengths, new.mean)
    before = _computed(plan.bucket_edges, plan.lengths, plan.lengths.mean)
    work = computed / before
    core_work = work  # over that of what was measured, which may have been another build
    if measured is not None and measured.row_tokens is not None:
        core_work = computed / measured.row_tokens
    rows_a_request = plan.lengths.rows / len(inputs.traffic) if inputs.traffic else 1.0
    if rate_per_s is None and new.rows_per_s is not None:
        rate_per_s = new.rows_per_s / rows_a_request
    if rate_per_s is None and measured is not None:
        rate_per_s = measured.slo.throughput
    found = Drift(
        pipeline=plan.spec.name,
        layout=plan.layout,
        source=new.source,
        before=_shape(plan.lengths, plan.lengths.mean, plan.max_length),
        now=_shape(new.lengths, new.mean, plan.max_length),
        distance=_distance(plan.lengths, new),
        noise=_noise(plan.lengths.rows, new.lengths.rows, significance),
        blur=_blur(new.edges),
        work=work,
        excess=computed / _computed(best.bucket_edges, new.lengths, new.mean) - 1.0,
        settings=_settings(plan, plan.lengths, plan.lengths.mean),
        best=_settings(best, new.lengths, new.mean),
        rate_per_s=rate_per_s,
        capacity=None if measured is None else estimate(measured, core_work, rate_per_s),
        proposal=propose(plan, new.lengths, core_work, measured=measured, rate_per_s=rate_per_s),
        notes=(*new.notes, *_notes(plan, new, measured)),
    )
    file = shlex.quote(str(plan.spec.folder / TRAFFIC_FILE))
    return _decide(found, plan, new.take or f"put a sample of the new requests into {file}")


def _decide(found: Drift, plan: Plan, take: str) -> Drift:
    """The same with what to do; `take` is how the new rows get into the traffic."""
    name, capacity = plan.spec.name, found.capacity
    p99, warmed = found.now.p99_tokens, max(found.settings.warm_up_tokens)
    broken = capacity is not None and capacity.holds is False
    action: Action
    if broken and capacity is not None:
        action, reason = "tune again", f"the promise does not hold at {found.rate_per_s:.4g}/s"
        cost = f"it may hold up to about {capacity.highest_per_s:.4g}/s"
    elif not found.drifted:
        reason = "the lengths differ by no more than chance explains"
        return replace(found, reason=reason, cost="nothing that can be seen", proposal=None)
    elif max(found.work, 1 / found.work) > WORTH_TUNING:
        action, reason = "tune again", f"a row is {found.work:.2f} times the work it was"
        cost = (
            f"about {1 - 1 / found.work:.0%} fewer rows a second than it was tuned for"
            if found.work > 1
            else "batches, instances and delay chosen for heavier rows: room is left unused"
        )
    elif found.excess > WORTH_A_REBUILD:
        action, reason = "rebuild", "other padded lengths suit the new rows better"
        cost = f"{found.excess:.1%} more computed tokens than need be"
    elif found.proposal is not None and found.proposal.core_work < 1 - WORTH_A_REBUILD:
        action, reason = "rebuild", "other settings suit the new rows better"
        cost = f"{1 / found.proposal.core_work - 1:.1%} more work of the core than need be"
    elif p99 > FAR_LONGER * warmed:
        action, reason = "rebuild", f"rows of {p99} tokens are usual, warm-up ends at {warmed}"
        cost = "the first long rows after a start wait for memory; calibration has none of them"
    else:
        reason = "the lengths moved, and the present numbers still suit them"
        cost = f"{found.excess:.1%} more computed tokens than with the best padded lengths"
        cost = cost if found.best.bucket_edges else "nothing"
        return replace(found, reason=reason, cost=cost, proposal=None)
    verb = "tune" if action == "tune again" else "build"
    return replace(
        found,
        action=action,
        reason=reason,
        cost=cost,
        first=take if found.drifted else "",
        command=f"triptych {verb} {name}",
    )


def _shape(lengths: Lengths, mean: float, max_length: int) -> Shape:
    p50, p99 = lengths.quantile(0.5), lengths.quantile(0.99)
    at_limit = lengths.counts.get(max_length, 0) / lengths.rows
    return Shape(lengths.rows, mean, p50, p99, at_limit)


def _settings(plan: Plan, lengths: Lengths, mean: float) -> DerivedSettings:
    tokens = tuple(dict.fromkeys(warm.tokens for warm in plan.warm_ups))
    full = plan.max_batch_size * _computed(plan.bucket_edges, lengths, mean)
    return DerivedSettings(plan.bucket_edges, tokens, full)


def _computed(edges: tuple[int, ...], lengths: Lengths, mean: float) -> float:
    """Tokens computed for a row: without edges those it has."""
    if not edges:
        return max(mean, 1.0)
    total = sum(bucket_of(length, edges) * rows for length, rows in lengths.counts.items())
    return total / lengths.rows


def _distance(old: Lengths, new: NewTraffic) -> float:
    """Largest difference of the two distributions, where both are known exactly."""
    places = np.array(new.edges or sorted({*old.counts, *new.lengths.counts}))
    return float(np.abs(_share_up_to(old, places) - _share_up_to(new.lengths, places)).max())


def _share_up_to(lengths: Lengths, places: NDArray[np.int64]) -> NDArray[np.float64]:
    known, rows = np.array(list(lengths.counts)), np.array(list(lengths.counts.values()))
    up_to = np.concatenate([[0], rows.cumsum()])
    found: NDArray[np.float64] = up_to[known.searchsorted(places, side="right")] / lengths.rows
    return found


def _noise(old_rows: int, new_rows: int, significance: float = SIGNIFICANCE) -> float:
    """Critical value of the two-sample Kolmogorov-Smirnov statistic, for large samples.

    For lengths, which have ties, and small samples it is rather too high than too low.
    """
    scale = math.sqrt(-math.log(significance / 2) / 2)
    return min(1.0, scale * math.sqrt((old_rows + new_rows) / (old_rows * new_rows)))


def _blur(edges: Sequence[int]) -> float:
    return max(((high - low - 1) / low for low, high in pairwise(edges)), default=0.0)


def _notes(plan: Plan, new: NewTraffic, measured: MeasuredLoad | None) -> Iterator[str]:
    noise = _noise(plan.lengths.rows if plan.lengths else 1, new.lengths.rows)
    if noise > 0.25:
        yield f"so few rows show only differences above {noise:.2f}: take more"
    if new.edges and new.edges[-1] != plan.max_length:
        yield (
            f"the server counted up to {new.edges[-1]} tokens, the pipeline now takes"
            f" {plan.max_length}: it was built with other numbers"
        )
    if new.edges and set(plan.bucket_edges) - set(new.edges):
        yield "the server was built with other padded lengths: costs of padding are approximate"
    if measured is not None and measured.core_share is None:
        yield "the core's share of the work was not measured: all of it is taken to be the core's"


def format_drift(drift: Drift) -> Iterator[tuple[str, str]]:
    """The lines that show it, each with its style."""
    before, now = drift.before, drift.now
    yield f"{drift.pipeline}, {drift.layout}: {drift.source}", "bold"
    yield f"  {'tokens of a row':22} {'built for':>12} {'now':>12}", "bold"
    for words, old, new in (
        ("rows", f"{before.rows}", f"{now.rows}"),
        ("mean", f"{before.mean_tokens:.1f}", f"{now.mean_tokens:.1f}"),
        ("p50", f"{before.p50_tokens}", f"{now.p50_tokens}"),
        ("p99", f"{before.p99_tokens}", f"{now.p99_tokens}"),
        ("rows at the limit", f"{before.at_limit_share:.1%}", f"{now.at_limit_share:.1%}"),
        (
            "a full batch computes",
            f"{drift.settings.batch_tokens:.0f}",
            f"{drift.work * drift.settings.batch_tokens:.0f}",
        ),
    ):
        yield f"  {words:22} {old:>12} {new:>12}", ""
    sign, style = (">", "yellow") if drift.drifted else ("<=", "")
    yield f"  distance {drift.distance:.3f} {sign} {drift.noise:.3f}, which chance explains", style
    yield from _describe_settings(drift)
    if drift.capacity is not None:
        yield from _describe_capacity(drift.capacity, drift.rate_per_s)
    for note in drift.notes:
        yield f"  note: {note}", "yellow"
    yield f"{drift.action}: {drift.reason}", "green" if drift.action == "keep" else "yellow"
    yield f"  to leave all as it is costs: {drift.cost}", ""
    if drift.proposal is not None:
        yield from describe_proposal(drift.proposal, drift.rate_per_s)
    if drift.first:
        yield f"  first {drift.first}", ""
    if drift.command:
        yield f"  then run {drift.command}" if drift.first else f"  run {drift.command}", ""


def _describe_settings(drift: Drift) -> Iterator[tuple[str, str]]:
    if drift.blur:
        yield f"  p50 and p99 are known to their bucket: within {drift.blur:.0%}", ""
    if drift.settings.bucket_edges:
        edges, best = (", ".join(map(str, s.bucket_edges)) for s in (drift.settings, drift.best))
        yield f"  padded to {edges}: {drift.excess:.1%} more computed than with {best}", ""
    else:
        warm, best = (
            " and ".join(map(str, s.warm_up_tokens)) for s in (drift.settings, drift.best)
        )
        yield f"  warmed up with rows of {warm} tokens; a build would now take {best}", ""


def _describe_capacity(capacity: Capacity, rate_per_s: float | None) -> Iterator[tuple[str, str]]:
    yield (
        f"  estimate: a request is {capacity.work:.2f} times the work;"
        f" {capacity.highest_before_per_s:.4g}/s become {capacity.highest_per_s:.4g}/s",
        "",
    )
    if rate_per_s is not None:
        p99 = "" if capacity.p99_us is None else f", p99 about {capacity.p99_us / 1e3:.1f} ms"
        state = {True: "holds", False: "does not hold", None: "unknown"}[capacity.holds]
        style = "red" if capacity.holds is False else ""
        yield f"  estimate: at {rate_per_s:.4g}/s the promise {state}{p99}", style
