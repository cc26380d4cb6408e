"""What a field of the spec is judged by, and what comes of it: values to try, or why none is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import JsonValue

from triptych.serving.bench.points import Measurement, StepUse

BUSY = 0.6
"""A step whose instances run for a smaller share of the time is not short of them."""

Planned = TypeVar("Planned")
"""What is planned for a setting, with its ``spec``; a kind of pipeline has its own."""


@dataclass(frozen=True)
class Evidence(Generic[Planned]):
    """What the best settings so far look like under load."""

    plan: Planned  # of these settings
    measurement: Measurement | None  # at the load that decides their score; None before any
    cores: int  # of this machine
    limits_us: Mapping[str, float]  # promised; see `Promise.limits_us`

    def step(self, name: str) -> StepUse | None:
        """What the server counted for a step; None where it counted nothing."""
        steps = () if self.measurement is None else self.measurement.steps
        return next((use for use in steps if use.step == name), None)


@dataclass(frozen=True)
class Proposal:
    """Values of one field, to be tried in turn until one is no better than the one before."""

    key: str  # dotted, of the spec
    values: tuple[JsonValue, ...]  # the way up; where even its first is no better:
    reason: str  # why it is worth a try
    others: tuple[JsonValue, ...] = ()  # the way down
    along: Mapping[str, JsonValue] = field(default_factory=dict)
    """Other fields that the way up needs; the way down does not."""


@dataclass(frozen=True)
class Skip:
    """A field that is left alone, and why."""

    key: str
    reason: str


Propose = Callable[[Evidence[Any]], Proposal | Skip]


def more_instances(evidence: Evidence[Any], key: str, step: str, now: int) -> Proposal | Skip:
    """Instances of a step: more where those there are have no time left."""
    use = evidence.step(step)
    if use is not None and use.busy is not None and use.busy < BUSY:
        return Skip(key, f"busy {use.busy:.0%} of the time")
    most = max(2, 2 * evidence.cores)
    values = tuple(value for value in (now + 1, now + 2, now + 4) if value <= most)
    if not values:
        return Skip(key, f"{now} on {evidence.cores} cores is plenty")
    busy = "" if use is None or use.busy is None else f"busy {use.busy:.0%} of the time"
    return Proposal(key, values, busy or "the server does not tell how busy it is")
