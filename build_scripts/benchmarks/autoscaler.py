"""Simulation of KEDA and of Kubernetes' HorizontalPodAutoscaler, and four ways to configure it.

Formula, tolerance, stabilization windows and policies are those of the controller
(autoscaling/v2); KEDA passes external metrics to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from triptych.deploy.numbers import MIN_REPLICAS, RATE_WINDOW_S, TOLERANCE, headroom, stable_s
from triptych.deploy.scaling import WAITING_SHARE


@dataclass(frozen=True)
class Observed:
    """Metrics of a time window.

    Attributes:
        offered_per_s: Rate of incoming requests.
        waiting_s: Mean queue time of an answered request; NaN without any.
        queue_per_execution_s: Queue time divided by the number of executions.
        queue_by_compute: Queue time divided by time in the core, the mean over the replicas.
        replicas: Number of replicas with metrics.
    """

    offered_per_s: float
    waiting_s: float
    queue_per_execution_s: float
    queue_by_compute: float
    replicas: int


@dataclass(frozen=True)
class Trigger:
    """A metric and its target value.

    With scope ``fleet`` the result is ceil(value / target) replicas (KEDA's AverageValue), with
    ``replica`` it is ceil(replicas * value / target) (KEDA's Value, and means over pods).
    """

    read: Callable[[Observed], float]
    target: float
    scope: Literal["fleet", "replica"]
    window_s: float


@dataclass(frozen=True)
class ScalingPolicy:
    """How fast the number of replicas may change.

    Attributes:
        window_s: Stabilization window.
        replicas: Maximum change in a period, in replicas.
        ratio: Maximum change in a period as a ratio of the replicas; the larger of both counts.
    """

    window_s: float
    period_s: float = 15.0
    replicas: int = 4
    ratio: float = 1.0

    def max_change(self, replicas: int) -> int:
        """Return the maximum change in a period for a number of replicas."""
        return max(self.replicas, math.ceil(replicas * self.ratio))


@dataclass(frozen=True)
class Scaling:
    """Configuration of an autoscaler; without triggers the fleet is fixed at `min_replicas`."""

    name: str
    triggers: tuple[Trigger, ...]
    min_replicas: int
    max_replicas: int
    up: ScalingPolicy = ScalingPolicy(0.0)
    down: ScalingPolicy = ScalingPolicy(300.0, replicas=0)


@dataclass
class Autoscaler:
    """The controller, which runs every 15 s."""

    scaling: Scaling
    _desired: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def replicas(self, now: float, current: int, observe: Callable[[float], Observed]) -> int:
        """Return the new number of replicas; `observe` returns the metrics of a window in s."""
        scaling = self.scaling
        if not scaling.triggers:
            return current
        desired = max(_compute(each, observe(each.window_s), current) for each in scaling.triggers)
        desired = min(scaling.max_replicas, max(scaling.min_replicas, desired))
        self._desired.append((now, desired))
        wanted = self._limit(now, current, self._stabilize(now, current))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _stabilize(self, now: float, current: int) -> int:
        """Grow to the lowest number of the recent past at most, shrink to the highest at least."""
        up, down = self.scaling.up.window_s, self.scaling.down.window_s
        lowest = min(desired for at, desired in self._desired if at >= now - up)
        highest = max(desired for at, desired in self._desired if at >= now - down)
        while self._desired and self._desired[0][0] < now - max(up, down):
            self._desired.popleft()
        return min(max(current, lowest), highest)

    def _limit(self, now: float, current: int, wanted: int) -> int:
        up, down = self.scaling.up, self.scaling.down
        if wanted > current:
            before = current - self._sum_changes(now, up.period_s, 1)
            return min(wanted, max(current, before + up.max_change(before)))
        before = current + self._sum_changes(now, down.period_s, -1)
        return max(wanted, min(current, before - down.max_change(before)))

    def _sum_changes(self, now: float, period_s: float, sign: int) -> int:
        """Return how many replicas were added (or removed) in a period."""
        recent = (change for at, change in self._changes if at > now - period_s)
        return sum(abs(change) for change in recent if change * sign > 0)


def _compute(trigger: Trigger, observed: Observed, current: int) -> int:
    value = trigger.read(observed)
    if not math.isfinite(value):
        return current
    is_fleet = trigger.scope == "fleet"
    if abs(value / (trigger.target * (current if is_fleet else 1)) - 1) <= TOLERANCE:
        return current
    return math.ceil(round((1 if is_fleet else observed.replicas) * value / trigger.target, 9))


def own(
    capacity_per_s: float, limit_s: float, growth: float, ready_s: float, max_replicas: int
) -> Scaling:
    """Return the configuration that `triptych deploy` writes."""
    threshold = headroom(growth, ready_s) * capacity_per_s
    rate = Trigger(lambda seen: seen.offered_per_s, threshold, "fleet", RATE_WINDOW_S)

    def guard(seen: Observed) -> float:
        return (seen.waiting_s > WAITING_SHARE * limit_s) * (seen.replicas + 1)

    triggers = rate, Trigger(guard, 1, "fleet", RATE_WINDOW_S)
    down = ScalingPolicy(stable_s(ready_s), replicas=0)
    return Scaling("triptych deploy", triggers, MIN_REPLICAS, max_replicas, down=down)


def deployed(spec: Mapping[str, Any], query: Callable[[str], float], max_replicas: int) -> Scaling:
    """Return the configuration in the ``spec`` of a ScaledObject of `triptych deploy`.

    Args:
        query: Returns the current value of a PromQL query.
        max_replicas: Maximum number of replicas on this machine.
    """

    def make_trigger(data: Mapping[str, Any]) -> Trigger:
        text, target = data["metadata"]["query"], float(data["metadata"]["threshold"])
        return Trigger(lambda _: query(text), target, "fleet", RATE_WINDOW_S)

    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = (behavior[way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown"))
    return Scaling(
        "triptych deploy",
        tuple(map(make_trigger, spec["triggers"])),
        spec["minReplicaCount"],
        min(max_replicas, spec["maxReplicaCount"]),
        ScalingPolicy(up),
        ScalingPolicy(down, replicas=0),
    )


def queue_by_compute(max_replicas: int) -> Scaling:
    """Return the configuration of NVIDIA's example: the mean ratio over the pods, target 1."""
    trigger = Trigger(lambda seen: seen.queue_by_compute, 1.0, "replica", 60.0)
    return Scaling("queue:compute", (trigger,), 1, max_replicas)


def supersonic(max_replicas: int) -> Scaling:
    """Return SuperSONIC's chart: 100 ms of queue time per execution, one replica in 30 s."""
    trigger = Trigger(lambda seen: 1e3 * seen.queue_per_execution_s, 100.0, "replica", 15.0)
    slow = ScalingPolicy(120.0, period_s=30.0, replicas=1, ratio=0.0)
    return Scaling("SuperSONIC", (trigger,), 1, max_replicas, slow, slow)


def fixed(replicas: int) -> Scaling:
    """Return a fleet of constant size."""
    return Scaling("fixed fleet", (), replicas, replicas)
