"""What the gate says: a verdict on each metric, the worst rows, and what is wrong in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from triptych.repository.records import Verdict
from triptych.tasks.accuracy import METRICS


def judge_metrics(
    values: Mapping[str, float], limits: Mapping[str, float], *, complete: bool
) -> tuple[Verdict, ...]:
    """A verdict on each metric that was measured or has a limit, in the order of `METRICS`.

    Args:
        values: measured, by metric.
        limits: the worst value allowed, by metric.
        complete: whether all that can be was measured. If not, a limit without a value is broken.
    """
    verdicts = []
    for name, metric in METRICS.items():
        limit = limits.get(name)
        if name not in values and (limit is None or complete):
            continue
        value = values.get(name, math.nan)
        verdicts.append(Verdict(name, value, limit, limit is None or metric.meets(value, limit)))
    return tuple(verdicts)


def say_failures(verdicts: Sequence[Verdict], said: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A sentence for each verdict that failed, or those of `said` for its metric."""
    for verdict in verdicts:
        if verdict.passed:
            continue
        if said.get(verdict.metric):
            yield from said[verdict.metric]
        else:
            side = "above" if METRICS[verdict.metric].better == "lower" else "below"
            yield f"{verdict.metric} is {verdict.value:.6g}, {side} {verdict.limit}"
