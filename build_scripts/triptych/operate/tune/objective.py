"""Objectives of tuning: throughput within the latency SLO, and goodput of streamed answers.

With a latency SLO, closed loops of 1, 2, 4, ... clients give throughput and latency, and the score
is the throughput where the latency crosses the limit. Without one, the score is the throughput with
many clients. For streamed answers the score is the goodput: answers per second that meet every
limit, at the number of clients with the most; without an SLO, tokens per second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from triptych.operate.tune.results import REQUESTS, ScoreUnit
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import AnySlo, GenerationSlo, Slo

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of clients of the closed loops."""

MeasureAt = Callable[[int], Measurement]
"""Function that measures with a number of clients."""


class LoadFailed(Exception):
    """Error of a setting whose requests failed; it has no score."""

    def __init__(self, measurement: Measurement) -> None:
        errors = (f"{count} x {kind}" for kind, count in measurement.errors.items())
        super().__init__("; ".join(errors))


@dataclass(frozen=True)
class ScoredRound:
    """One round of one setting."""

    score: float  # score above 0, in the objective's unit
    by_clients: Mapping[int, Measurement]  # measurements by number of clients
    start: int  # first number of clients of the next round


@dataclass(frozen=True)
class Objective(ABC):
    """Objective of pipelines of one kind."""

    slo: AnySlo  # SLO; an empty one maximizes throughput
    clients: int  # Number of clients; with a latency SLO, the maximum

    # Whether later rounds use the number of clients that the first round chose.
    keeps_clients: ClassVar[bool]

    @property
    @abstractmethod
    def unit(self) -> ScoreUnit:
        """Unit of the score."""

    @property
    @abstractmethod
    def says(self) -> str:
        """Description of the score."""

    @abstractmethod
    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> ScoredRound:
        """Score a setting once.

        Args:
            measure_at: Function that measures with a number of clients.
            start: First number of clients, from the previous round.
            again: Whether the previous round was of the same setting.

        Raises:
            LoadFailed: A request failed.
        """


@dataclass(frozen=True)
class _Loads:
    """Measurements of one round, at most one per number of clients."""

    measure_at: MeasureAt
    by_clients: dict[int, Measurement] = field(default_factory=dict)

    def at(self, clients: int) -> Measurement:
        """Return the measurement with `clients`; raise `LoadFailed` on errors."""
        if clients not in self.by_clients:
            result = self.measure_at(clients)
            if result.errors or not result.requests:
                raise LoadFailed(result)
            self.by_clients[clients] = result
        return self.by_clients[clients]


def choose_ladder(max_clients: int, start: int | None) -> tuple[list[int], int]:
    """Return numbers of clients up to `max_clients`, and the index of `start` or the middle."""
    ladder = [clients for clients in CLIENTS if clients < max_clients] + [max_clients]
    return ladder, ladder.index(start) if start in ladder else len(ladder) // 2


class ThroughputObjective(Objective):
    """Objective of complete answers."""

    slo: Slo

    keeps_clients = False

    @property
    def unit(self) -> ScoreUnit:
        return REQUESTS

    @property
    def says(self) -> str:
        if not self.slo.limits_us:
            return f"requests per second with {self.clients} clients"
        limits = self.slo.without_throughput
        return f"requests per second at which {limits} is just met (closed loop)"

    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> ScoredRound:
        """Score by the throughput at the limit; each round searches for it again."""
        loads = _Loads(measure_at)

        def slo_ratio(clients: int) -> float:
            return self.slo.slo_ratio(loads.at(clients).latencies_us)

        if not self.slo.limits_us:
            one = loads.at(self.clients)
            return ScoredRound(one.throughput_per_s, loads.by_clients, self.clients)
        ladder, at = choose_ladder(self.clients, start)
        while slo_ratio(ladder[at]) > 1 and at > 0:
            at -= 1
        while (
            slo_ratio(ladder[at]) <= 1 and at + 1 < len(ladder) and slo_ratio(ladder[at + 1]) <= 1
        ):
            at += 1
        score = self._crossing(loads.by_clients, ladder[at : at + 2])
        return ScoredRound(score, loads.by_clients, ladder[at])

    def _crossing(self, found: Mapping[int, Measurement], around: list[int]) -> float:
        """Interpolate the throughput at the limit between two numbers of clients."""
        low = found[around[0]]
        slo_ratio = self.slo.slo_ratio(low.latencies_us)
        if slo_ratio > 1:  # one client misses the SLO: higher if nearer to the limit
            return low.throughput_per_s / slo_ratio
        if len(around) < 2 or around[1] not in found:
            return low.throughput_per_s
        high = found[around[1]]
        share = (1 - slo_ratio) / (self.slo.slo_ratio(high.latencies_us) - slo_ratio)
        grown = low.throughput_per_s + share * (high.throughput_per_s - low.throughput_per_s)
        return max(low.throughput_per_s, grown)


class GoodputObjective(Objective):
    """Objective of streamed answers."""

    slo: GenerationSlo

    keeps_clients = True

    @property
    def unit(self) -> ScoreUnit:
        return REQUESTS if self.slo.limits_us else "tokens/s"

    @property
    def says(self) -> str:
        if not self.slo.limits_us:
            return f"tokens per second with {self.clients} clients"
        limits = self.slo.without_throughput
        return f"goodput: answers per second that meet {limits}, at the best number of clients"

    def score(
        self, measure_at: MeasureAt, start: int | None = None, *, again: bool = False
    ) -> ScoredRound:
        """Score by goodput; the first round finds the number of clients of later rounds."""
        loads = _Loads(measure_at)
        if not self.slo.limits_us:
            one = loads.at(self.clients)
            return ScoredRound(one.tokens_per_s, loads.by_clients, self.clients)

        def good(clients: int) -> float:
            return self._score(loads.at(clients))

        ladder, at = choose_ladder(self.clients, start)
        if again:
            return ScoredRound(good(ladder[at]), loads.by_clients, ladder[at])
        first = loads.at(ladder[at])
        # If most answers already miss the SLO, more clients take long and add no information.
        up_first = good(ladder[at]) >= first.throughput_per_s / 2
        begun_at = at
        for way in (1, -1) if up_first else (-1, 1):
            while self.improves_at(loads, ladder, at, way):
                at += way
            if at != begun_at:
                break
        return ScoredRound(good(ladder[at]), loads.by_clients, ladder[at])

    def improves_at(self, loads: _Loads, ladder: Sequence[int], at: int, way: int) -> bool:
        """Return whether the next number of clients scores higher; fewer cannot within the SLO."""
        present = loads.at(ladder[at])
        if not 0 <= at + way < len(ladder) or (
            way < 0 and self.slo.slo_ratio(present.latencies_us) <= 1
        ):
            return False
        return self._score(loads.at(ladder[at + way])) > self._score(present)

    def _score(self, one: Measurement) -> float:
        """Return the goodput. Without an answer within the SLO: a smaller value, higher near it."""
        if one.goodput_per_s:
            return one.goodput_per_s
        return 1 / one.seconds / max(1.0, self.slo.slo_ratio(one.latencies_us))
