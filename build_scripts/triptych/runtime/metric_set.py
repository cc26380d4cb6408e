"""Metrics with gauges, and with former names that are exported for one more minor release."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from .counters import CounterSet, Series, format_bound


class Deprecated(NamedTuple):
    """Former name of a metric.

    Attributes:
        name: Former name.
        label: Former name of its label; empty if the label has kept its name.
        factor: Former unit relative to the unit of today; applies to values and to ``le``.
    """

    name: str
    label: str = ""
    factor: float = 1.0


class MetricSet(CounterSet):
    """Counters and gauges of one step, also under their former names.

    Args:
        pipeline: Name of the pipeline.
        former: Former name of each metric that has one.
        gauges: Names of the metrics that are gauges.
    """

    def __init__(
        self, pipeline: str, former: Mapping[str, Deprecated], gauges: Container[str] = ()
    ) -> None:
        super().__init__(pipeline)
        self._former, self._gauges = former, gauges
        self._old: dict[Series, tuple[Any, float]] = {}
        """Metrics under their former names, and the factor of their values."""

    def add(
        self, name: str, description: str, *, label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        kind = "GAUGE" if name in self._gauges else "COUNTER"
        for value, metric in self._make(name, description, label, values, kind).items():
            self._metrics[name, value] = metric
        if name not in self._former:
            return
        old_name, old_label, factor = self._former[name]
        old = {value: _scale_bound(value, factor) for value in values}
        metrics = self._make(
            old_name, f"Deprecated: use {name}", old_label or label, [*old.values()], kind
        )
        if name.endswith(("_bucket", "_count")):
            factor = 1.0
        for value in values:
            self._old[name, value] = metrics[old[value]], factor

    def update(self, values: Mapping[Series, float]) -> None:
        for series, value in values.items():
            self._write(self._metrics[series], series[0], value)
            if series in self._old:
                metric, factor = self._old[series]
                self._write(metric, series[0], value * factor)

    def clear(self) -> None:
        self._old.clear()
        super().clear()

    def _write(self, metric: Any, name: str, value: float) -> None:
        if name in self._gauges:
            metric.set(value)
        else:
            metric.increment(value)


def _scale_bound(value: str, factor: float) -> str:
    """Return the ``le`` of a bucket in a former unit; other values stay."""
    try:
        return value if factor == 1.0 or value == "+Inf" else format_bound(float(value) * factor)
    except ValueError:
        return value
