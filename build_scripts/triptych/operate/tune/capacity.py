"""What a measured capacity becomes when a request of the core takes more work, or less.

An estimate: the work of the core grows with its tokens, and all waiting grows with the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from triptych.base.errors import UserError
from triptych.operate.tune.results import TuneResult
from triptych.serving.bench.points import BenchResult, Point, RateSearch, Subject, read_result
from triptych.spec.slo import PERCENTILES, AnySlo

_STEPS = 1000

Curves = Mapping[str, Sequence[float]]
"""Name of a percentile to its values, in microseconds, one a rate."""


@dataclass(frozen=True)
class MeasuredLoad:
    """What a load test found of a build of the pipeline."""

    highest_per_s: float  # that it can answer; within the promise, where there is one
    slo: AnySlo
    points: tuple[Point, ...]  # Poisson rates ascending, for the latencies; may be empty
    core_share: float | None  # of the steps' work; None where the server did not tell
    row_tokens: float | None = None  # computed for a row of its load; None where that is unknown

    @classmethod
    def of(
        cls,
        points: Sequence[Point],
        rate: RateSearch | None,
        slo: AnySlo,
        subject: Subject | None = None,
    ) -> MeasuredLoad:
        """What bench or tune found.

        Args:
            points: of the pipeline in closed loops.
            rate: the search for the highest rate, where there was one.
            slo: the promise; that of `rate` goes before it.
            subject: what was measured; None takes it for the pipeline as it is.
        """
        tried = rate.points if rate is not None else ()
        shares = [share for share in map(_core_share, (*points, *tried)) if share is not None]
        # A server that was too slow for any answer has percentiles that are no numbers.
        usable = [point for point in tried if all(map(isfinite, point.latencies_us.values()))]
        best = max((point.median("throughput_per_s") for point in points), default=0.0)
        return cls(
            highest_per_s=best if rate is None else rate.highest_per_s,
            slo=slo if rate is None else rate.slo,
            points=tuple(sorted(usable, key=lambda point: point.load.value)),
            core_share=float(np.median(shares)) if shares else None,
            row_tokens=None if subject is None else _row_tokens(subject),
        )


def _row_tokens(subject: Subject) -> float | None:
    rows = sum(subject.lengths.values())
    tokens = sum(length * count for length, count in subject.lengths.items())
    return tokens / rows / (1.0 - subject.padding) if tokens else None


def measured_in(reports: Path) -> MeasuredLoad | None:
    """The last result of bench or tune below a pipeline's folder of reports; None for none.

    Raises:
        UserError: it is not one that this version wrote.
    """
    files = [reports / "bench/bench.json", reports / "tune/tune.json"]
    newest = max(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    try:
        if newest.name == "bench.json":
            bench = read_result(BenchResult, newest, "bench")
            return MeasuredLoad.of(bench.points, bench.rate, bench.slo, bench.subject)
        tuned = read_result(TuneResult, newest, "tune")
    except UserError as error:
        raise UserError(
            str(newest),
            "must be a result of bench or tune",
            given=f"{error.given:.200}",
            remedy="Run `triptych bench` again, or remove it",
        ) from error
    winner = tuned.winner
    return MeasuredLoad.of(winner.points, winner.rate, tuned.slo, tuned.subject)


@dataclass(frozen=True)
class Capacity:
    work: float  # of a request, over what it was when it was measured
    highest_before_per_s: float  # requests, as measured
    highest_per_s: float  # requests, as estimated for the new traffic
    p99_us: float | None  # at the rate asked for; None where that is unknown or was not measured
    holds: bool | None  # whether the promise does at that rate; None where no rate is known


def estimate(measured: MeasuredLoad, core_work: float, rate_per_s: float | None) -> Capacity:
    """Stretch what was measured.

    With `work` times the work in a request, those that come at a rate r wait as others did at
    ``work * r``, only `work` times as long. This is exact where nothing but work takes time; a
    queue delay does not stretch.

    Args:
        measured: before.
        core_work: of the core in a request, over what it was.
        rate_per_s: requests a second; None where that is not known.
    """
    share = 1.0 if measured.core_share is None else measured.core_share
    work = 1.0 - share + share * core_work
    rates = [point.load.value for point in measured.points]
    highest = measured.highest_per_s
    if rates:
        tried = np.linspace(0.0, measured.highest_per_s, _STEPS + 1).tolist()
        curves = _stretched(measured.points, tried, work)
        highest = max(
            (
                rate
                for place, rate in enumerate(tried)
                if measured.slo.strain({name: curve[place] for name, curve in curves.items()}) <= 1
            ),
            default=0.0,
        )
    p99, holds = None, None
    if rate_per_s is not None:
        if rates and rate_per_s * work <= max(rates):
            p99 = _stretched(measured.points, [rate_per_s * work], work)["p99"][0]
        holds = max(rate_per_s, measured.slo.throughput or 0.0) * work <= highest
    return Capacity(work, measured.highest_per_s, highest / work, p99, holds)


def _stretched(points: Sequence[Point], at: Sequence[float], work: float) -> Curves:
    """Latencies at rates between those measured, times `work`."""
    rates = [point.load.value for point in points]
    curves = [point.latencies_us for point in points]
    return {
        name: (work * np.interp(at, rates, [curve[name] for curve in curves])).tolist()
        for name in PERCENTILES
    }


def _core_share(point: Point) -> float | None:
    """Of the steps' busy time; an execution's time counts once for all its requests."""
    busy = {
        step.step: step.compute_us * step.executions / step.requests
        for step in point.typical.steps
        if step.requests
    }
    total = sum(busy.values())
    return busy["core"] / total if "core" in busy and total > 0 else None
