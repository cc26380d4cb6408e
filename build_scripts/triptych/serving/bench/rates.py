"""Search the highest rate of Poisson arrivals within an SLO: by growth, then by bisection.

Each rate is measured in several rounds, so that neither a noisy round nor a lucky one decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.base.confidence import limit_ratio
from triptych.base.errors import Progress
from triptych.base.formatting import amount
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import WINDOW_FACTOR, BenchTarget, is_sent, measure
from triptych.serving.bench.perf_analyzer import Request
from triptych.serving.bench.results import (
    LoadPoint,
    Measurement,
    OfferedLoad,
    RateSearch,
    SloState,
    judge_ratio,
)
from triptych.spec.slo import AnySlo

MIN_REQUESTS = 300
"""Minimum number of requests of a measurement; with fewer, p99 depends on two or three."""

MIN_ANSWERED = 0.93
"""Minimum share of answered requests within the windows; less means a growing backlog."""

GROWTH = 1.5
MAX_BRACKET_RATIO = 1.05
"""Maximum ratio of the lowest failed rate to the highest successful rate at the end."""

LOOKS = (3, 5)
"""Numbers of rounds after which a rate is judged; the second only if the first cannot tell."""

_MIN_STEP_DOWN = 100.0
_SLACK_S = 20.0
WARM_UP_REQUESTS = 50
DRAIN_REQUESTS = 8
"""Requests sent after a failed rate, which are answered after the queues are empty."""


def find_highest_rate(
    target: BenchTarget,
    requests: Sequence[Request],
    slo: AnySlo,
    *,
    start_per_s: float,
    seconds: float,
    budget_s: float,
    progress: Progress,
) -> RateSearch:
    """Search for the highest rate at which the latency limits of `slo` hold.

    A rate succeeds if no request fails, all percentiles are within their limits, and answers keep
    pace with requests, with 95 % confidence over the rounds. A rate of which neither success nor
    failure is proven counts as neither; the search continues below it. New rounds confirm the
    highest rate at the end, because the search chose it among many.

    Args:
        target: Target of the load.
        requests: Requests, sent in turn.
        slo: SLO; its throughput is ignored.
        start_per_s: First rate, above 0.
        seconds: Duration of a measurement; extended for a minimum number of requests.
        budget_s: Time budget; no measurement begins that would end after it.
        progress: Called at each measurement.

    Raises:
        UserError: The server or model is unusable.
    """
    trials = _RateTrials(
        target, requests, slo, seconds, time.monotonic() + budget_s, progress, WARM_UP_REQUESTS
    )
    states: dict[float, SloState] = {}
    highest_met, lowest_other = 0.0, math.inf
    rate: float | None = start_per_s
    while rate is not None:
        state = trials.judge(rate, reserve_s=trials.confirmation_s(highest_met))
        if state is None:
            break
        states[rate] = state
        if state == "met":
            highest_met = max(highest_met, rate)
        else:
            lowest_other = min(lowest_other, rate)
        rate = next_rate(highest_met, lowest_other, start_per_s)
    met = sorted((rate for rate, state in states.items() if state == "met"), reverse=True)
    return RateSearch(
        slo=slo,
        highest_per_s=next((rate for rate in met if trials.judge(rate) == "met"), 0.0),
        lowest_broken_per_s=min(
            (rate for rate, state in states.items() if state == "missed"), default=None
        ),
        points=tuple(trials.points()),
    )


def next_rate(highest_met: float, lowest_missed: float, start_per_s: float) -> float | None:
    """Return the next rate of the search; None at its end.

    Rates increase until one fails, decrease until one succeeds, and then bisect the bracket.

    Args:
        highest_met: Highest rate that met the SLO; 0 without one.
        lowest_missed: Lowest rate that missed the SLO; infinite without one.
        start_per_s: First rate.
    """
    if math.isinf(lowest_missed):
        return highest_met * GROWTH
    if highest_met == 0:
        lower = lowest_missed / 2
        return lower if lower >= start_per_s / _MIN_STEP_DOWN else None
    return (
        math.sqrt(highest_met * lowest_missed)
        if lowest_missed / highest_met > MAX_BRACKET_RATIO
        else None
    )


def judge_rate(rounds: Sequence[Measurement], slo: AnySlo, rate_per_s: float) -> SloState:
    """Return whether the rounds at `rate_per_s` meet the SLO, with 95 % confidence.

    One round with errors proves nothing; two prove that the rate is missed. Rounds that the load
    generator did not send in full are ignored.
    """
    failed = sum(bool(one.errors) or not one.requests for one in rounds)
    if failed:
        return "missed" if failed > 1 else "cannot tell"
    load = OfferedLoad("poisson", rate_per_s)
    logarithms = [
        math.log(_slo_ratio(one, slo, rate_per_s)) for one in rounds if is_sent(one, load)
    ]
    return judge_ratio(limit_ratio(logarithms)) if logarithms else "cannot tell"


def _slo_ratio(measurement: Measurement, slo: AnySlo, rate_per_s: float) -> float:
    """Return the ratio to a latency limit, or of the least to the actual number of answers."""
    sent = min(measurement.sent_per_s or rate_per_s, rate_per_s)
    backlog = MIN_ANSWERED * sent / measurement.throughput_per_s
    return max(slo.slo_ratio(measurement.latencies_us), backlog)


@dataclass
class _RateTrials:
    """Measurements of all rates of a search."""

    target: BenchTarget
    requests: Sequence[Request]
    slo: AnySlo
    seconds: float
    deadline: float  # end of the time budget, on the monotonic clock
    progress: Progress
    warmup_requests: int  # number of requests before the next rate
    _rounds: dict[float, list[Measurement]] = field(default_factory=dict)

    def judge(self, rate: float, *, reserve_s: float = 0.0) -> SloState | None:
        """Measure a rate in new rounds until it is clear; return None without time.

        Args:
            rate: Requests per second.
            reserve_s: Time that must remain afterwards.
        """
        load, rounds = OfferedLoad("poisson", rate), list[Measurement]()
        while len(rounds) < LOOKS[-1]:
            left = self.deadline - time.monotonic()
            if left - reserve_s < self._length_s(rate):
                break
            rounds.append(
                measure(
                    self.target,
                    self.requests,
                    load,
                    seconds=self._length_s(rate),
                    warmup_requests=DRAIN_REQUESTS if rounds else self.warmup_requests,
                    timeout_s=min(left, 2 * self._length_s(rate)) + _SLACK_S,
                )
            )
            useless = sum(bool(one.errors) or not is_sent(one, load) for one in rounds)
            is_clear = judge_rate(rounds, self.slo, rate) != "cannot tell"
            if useless > 1 or (is_clear and len(rounds) in LOOKS):
                break
        if not rounds:
            self.progress("rate", f"{rate:.0f}/s: no time left")
            return None
        state = judge_rate(rounds, self.slo, rate)
        self._rounds.setdefault(rate, []).extend(rounds)
        self.warmup_requests = 0 if state == "met" else DRAIN_REQUESTS
        self.progress("rate", _line(rounds, state, rate))
        return state

    def confirmation_s(self, rate: float) -> float:
        """Return the time to measure a rate again; 0 for a rate of 0."""
        return LOOKS[0] * WINDOW_FACTOR * self._length_s(rate) if rate else 0.0

    def points(self) -> Iterator[LoadPoint]:
        """Yield all rates, ascending."""
        for rate, rounds in sorted(self._rounds.items()):
            load = OfferedLoad("poisson", rate)
            bottleneck = find_bottleneck(rounds[-1], load)
            yield LoadPoint(load, tuple(rounds), bottleneck)

    def _length_s(self, rate: float) -> float:
        return max(self.seconds, MIN_REQUESTS / rate)


def _line(rounds: Sequence[Measurement], state: SloState, rate: float) -> str:
    last = rounds[-1]
    if last.errors:
        outcome = ", ".join(f"{count} x {kind}" for kind, count in last.errors.items())
    else:
        outcome = f"{last.throughput_per_s:.0f}/s answered, p99 {last.p99_us / 1e3:.1f} ms"
    return f"{rate:.0f}/s: SLO {state} after {amount(len(rounds), 'round')}: {outcome}"
