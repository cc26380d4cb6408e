"""Drift of token lengths: its size, its cost, and the action it needs."""

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
    MIN_SAVING,
    Capacity,
    MeasuredLoad,
    TunedProposal,
    estimate_capacity,
    format_proposal,
    propose_settings,
)
from triptych.repository.records import plain_data
from triptych.spec.plan import Plan, bucket_of, make_plan
from triptych.spec.traffic import TRAFFIC_FILE, Lengths

SIGNIFICANCE = 0.01
"""Significance level of the comparison of two length distributions."""

MIN_LOAD_CHANGE = 1.25
"""Minimum change of the work per row, as a factor up or down, to tune again."""

MIN_LENGTH_RATIO = 1.5
"""Minimum ratio of the lengths' 99th percentile to the longest warm-up row, to rebuild."""

Action = Literal["keep", "rebuild", "tune again"]


@dataclass(frozen=True)
class Shape:
    """Summary of token lengths.

    `at_limit_share` is the share of rows with the maximum length: truncated rows, rows that just
    fit, and windows of long contexts.
    """

    rows: int
    mean_tokens: float
    p50_tokens: int
    p99_tokens: int
    at_limit_share: float


@dataclass(frozen=True)
class DerivedSettings:
    """Settings derived from traffic; `batch_tokens` are the tokens of a full padded batch."""

    bucket_edges: tuple[int, ...]
    warm_up_tokens: tuple[int, ...]
    batch_tokens: float


@dataclass(frozen=True)
class Drift:
    pipeline: str
    layout: str  # layout of batches
    source: str  # description of the new traffic
    before: Shape  # lengths at the build
    now: Shape
    distance: float  # largest difference of the two distributions (Kolmogorov-Smirnov), 0 to 1
    noise: float  # critical value of `distance`
    blur: float  # maximum relative error of a length; 0 if exact
    work: float  # computed tokens per row, relative to the build
    excess: float
    """Additional computed tokens compared with the best padded lengths; 0 unless bucketed."""
    settings: DerivedSettings  # present settings
    best: DerivedSettings  # best settings for the new lengths
    rate_per_s: float | None  # requests per second; None if unknown
    capacity: Capacity | None  # estimate; None without a measurement
    action: Action = "keep"  # recommended action
    reason: str = ""  # reason of the action
    cost: str = ""  # cost of no action
    first: str = ""  # step before `command`; empty without one
    command: str = ""  # command to run; empty without one
    proposal: TunedProposal | None = None  # better settings; None without any
    notes: tuple[str, ...] = ()  # notes for the user

    @property
    def drifted(self) -> bool:
        """Whether the lengths differ significantly."""
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
    """Compare new traffic with the traffic of the build, and recommend an action.

    Args:
        inputs: Inputs of the pipeline, in the layout of its build.
        new: Lengths of the new traffic.
        measured: Result of a load test; None omits the estimates.
        rate_per_s: Requests per second; None takes the counted rows, or else the throughput of the
            SLO.
        significance: Significance level of the comparison of the length distributions.

    Raises:
        ValueError: The pipeline has no lengths (images).
    """
    plan = inputs.plan
    if plan.lengths is None:
        raise ValueError("images have no lengths")
    best = make_plan(
        plan.encoder_spec, plan.info, plan.task, plan.parameters, new.lengths, layout=plan.layout
    )
    computed = _computed(plan.bucket_edges, new.lengths, new.mean)
    before = _computed(plan.bucket_edges, plan.lengths, plan.lengths.mean)
    work = computed / before
    core_work = work  # relative to the measured build
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
        capacity=None if measured is None else estimate_capacity(measured, core_work, rate_per_s),
        proposal=propose_settings(
            plan, new.lengths, core_work, measured=measured, rate_per_s=rate_per_s
        ),
        notes=(*new.notes, *_notes(plan, new, measured)),
    )
    file = shlex.quote(str(plan.spec.folder / TRAFFIC_FILE))
    return _decide(found, plan, new.take or f"add a sample of the new requests to {file}")


def _decide(found: Drift, plan: Plan, take: str) -> Drift:
    """Return the drift with the recommended action; `take` is the step that adds the new rows."""
    name, capacity = plan.spec.name, found.capacity
    p99, warmed = found.now.p99_tokens, max(found.settings.warm_up_tokens)
    broken = capacity is not None and capacity.holds is False
    action: Action
    if broken and capacity is not None:
        action, reason = "tune again", f"the SLO is missed at {found.rate_per_s:.4g}/s"
        cost = f"it is met up to about {capacity.highest_per_s:.4g}/s"
    elif not found.drifted:
        reason = (
            "no difference of the lengths is proven; this number of rows shows one of at least"
            f" {found.noise:.0%} of the rows"
        )
        return replace(found, reason=reason, cost="none", proposal=None)
    elif max(found.work, 1 / found.work) > MIN_LOAD_CHANGE:
        action, reason = (
            "tune again",
            f"the work per row is {found.work:.2f} times that of the build",
        )
        cost = (
            f"about {1 - 1 / found.work:.0%} fewer rows per second than tuned for"
            if found.work > 1
            else "batches, instances and delay are tuned for longer rows; capacity is unused"
        )
    elif found.excess > MIN_SAVING:
        action, reason = "rebuild", "other padded lengths fit the new rows better"
        cost = f"{found.excess:.1%} unnecessary computed tokens"
    elif found.proposal is not None and found.proposal.core_work < 1 - MIN_SAVING:
        action, reason = "rebuild", "other settings fit the new rows better"
        cost = f"{1 / found.proposal.core_work - 1:.1%} unnecessary work of the core"
    elif p99 > MIN_LENGTH_RATIO * warmed:
        action, reason = (
            "rebuild",
            f"the longest 1 % of rows have {p99} tokens, but warm-up ends at {warmed}",
        )
        cost = "the first long rows after a start are slow, and calibration lacks such rows"
    else:
        reason = "the lengths drifted, but the present settings still fit"
        cost = f"{found.excess:.1%} more computed tokens than with the best padded lengths"
        cost = cost if found.best.bucket_edges else "none"
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
    """Return the mean computed tokens per row, with padding if there are edges."""
    if not edges:
        return max(mean, 1.0)
    total = sum(bucket_of(length, edges) * rows for length, rows in lengths.counts.items())
    return total / lengths.rows


def _distance(old: Lengths, new: NewTraffic) -> float:
    """Return the Kolmogorov-Smirnov distance of the two distributions."""
    places = np.array(new.edges or sorted({*old.counts, *new.lengths.counts}))
    return float(np.abs(_share_up_to(old, places) - _share_up_to(new.lengths, places)).max())


def _share_up_to(lengths: Lengths, places: NDArray[np.int64]) -> NDArray[np.float64]:
    known, rows = np.array(list(lengths.counts)), np.array(list(lengths.counts.values()))
    up_to = np.concatenate([[0], rows.cumsum()])
    found: NDArray[np.float64] = up_to[known.searchsorted(places, side="right")] / lengths.rows
    return found


def _noise(old_rows: int, new_rows: int, significance: float = SIGNIFICANCE) -> float:
    """Return the critical value of the two-sample Kolmogorov-Smirnov statistic.

    The formula is for large samples. It is conservative for ties and for small samples.
    """
    scale = math.sqrt(-math.log(significance / 2) / 2)
    return min(1.0, scale * math.sqrt((old_rows + new_rows) / (old_rows * new_rows)))


def _blur(edges: Sequence[int]) -> float:
    return max(((high - low - 1) / low for low, high in pairwise(edges)), default=0.0)


def _notes(plan: Plan, new: NewTraffic, measured: MeasuredLoad | None) -> Iterator[str]:
    noise = _noise(plan.lengths.rows if plan.lengths else 1, new.lengths.rows)
    if noise > 0.25:
        yield f"with these few rows, only distances above {noise:.2f} are detected: use more rows"
    if new.edges and new.edges[-1] != plan.max_length:
        yield (
            f"the server counted up to {new.edges[-1]} tokens, the pipeline now takes"
            f" {plan.max_length}: it was built with other settings"
        )
    if new.edges and set(plan.bucket_edges) - set(new.edges):
        yield "the server was built with other padded lengths: costs of padding are approximate"
    if measured is not None and measured.core_share is None:
        yield "the core's share of the work was not measured: it is assumed to be 100 %"


def format_drift(drift: Drift) -> Iterator[tuple[str, str]]:
    """Yield the lines of a drift, each with its style."""
    before, now = drift.before, drift.now
    yield f"{drift.pipeline}, {drift.layout}: {drift.source}", "bold"
    yield f"{drift.action}: {drift.reason}", "green" if drift.action == "keep" else "yellow"
    yield f"  {'tokens of a row':22} {'built for':>12} {'now':>12}", "bold"
    for label, old, new in (
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
        yield f"  {label:22} {old:>12} {new:>12}", ""
    sign, style = (">", "yellow") if drift.drifted else ("<=", "")
    distance = f"{drift.distance:.3f} {sign} {drift.noise:.3f} (critical value)"
    yield f"  Kolmogorov-Smirnov distance of the lengths: {distance}", style
    yield from _format_settings(drift)
    if drift.capacity is not None:
        yield from _format_capacity(drift.capacity, drift.rate_per_s)
    for note in drift.notes:
        yield f"  note: {note}", "yellow"
    yield f"  cost of no action: {drift.cost}", ""
    if drift.proposal is not None:
        yield from format_proposal(drift.proposal, drift.rate_per_s)
    if drift.first:
        yield f"  first {drift.first}", ""
    if drift.command:
        yield f"  then run {drift.command}" if drift.first else f"  run {drift.command}", ""


def _format_settings(drift: Drift) -> Iterator[tuple[str, str]]:
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


def _format_capacity(capacity: Capacity, rate_per_s: float | None) -> Iterator[tuple[str, str]]:
    yield (
        f"  estimate: the work per request is {capacity.work:.2f} times as large;"
        f" the highest rate changes from {capacity.highest_before_per_s:.4g}/s"
        f" to {capacity.highest_per_s:.4g}/s",
        "",
    )
    if rate_per_s is not None:
        p99 = "" if capacity.p99_us is None else f", p99 about {capacity.p99_us / 1e3:.1f} ms"
        state = {True: "is met", False: "is missed", None: "is unknown"}[capacity.holds]
        style = "red" if capacity.holds is False else ""
        yield f"  estimate: at {rate_per_s:.4g}/s the SLO {state}{p99}", style
