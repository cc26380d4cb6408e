"""Custom metrics of the Python steps on the server's metrics page.

Histograms are written as counters, because Triton's own histogram takes one value per call and
each call leaves the process (about 25 us). Values are collected as plain numbers and sent every
few seconds. No failure of the metrics may fail a request.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_TOKENS = "triptych_row_tokens"
FLUSH_S = 2.0

Series = tuple[str, str]
"""Name of a metric and the value of its one own label; an empty value if it has none."""


class CounterSet:
    """The counters of one step, each labeled with the name of the pipeline.

    Triton removes a metric together with its family, so this object holds both.

    Args:
        pipeline: Name of the pipeline.
        gauges: Names of the metrics that are gauges in place of counters.
    """

    def __init__(self, pipeline: str, gauges: Container[str] = ()) -> None:
        self._pipeline, self._gauges = pipeline, gauges
        self._families: list[Any] = []
        self._metrics: dict[Series, Any] = {}

    def add(
        self, name: str, description: str, *, label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        """Put one metric on the page, with one series for each of the label's `values`.

        Raises:
            Exception: The server has no custom metrics.
        """
        # Imported here because the names in this module are also used where there is no server.
        from triton_python_backend_utils import MetricFamily

        kind = MetricFamily.GAUGE if name in self._gauges else MetricFamily.COUNTER
        family = MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        own = {"pipeline": self._pipeline}
        for value in values:
            labels = own | ({label: value} if label else {})
            self._metrics[name, value] = family.Metric(labels=labels)

    def update(self, values: Mapping[Series, float]) -> None:
        """Increment the counters and set the gauges, in the order of `values`.

        Raises:
            Exception: The server has no such metrics any more.
        """
        for series, value in values.items():
            metric = self._metrics[series]
            if series[0] in self._gauges:
                metric.set(value)
            else:
                metric.increment(value)

    def clear(self) -> None:
        """Take all metrics off the page, each before its family."""
        self._metrics.clear()
        while self._families:
            self._families.pop()


class Histogram:
    """Values counted in buckets, and the counters that they are written as.

    Args:
        name: Name of the metric without suffix.
        description: Description of one value.
        bounds: Upper bounds of the buckets, ascending.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self._name, self._description = name, description
        self._bounds = np.array(bounds)
        self._labels = [*map(format_bound, bounds), "+Inf"]
        self._buckets = np.zeros(len(self._labels), np.int64)
        self._sum = 0.0

    def add_to(self, metrics: CounterSet) -> None:
        """Put the three counters of the histogram on the page."""
        name, description = self._name, self._description
        bounds = self._labels[::-1]
        metrics.add(f"{name}_bucket", f"{description} (bucket)", label="le", values=bounds)
        metrics.add(f"{name}_count", f"{description} (count)")
        metrics.add(f"{name}_sum", f"{description} (sum)")

    def observe(self, values: NDArray[np.generic]) -> None:
        """Add values to their buckets."""
        indices = self._bounds.searchsorted(values)  # the first bound that is not below the value
        self._buckets += np.bincount(indices, minlength=len(self._buckets))
        self._sum += float(values.sum())

    def take(self) -> Iterator[tuple[Series, float]]:
        """Yield the increments since the last call, without zeros.

        The buckets come from the last to the first, so that a scrape in between sees no bucket
        above a later one, and no larger sum than its rows can have.
        """
        totals = self._buckets.cumsum()[::-1].tolist()
        buckets = [(f"{self._name}_bucket", label) for label in self._labels[::-1]]
        values: dict[Series, float] = dict(zip(buckets, totals, strict=True))
        values |= {(f"{self._name}_count", ""): totals[0], (f"{self._name}_sum", ""): self._sum}
        self._buckets[:] = 0
        self._sum = 0.0
        yield from ((series, value) for series, value in values.items() if value)


class RowTokens:
    """Histogram of the tokens of each row of the model, padding excluded.

    Each preprocess instance has its own; the server adds up equal series.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Put the counters on the page, if the server supports custom metrics."""
        description, bounds = "Tokens of a row of the model", settings["token_bounds"]
        self._histogram = Histogram(ROW_TOKENS, description, bounds)
        self._lengths: list[NDArray[np.generic]] = []
        self._due_at = 0.0
        self._metrics: CounterSet | None = CounterSet(settings["pipeline"])
        try:
            self._histogram.add_to(self._metrics)
        except Exception:
            self._metrics = None

    def count(self, lengths: Sequence[NDArray[np.generic]]) -> None:
        """Count the token lengths of rows, one array for each request."""
        if self._metrics is None:
            return
        self._lengths += lengths
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + FLUSH_S
            self.flush()

    def flush(self) -> None:
        """Send what has been counted."""
        if self._metrics is None or not self._lengths:
            return
        self._histogram.observe(np.concatenate(self._lengths, axis=None))
        self._lengths = []
        try:
            self._metrics.update(dict(self._histogram.take()))
        except Exception:
            self._metrics = None


def format_bound(bound: float) -> str:
    """Return the value of Prometheus' label ``le`` for a bucket."""
    return f"{bound:.15g}"
