"""What tuning maximises: the throughput at which a promised latency holds, or the highest one.

A latency is promised: closed loops of 1, 2, 4, ... clients give throughput against latency, and the
score is the throughput where the curve crosses the limit. None is: throughput with many clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych.bench.points import Measurement
from triptych.pipeline.slo import Slo

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Clients of the closed loops."""

MeasureAt = Callable[[int], Measurement]
"""Measures with so many clients."""


class LoadFailed(Exception):
    """A setting answered with errors: it has no score."""

    def __init__(self, measurement: Measurement) -> None:
        errors = (f"{count} x {kind}" for kind, count in measurement.errors.items())
        super().__init__("; ".join(errors))


@dataclass(frozen=True)
class Scored:
    """One round of one setting."""

    score: float  # requests a second
    found: Mapping[int, Measurement]  # clients to what was measured with them
    start: int  # clients to begin with in the next round, where little has changed


@dataclass(frozen=True)
class Objective:
    slo: Slo
    clients: int  # of the load without a promised latency, and most of one with it

    @property
    def says(self) -> str:
        if not self.slo.limits_us:
            return f"requests answered a second with {self.clients} clients"
        limits = self.slo.model_copy(update={"throughput": None})
        return f"requests answered a second where {limits} just holds (closed loop)"

    def score(self, measure_at: MeasureAt, start: int | None = None) -> Scored:
        """Measure one setting once.

        Args:
            measure_at: measures with a number of clients.
            start: clients to begin with; where the limit was crossed before.

        Raises:
            LoadFailed: a request was answered with an error.
        """
        found: dict[int, Measurement] = {}

        def strain(clients: int) -> float:
            if clients not in found:
                one = measure_at(clients)
                if one.errors or not one.requests:
                    raise LoadFailed(one)
                found[clients] = one
            return self.slo.strain(found[clients].latencies_us)

        if not self.slo.limits_us:
            strain(self.clients)
            return Scored(found[self.clients].throughput_per_s, found, self.clients)
        ladder = [clients for clients in CLIENTS if clients < self.clients] + [self.clients]
        at = ladder.index(start) if start in ladder else len(ladder) // 2
        while strain(ladder[at]) > 1 and at > 0:
            at -= 1
        while strain(ladder[at]) <= 1 and at + 1 < len(ladder) and strain(ladder[at + 1]) <= 1:
            at += 1
        return Scored(self._crossing(found, ladder[at : at + 2]), found, ladder[at])

    def _crossing(self, found: Mapping[int, Measurement], around: list[int]) -> float:
        """Throughput at the limit: between the last number of clients that holds and the next."""
        low = found[around[0]]
        strain = self.slo.strain(low.latencies_us)
        if strain > 1:  # not even one client: the nearer to the limit, the better
            return low.throughput_per_s / strain
        if len(around) < 2 or around[1] not in found:
            return low.throughput_per_s
        high = found[around[1]]
        share = (1 - strain) / (self.slo.strain(high.latencies_us) - strain)
        grown = low.throughput_per_s + share * (high.throughput_per_s - low.throughput_per_s)
        return max(low.throughput_per_s, grown)
