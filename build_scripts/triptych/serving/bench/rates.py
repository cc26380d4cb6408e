"""Search the highest rate of Poisson arrivals within an SLO: by growth, then by bisection."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from triptych.base.errors import Progress, UserError
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.perf_analyzer import Request
from triptych.serving.bench.results import LoadPoint, Measurement, OfferedLoad, RateSearch
from triptych.spec.slo import AnySlo

MIN_REQUESTS = 300
"""Minimum number of requests of a measurement; with fewer, p99 depends on two or three."""

MIN_ANSWERED = 0.93
"""Minimum share of answered requests within the windows; less means a growing backlog."""

GROWTH = 1.5
MAX_BRACKET_RATIO = 1.05
"""Maximum ratio of the lowest failed rate to the highest successful rate at the end."""

_MIN_STEP_DOWN = 100.0
_SIGMAS = 3.0
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
    pace with requests. A rate that fails is measured again.

    Args:
        target: Target of the load.
        requests: Requests, sent in turn.
        slo: SLO; its throughput is ignored.
        start_per_s: First rate.
        seconds: Duration of a measurement; extended for a minimum number of requests.
        budget_s: Time budget; no measurement begins that would end after it.
        progress: Called at each measurement.

    Raises:
        UserError: The server or model is unusable, or the start or budget is not above 0.
    """
    if start_per_s <= 0 or budget_s <= 0:
        raise UserError(
            "start_per_s, budget_s",
            "must be above 0",
            given=(start_per_s, budget_s),
            remedy="Give positive numbers",
        )
    deadline = time.monotonic() + budget_s
    tried: dict[float, LoadPoint] = {}
    warmup_requests = WARM_UP_REQUESTS
    highest_met, lowest_missed = 0.0, math.inf
    rate: float | None = start_per_s
    while rate is not None:
        point = _try_rate(target, requests, slo, rate, seconds, deadline, warmup_requests)
        if point is None:
            progress("rate", f"{rate:.0f}/s: no time left")
            break
        tried[rate] = point
        if rate_meets_slo(point.rounds[-1], slo, rate):
            highest_met = max(highest_met, rate)
            warmup_requests = 0
        else:
            lowest_missed = min(lowest_missed, rate)
            warmup_requests = DRAIN_REQUESTS
        progress("rate", _line(point, slo, rate))
        rate = next_rate(highest_met, lowest_missed, start_per_s)
    return RateSearch(
        slo=slo,
        highest_per_s=highest_met,
        lowest_broken_per_s=None if math.isinf(lowest_missed) else lowest_missed,
        points=tuple(tried[rate] for rate in sorted(tried)),
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


def rate_meets_slo(measurement: Measurement, slo: AnySlo, rate_per_s: float) -> bool:
    """Whether a measurement at `rate_per_s` meets the SLO."""
    if measurement.errors or not measurement.requests:
        return False
    sent = measurement.sent_per_s or rate_per_s
    # Arrivals are random, so the actual rate of few requests deviates from the requested rate.
    noise = _SIGMAS / math.sqrt(measurement.requests)
    is_sent = sent >= rate_per_s * (1 - max(1 - MIN_ANSWERED, noise))
    is_answered = measurement.throughput_per_s >= MIN_ANSWERED * min(sent, rate_per_s)
    return is_sent and is_answered and slo.slo_ratio(measurement.latencies_us) <= 1


def _try_rate(
    target: BenchTarget,
    requests: Sequence[Request],
    slo: AnySlo,
    rate: float,
    seconds: float,
    deadline: float,
    warmup_requests: int,
) -> LoadPoint | None:
    """Measure a rate, again if it misses the SLO; return None without time for a measurement."""
    load = OfferedLoad("poisson", rate)
    length = max(seconds, MIN_REQUESTS / rate)
    rounds: list[Measurement] = []
    for _ in range(2):
        left = deadline - time.monotonic()
        if left < length:
            break
        rounds.append(
            measure(
                target,
                requests,
                load,
                seconds=length,
                warmup_requests=DRAIN_REQUESTS if rounds else warmup_requests,
                timeout_s=min(left, 2 * length) + _SLACK_S,
            )
        )
        if rate_meets_slo(rounds[-1], slo, rate):
            break
    if not rounds:
        return None
    return LoadPoint(target.pipeline, load, tuple(rounds), find_bottleneck(rounds[-1], load))


def _line(point: LoadPoint, slo: AnySlo, rate: float) -> str:
    last = point.rounds[-1]
    if last.errors:
        outcome = ", ".join(f"{count} x {kind}" for kind, count in last.errors.items())
    else:
        outcome = f"{last.throughput_per_s:.0f}/s answered, p99 {last.p99_us / 1e3:.1f} ms"
    verb = "meets" if rate_meets_slo(last, slo, rate) else "misses"
    return f"{rate:.0f}/s {verb} the SLO: {outcome}"
