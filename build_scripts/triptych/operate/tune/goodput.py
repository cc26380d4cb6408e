"""What tuning maximises of streamed answers: goodput, or tokens a second where nothing is promised.

An answer counts only where it keeps every limit. More clients give more answers until first tokens
wait, or tokens come too slowly: the score is the goodput at the number of clients that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.operate.tune.objective import Loads, MeasureAt, Scored, ladder_to
from triptych.operate.tune.results import REQUESTS, ScoreUnit
from triptych.serving.bench.points import Measurement
from triptych.spec.slo import GenerationSlo


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
