"""What would suit new traffic better, by arithmetic alone: settings for ``tuned.yaml``.

Of the values that `tune` would try, those that `plan.cost` can price; their effect is what
`tune.capacity` makes of it. What only a measurement tells is left to `tune`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import JsonValue

from triptych.operate.tune.capacity import Capacity, MeasuredLoad, estimate
from triptych.operate.tune.evidence import Evidence, Propose, Skip
from triptych.operate.tune.fields import bucket_count, layout
from triptych.spec.plan import Plan, expected_cost, make_plan
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import Lengths
from triptych.spec.tuned import TUNED_FILE

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
    for field in PRICED if plan.spec.core.share is None else ():
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
    yield f"  expected: {expected_of(proposal, rate_per_s)}", ""


def expected_of(proposal: Proposal, rate_per_s: float | None) -> str:
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
