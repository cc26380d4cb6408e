"""What Kubernetes' autoscaler makes of a metric, and four ways to feed it.

The formula, its tolerance, stabilisation windows and policies are those of the controller
(HorizontalPodAutoscaler, autoscaling/v2); KEDA hands it external metrics. This is a simulation of
both: neither runs here.
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
    """What metrics say of a window.

    Attributes:
        offered_per_s: requests that came in.
        waiting_s: mean time that an answered request waited; NaN without any.
        queue_an_execution_s: time in queues over executions.
        queue_by_compute: the same over time in the core, the mean of the replicas.
        seen: replicas that have metrics.
    """

    offered_per_s: float
    waiting_s: float
    queue_an_execution_s: float
    queue_by_compute: float
    seen: int


@dataclass(frozen=True)
class Trigger:
    """A metric, the value that it should have, and what it is a value of.

    ``fleet``: replicas = ceil(value / target) (KEDA's AverageValue); ``replica``: ceil(replicas x
    value / target) (its Value, and a mean over pods).
    """

    read: Callable[[Observed], float]
    target: float
    of: Literal["fleet", "replica"]
    window_s: float


@dataclass(frozen=True)
class Pace:
    """How fast replicas may come or go: at most these in each period; the larger of both."""

    window_s: float
    period_s: float = 15.0
    replicas: int = 4
    share: float = 1.0

    def most(self, replicas: int) -> int:
        return max(self.replicas, math.ceil(replicas * self.share))


@dataclass(frozen=True)
class Scaling:
    """An autoscaler's settings; without triggers the fleet is fixed at its fewest."""

    name: str
    triggers: tuple[Trigger, ...]
    fewest: int
    most: int
    up: Pace = Pace(0.0)
    down: Pace = Pace(300.0, replicas=0)


@dataclass
class Autoscaler:
    """The controller, looked at every 15 s."""

    scaling: Scaling
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def replicas(self, now: float, current: int, observe: Callable[[float], Observed]) -> int:
        """How many there should be; `observe` tells of a window's seconds."""
        scaling = self.scaling
        if not scaling.triggers:
            return current
        wish = max(_wish(each, observe(each.window_s), current) for each in scaling.triggers)
        wish = min(scaling.most, max(scaling.fewest, wish))
        self._wishes.append((now, wish))
        wanted = self._paced(now, current, self._settled(now, current))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _settled(self, now: float, current: int) -> int:
        """No more than all recent wishes to grow, no fewer than any recent wish to shrink."""
        up, down = self.scaling.up.window_s, self.scaling.down.window_s
        lowest = min(wish for at, wish in self._wishes if at >= now - up)
        highest = max(wish for at, wish in self._wishes if at >= now - down)
        while self._wishes and self._wishes[0][0] < now - max(up, down):
            self._wishes.popleft()
        return min(max(current, lowest), highest)

    def _paced(self, now: float, current: int, wanted: int) -> int:
        up, down = self.scaling.up, self.scaling.down
        if wanted > current:
            added = self._changed(now, up.period_s, 1)
            return min(wanted, max(current, current - added + up.most(current - added)))
        gone = self._changed(now, down.period_s, -1)
        return max(wanted, min(current, current + gone - down.most(current + gone)))

    def _changed(self, now: float, period_s: float, sign: int) -> int:
        """Replicas that came (or went) in a period."""
        recent = (change for at, change in self._changes if at > now - period_s)
        return sum(abs(change) for change in recent if change * sign > 0)


def _wish(trigger: Trigger, observed: Observed, current: int) -> int:
    value = trigger.read(observed)
    if not math.isfinite(value):
        return current
    over = trigger.target * (current if trigger.of == "fleet" else 1)
    if abs(value / over - 1) <= TOLERANCE:
        return current
    times = 1 if trigger.of == "fleet" else observed.seen
    return math.ceil(round(times * value / trigger.target, 9))


def own(capacity_per_s: float, limit_s: float, growth: float, ready_s: float, most: int) -> Scaling:
    """As `triptych deploy` writes it."""
    return Scaling(
        "triptych deploy",
        (
            Trigger(
                lambda seen: seen.offered_per_s,
                headroom(growth, ready_s) * capacity_per_s,
                "fleet",
                RATE_WINDOW_S,
            ),
            Trigger(
                lambda seen: (seen.waiting_s > WAITING_SHARE * limit_s) * (seen.seen + 1),
                1,
                "fleet",
                RATE_WINDOW_S,
            ),
        ),
        fewest=MIN_REPLICAS,
        most=most,
        down=Pace(stable_s(ready_s), replicas=0),
    )


def deployed(spec: Mapping[str, Any], ask: Callable[[str], float], most: int) -> Scaling:
    """What the ``spec`` of a ScaledObject says, at most so many replicas.

    Args:
        spec: plain data, as `triptych deploy` writes it: each trigger is an AverageValue.
        ask: the value of a query now.
        most: that there is room for.
    """

    def trigger(of: Mapping[str, Any]) -> Trigger:
        query, target = of["metadata"]["query"], float(of["metadata"]["threshold"])
        return Trigger(lambda _: ask(query), target, "fleet", RATE_WINDOW_S)

    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = (behavior[way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown"))
    return Scaling(
        "triptych deploy",
        tuple(map(trigger, spec["triggers"])),
        fewest=spec["minReplicaCount"],
        most=min(most, spec["maxReplicaCount"]),
        up=Pace(up),
        down=Pace(down, replicas=0),
    )


def queue_by_compute(most: int) -> Scaling:
    """As in NVIDIA's example of autoscaling: the ratio's mean over the pods, target 1."""
    trigger = Trigger(lambda seen: seen.queue_by_compute, 1.0, "replica", 60.0)
    return Scaling("queue:compute", (trigger,), fewest=1, most=most)


def supersonic(most: int) -> Scaling:
    """SuperSONIC's chart as it ships: queue milliseconds an execution, 100; one replica in 30 s."""
    trigger = Trigger(lambda seen: 1e3 * seen.queue_an_execution_s, 100.0, "replica", 15.0)
    slow = Pace(120.0, period_s=30.0, replicas=1, share=0.0)
    return Scaling("SuperSONIC", (trigger,), fewest=1, most=most, up=slow, down=slow)


def fixed(replicas: int) -> Scaling:
    """So many, come what may."""
    return Scaling("fixed fleet", (), fewest=replicas, most=replicas)
