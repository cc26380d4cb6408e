"""What tuning maximises: the throughput at which a promised latency holds, or the highest one.

A latency is promised: closed loops of 1, 2, 4, ... clients give throughput against latency, and the
score is the throughput where the curve crosses the limit. None is: throughput with many clients.
Of streamed answers it is `goodput`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triptych.operate.tune.results import REQUESTS, ScoreUnit
from triptych.serving.bench.points import Measurement
from triptych.spec.slo import Promise, Slo

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

    score: float  # above 0, in the objective's unit
    found: Mapping[int, Measurement]  # clients to what was measured with them
    start: int  # clients to begin with in the next round, where little has changed


class Scoring(Protocol):
    """An objective, of pipelines of one kind."""

    @property
    def slo(self) -> Promise:
        """The promise; an empty one tunes for throughput."""

    @property
    def unit(self) -> ScoreUnit:
        """What is counted a second."""

    @property
    def says(self) -> str:
        """What the score is, in a sentence."""

    @property
    def keeps_clients(self) -> bool:
        """Whether later rounds of a setting have the clients that its first one found best."""

    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> Scored:
        """Measure one setting once.

        Args:
            measure_at: measures with a number of clients.
            start: clients to begin with; where the round before ended.
            again: whether that round was of this very setting.

        Raises:
            LoadFailed: a request was answered with an error.
        """


@dataclass(frozen=True)
class Loads:
    """What is measured with each number of clients, once."""

    measure_at: MeasureAt
    found: dict[int, Measurement] = field(default_factory=dict)

    def at(self, clients: int) -> Measurement:
        """Raises `LoadFailed`."""
        if clients not in self.found:
            one = self.measure_at(clients)
            if one.errors or not one.requests:
                raise LoadFailed(one)
            self.found[clients] = one
        return self.found[clients]


def ladder_to(most: int, start: int | None) -> tuple[list[int], int]:
    """Numbers of clients up to `most`, and where among them to begin: in the middle, or `start`."""
    ladder = [clients for clients in CLIENTS if clients < most] + [most]
    return ladder, ladder.index(start) if start in ladder else len(ladder) // 2


@dataclass(frozen=True)
class Objective:
    slo: Slo
    clients: int  # of the load without a promised latency, and most of one with it

    unit = REQUESTS
    keeps_clients = False

    @property
    def says(self) -> str:
        if not self.slo.limits_us:
            return f"requests answered a second with {self.clients} clients"
        limits = self.slo.model_copy(update={"throughput": None})
        return f"requests answered a second where {limits} just holds (closed loop)"

    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> Scored:
        """See `Scoring`; each round looks for the crossing anew."""
        loads = Loads(measure_at)

        def strain(clients: int) -> float:
            return self.slo.strain(loads.at(clients).latencies_us)

        if not self.slo.limits_us:
            one = loads.at(self.clients)
            return Scored(one.throughput_per_s, loads.found, self.clients)
        ladder, at = ladder_to(self.clients, start)
        while strain(ladder[at]) > 1 and at > 0:
            at -= 1
        while strain(ladder[at]) <= 1 and at + 1 < len(ladder) and strain(ladder[at + 1]) <= 1:
            at += 1
        score = self._crossing(loads.found, ladder[at : at + 2])
        return Scored(score, loads.found, ladder[at])

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
