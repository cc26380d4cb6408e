"""Custom metrics of the Python steps on the server's metrics page.

Histograms are written as counters, because Triton's own histogram takes one value per call and
each call leaves the process (about 25 us). Values are collected as plain numbers and sent every
few seconds. No failure of the metrics may fail a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROW_TOKENS = "triptych_row_tokens"
FLUSH_S = 2.0
MIN_BOUND = 4
BOUNDS_PER_OCTAVE = 3

Series = tuple[str, str]
"""Name of a metric and the value of its one own label; an empty value if it has none."""


class Deprecated(NamedTuple):
    """Former name of a metric, under which it is exported for one more minor release.

    Attributes:
        name: Former name.
        label: Former name of its label; empty if the label has kept its name.
        factor: Former unit relative to the unit of today; applies to values and to ``le``.
    """

    name: str
    label: str = ""
    factor: float = 1.0


class MetricSet:
    """The metrics of one step, each labeled with the name of the pipeline.

    Triton removes a metric together with its family, so this object holds both.
    """

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._families: list[Any] = []
        self._metrics: dict[Series, list[tuple[Any, float]]] = {}
        self._gauges: set[str] = set()

    def add(
        self,
        name: str,
        description: str,
        *,
        label: str = "",
        values: Sequence[str] = ("",),
        gauge: bool = False,
        deprecated: Deprecated | None = None,
    ) -> None:
        """Put one metric on the page, with one series for each of the label's `values`.

        Raises:
            Exception: The server has no custom metrics.
        """
        if gauge:
            self._gauges.add(name)
        self._add(name, name, description, label, {value: value for value in values}, 1.0)
        if deprecated is not None:
            old_label, factor = deprecated.label or label, deprecated.factor
            old_values = {value: _scale_bound(value, factor) for value in values}
            if name.endswith(("_bucket", "_count")):
                factor = 1.0
            description = f"Deprecated: use {name}"
            self._add(name, deprecated.name, description, old_label, old_values, factor)

    def _add(
        self,
        name: str,
        exported: str,
        description: str,
        label: str,
        values: Mapping[str, str],
        factor: float,
    ) -> None:
        # Imported here because the names in this module are also used where there is no server.
        import triton_python_backend_utils as pb_utils

        kinds = pb_utils.MetricFamily
        kind = kinds.GAUGE if name in self._gauges else kinds.COUNTER
        family = kinds(name=exported, description=description, kind=kind)
        self._families.append(family)
        for value, exported_value in values.items():
            labels = {"pipeline": self._pipeline, **({label: exported_value} if label else {})}
            metric = family.Metric(labels=labels)
            self._metrics.setdefault((name, value), []).append((metric, factor))

    def update(self, values: Mapping[Series, float]) -> None:
        """Set gauges and increment counters, in the order of `values`.

        Raises:
            Exception: The server has no such metrics any more.
        """
        for (name, value), number in values.items():
            for metric, factor in self._metrics[name, value]:
                if name in self._gauges:
                    metric.set(number * factor)
                else:
                    metric.increment(number * factor)

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
        deprecated: Former name of the metric, without suffix.
    """

    def __init__(
        self,
        name: str,
        description: str,
        bounds: Sequence[float],
        deprecated: Deprecated | None = None,
    ) -> None:
        self._name, self._description, self._deprecated = name, description, deprecated
        self._sorted_bounds = list(bounds)
        self._bounds = np.array(bounds)
        self._labels = [*(format_bound(bound) for bound in bounds), "+Inf"]
        self._buckets = np.zeros(len(self._labels), np.int64)
        self._sum = 0.0

    def add_to(self, metrics: MetricSet) -> None:
        """Put the three counters of the histogram on the page."""
        for suffix, values in (("bucket", self._labels), ("count", [""]), ("sum", [""])):
            old = self._deprecated
            metrics.add(
                f"{self._name}_{suffix}",
                f"{self._description} ({suffix})",
                label="le" if suffix == "bucket" else "",
                values=values[::-1],
                deprecated=old and old._replace(name=f"{old.name}_{suffix}"),
            )

    def observe_one(self, value: float) -> None:
        """Add one value to its bucket; for a single value, NumPy takes far longer than a search."""
        self._buckets[bisect_left(self._sorted_bounds, value)] += 1
        self._sum += value

    def observe(self, values: NDArray[Any]) -> None:
        """Add values to their buckets."""
        indices = self._bounds.searchsorted(values)  # the first bound that is not below the value
        self._buckets += np.bincount(indices, minlength=len(self._buckets))
        self._sum += float(np.sum(values))

    def take(self) -> Iterator[tuple[Series, float]]:
        """Yield the increments since the last call, without zeros.

        The buckets come from the last to the first, so that a scrape in between sees no bucket
        above a later one, and no larger sum than its rows can have.
        """
        totals = self._buckets.cumsum()[::-1].tolist()
        values = {
            **{
                (f"{self._name}_bucket", label): total
                for label, total in zip(self._labels[::-1], totals, strict=True)
            },
            (f"{self._name}_count", ""): totals[0],
            (f"{self._name}_sum", ""): self._sum,
        }
        self._buckets[:] = 0
        self._sum = 0.0
        yield from ((series, value) for series, value in values.items() if value)


class RowTokens:
    """Histogram of the tokens of each row of the model, padding excluded.

    Each preprocess instance has its own; the server adds up equal series.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Put the counters on the page, if the server supports custom metrics."""
        self._metrics: MetricSet | None = None
        if "max_length" not in settings:  # images: all rows have one size
            return
        bounds = make_token_bounds(settings["max_length"], settings["bucket_edges"])
        self._histogram = Histogram(ROW_TOKENS, "Tokens of a row of the model", bounds)
        self._lengths: list[NDArray[Any]] = []
        self._due_at = 0.0
        try:
            metrics = MetricSet(settings["pipeline"])
            self._histogram.add_to(metrics)
            self._metrics = metrics
        except Exception:
            return

    def count(self, lengths: Sequence[NDArray[Any]]) -> None:
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


def make_token_bounds(max_length: int, bucket_edges: Sequence[int] = ()) -> list[int]:
    """Return the upper bounds of the histogram of row lengths, in tokens, ascending.

    The bounds are 1.26 times apart and equal in all pipelines, except for the padded lengths of
    the pipeline and the last two, ``max_length - 1`` and `max_length`. Rows between these two are
    those that were truncated, and the few that have this length by themselves.
    """
    steps = range(BOUNDS_PER_OCTAVE * max_length.bit_length())
    common = (round(MIN_BOUND * 2 ** (step / BOUNDS_PER_OCTAVE)) for step in steps)
    bounds = {*common, *bucket_edges, max_length - 1, max_length}
    return sorted(bound for bound in bounds if 0 < bound <= max_length)


def format_bound(bound: float) -> str:
    """Return the value of Prometheus' label ``le`` for a bucket."""
    return f"{bound:.15g}"


def _scale_bound(value: str, factor: float) -> str:
    """Return the ``le`` of a bucket in a former unit; other values stay."""
    try:
        return value if factor == 1.0 or value == "+Inf" else format_bound(float(value) * factor)
    except ValueError:
        return value
