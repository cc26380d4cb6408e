"""What tuning maximizes: the throughput at which a promised latency holds, or the highest one.

A latency is promised: closed loops of 1, 2, 4, ... clients give throughput against latency, and the
score is the throughput where the curve crosses the limit. None is: throughput with many clients.
Of streamed answers it is `goodput`.

What tuning maximizes of streamed answers: goodput, or tokens a second where nothing is promised.

An answer counts only where it keeps every limit. More clients give more answers until first tokens
wait, or tokens come too slowly: the score is the goodput at the number of clients that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.operate.tune.results import REQUESTS, ScoreUnit
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import GenerationSlo, Promise, Slo

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


@dataclass(frozen=True)
class Goodput:
    """See `Scoring`."""

    slo: GenerationSlo
    clients: int  # of the load without a promised latency, and most of one with it

    keeps_clients = True

    @property
    def unit(self) -> ScoreUnit:
        return REQUESTS if self.slo.limits_us else "tokens/s"

    @property
    def says(self) -> str:
        if not self.slo.limits_us:
            return f"tokens a second with {self.clients} clients"
        limits = self.slo.model_copy(update={"throughput": None})
        return f"goodput, answers a second that keep {limits}, with as many clients as give most"

    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> Scored:
        """See `Scoring`; a setting's first round finds how many clients the others have."""
        loads = Loads(measure_at)
        if not self.slo.limits_us:
            one = loads.at(self.clients)
            return Scored(one.tokens_per_s, loads.found, self.clients)

        def good(clients: int) -> float:
            return self._good(loads.at(clients))

        ladder, at = ladder_to(self.clients, start)
        if again:
            return Scored(good(ladder[at]), loads.found, ladder[at])
        first = loads.at(ladder[at])
        # Where most answers come late already, a load of more would last long and tell nothing.
        up_first = good(ladder[at]) >= first.throughput_per_s / 2
        begun_at = at
        for way in (1, -1) if up_first else (-1, 1):
            while self._climbs(loads, ladder, at, way):
                at += way
            if at != begun_at:
                break
        return Scored(good(ladder[at]), loads.found, ladder[at])

    def _climbs(self, loads: Loads, ladder: Sequence[int], at: int, way: int) -> bool:
        """Whether the next number of clients has more: fewer have not where the promise holds."""
        here = loads.at(ladder[at])
        if not 0 <= at + way < len(ladder) or (way < 0 and self._keeps(here)):
            return False
        return self._good(loads.at(ladder[at + way])) > self._good(here)

    def _keeps(self, one: Measurement) -> bool:
        return self.slo.strain(one.latencies_us) <= 1

    def _good(self, one: Measurement) -> float:
        """Goodput; where no answer was good, less than one would be: the nearer the more."""
        if one.goodput_per_s:
            return one.goodput_per_s
        return 1 / one.seconds / max(1.0, self.slo.strain(one.latencies_us))
