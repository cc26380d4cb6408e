"""What tuning maximises of streamed answers: goodput, or tokens a second where nothing is promised.

An answer counts only where it keeps every limit. More clients give more answers until first tokens
wait, or tokens come too slowly: the score is the goodput at the number of clients that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.bench.points import Measurement
from triptych.pipeline.slo import GenerationSlo
from triptych.tune.objective import Loads, MeasureAt, Scored, ladder_to
from triptych.tune.results import REQUESTS, ScoreUnit


@dataclass(frozen=True)
class Goodput:
    """See `Scoring`."""

    slo: GenerationSlo
    clients: int  # of the load without a promised latency, and most of one with it

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
        way = 1 if self._climbs(good, ladder, at, 1) else -1
        while self._climbs(good, ladder, at, way):
            at += way
        return Scored(good(ladder[at]), loads.found, ladder[at])

    def _climbs(
        self, good: Callable[[int], float], ladder: Sequence[int], at: int, way: int
    ) -> bool:
        """Whether the next number of clients has more."""
        return 0 <= at + way < len(ladder) and good(ladder[at + way]) > good(ladder[at])

    def _good(self, one: Measurement) -> float:
        """Goodput; where no answer was good, less than one would be: the nearer the more."""
        if one.goodput_per_s:
            return one.goodput_per_s
        return 1 / one.seconds / max(1.0, self.slo.strain(one.latencies_us))
