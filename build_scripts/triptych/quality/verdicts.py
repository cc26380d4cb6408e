"""What the gate says: a verdict on each metric, the worst rows, and what is wrong in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triptych.quality.plain import plain_data
from triptych.tasks.accuracy import METRICS

FEW_ROWS = 200
"""Fewer rows of traffic than this show little of what an artifact gets wrong."""


@dataclass(frozen=True)
class Verdict:
    """One metric.

    Attributes:
        metric: its name in `tasks.accuracy.METRICS`.
        value: measured; NaN where it could not be.
        limit: the worst value allowed; None where there is none.
        passed: whether `value` keeps to `limit`.
    """

    metric: str
    value: float
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class WorstRow:
    """A request whose answer is far from the reference's.

    Attributes:
        shown: the request in short.
        badness: how wrong the answer is on the task's own scale; 0 where it is right, or where
            the row is made up and has no part in the task's metrics.
        difference: largest difference of any element of the core's outputs, as `max_difference`.
        wanted: the reference's answer in short.
        got: the artifact's.
    """

    shown: str
    badness: float
    difference: float
    wanted: str
    got: str


@dataclass(frozen=True)
class GateResult:
    """What the gate measured.

    Attributes:
        precision: of the artifact.
        rows: requests of the traffic compared.
        edge_rows: requests made up: empty, at the limit and the like.
        finite: no NaN, no infinity.
        verdicts: one a metric.
        failures: what broke a limit, in words; empty when the artifact may ship.
        worst: the worst rows, worst first.
        notes: what else a reader should know, a sentence each.
        row_differences: of each request, as `WorstRow.difference`; made-up ones first.
        labelled: the result on labelled rows as plain data; None where there are none.
    """

    precision: str
    rows: int
    edge_rows: int
    finite: bool
    verdicts: tuple[Verdict, ...]
    failures: tuple[str, ...]
    worst: tuple[WorstRow, ...] = ()
    notes: tuple[str, ...] = ()
    row_differences: tuple[float, ...] = ()
    labelled: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether the artifact may ship."""
        return not self.failures

    def value(self, metric: str) -> float | None:
        """What was measured; None where the metric does not apply."""
        return next((v.value for v in self.verdicts if v.metric == metric), None)

    def as_dict(self) -> dict[str, Any]:
        """For the lock, the report and ``--json``: a number that is not finite is null."""
        plain: dict[str, Any] = plain_data(asdict(self))
        plain["row_differences"] = [
            None if value is None else float(f"{value:.3e}") for value in plain["row_differences"]
        ]
        return plain


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
