"""Metrics of text generation on the server's metrics page: load, latencies, tokens, outcomes.

All methods but `GenerationMetrics.send` are called on one thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from .counters import CounterSet, Histogram, Series
from .generation_messages import Delta, EngineLoad

FLUSH_S, GAUGES_S = 5.0, 0.2
"""Seconds between two updates of counters, and of gauges."""

PREFIX = "triptych_generation"
GAUGES = {
    "in_flight": "Requests in the core",
    "running": "Requests in the engine's batch",
    "waiting": "Requests that wait for a place in the batch",
    "kv_cache_usage_ratio": "Share of the KV cache that running requests hold, 0 to 1",
}
COUNTERS = {
    "tokens": "Tokens, by kind",
    "requests_total": "Requests that ended in the core, by outcome",
    "preprocess_errors_total": "Requests that preprocess could not turn into token ids, by outcome",
}
TOKENS = ("prompt", "cached", "new")
"""Kinds of tokens: of prompts whose answers began, of prompts found in the prefix cache, of
answers."""
LATENCY_METRICS = {
    "ttft": "Seconds from a request's token ids to the first new token of a streamed answer",
    "itl": "Seconds between two responses of a streamed answer",
    "e2e": "Seconds from a request's token ids to the end of its answer",
}
OUTCOMES = ("stop", "length", "cancelled", "refused", "overloaded", "error")
"""Outcomes of a request. ``refused``: invalid request; ``overloaded``: no capacity, or the server
is stopping; ``cancelled``: the client has left, or a stop string was found."""
PARTS = ("bucket", "count", "sum")
"""Suffixes of the counters of a histogram."""

_BOUNDS_MS: Mapping[str, tuple[float, ...]] = {
    "ttft": (50, 200, 500, 1000, 5000, 20_000),
    "itl": (10, 20, 50, 100, 500),
    "e2e": (500, 2000, 10_000, 50_000, 200_000),
}


NAMES = (
    *(f"{PREFIX}_{name}" for name in (*GAUGES, *COUNTERS)),
    *(f"{PREFIX}_{name}_seconds_{part}" for name in LATENCY_METRICS for part in PARTS),
)
"""Names of all series."""


def make_time_bounds(limits_ms: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the upper bounds of each latency histogram, in milliseconds, ascending.

    Args:
        limits_ms: Limits of the SLO, by names such as ``ttft_p99``. Each becomes a bound, because
            the share of answers below a limit is exact only there.
    """
    limits = [(name.partition("_")[0], limit) for name, limit in limits_ms.items()]
    return {
        metric: sorted({*bounds, *(limit for name, limit in limits if name == metric)})
        for metric, bounds in _BOUNDS_MS.items()
    }


class PreprocessErrors:
    """Counter of the requests that do not reach the core, sent at once.

    The metric has a separate name, because Triton removes a metric that two models share when the
    first of them is unloaded.
    """

    def __init__(self, pipeline: str) -> None:
        self._metrics = CounterSet(pipeline)
        with suppress(Exception):  # a server without custom metrics
            _add(self._metrics, "preprocess_errors_total", "outcome", ("refused", "error"))

    def count(self, outcome: str) -> None:
        """Count one request; `outcome` is ``refused`` or ``error``."""
        with suppress(Exception):
            self._metrics.update({(f"{PREFIX}_preprocess_errors_total", outcome): 1})


class RequestClock:
    """Times of one request; `streamed` if its client sees each response."""

    __slots__ = ("began_at", "sent_at", "streamed")

    def __init__(self, *, streamed: bool) -> None:
        self.began_at = time.monotonic()
        self.sent_at: float | None = None
        self.streamed = streamed


class LatencyHistogram(Histogram):
    """Histogram of values that are added one by one."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        super().__init__(name, description, bounds)
        self._sorted_bounds = list(bounds)

    def observe_one(self, value: float) -> None:
        """Add one value to its bucket; for a single value, NumPy takes far longer than a search."""
        self._buckets[bisect_left(self._sorted_bounds, value)] += 1
        self._sum += value


class GenerationMetrics:
    """The metrics of one core.

    Args:
        pipeline: Name of the pipeline.
        bounds_ms: Bucket bounds from `make_time_bounds`.
    """

    def __init__(self, pipeline: str, bounds_ms: Mapping[str, Sequence[float]]) -> None:
        self._histograms = {
            metric: LatencyHistogram(
                f"{PREFIX}_{metric}_seconds",
                description,
                [bound / 1e3 for bound in bounds_ms[metric]],
            )
            for metric, description in LATENCY_METRICS.items()
        }
        self._counted: Counter[Series] = Counter()
        self._shown: dict[str, float] = {}
        self._flush_at = self._gauges_at = 0.0
        self._metrics = CounterSet(pipeline, {f"{PREFIX}_{name}" for name in GAUGES})
        self._has_metrics: bool | None = None

    def count_delta(self, clock: RequestClock, delta: Delta, prompt_tokens: int) -> None:
        """Count new tokens of an answer, and its end."""
        now = time.monotonic()
        if clock.sent_at is None:
            self._count_tokens("prompt", prompt_tokens)
            self._count_tokens("cached", delta.cached_tokens)
        if clock.streamed:
            since = clock.began_at if clock.sent_at is None else clock.sent_at
            self._observe("ttft" if clock.sent_at is None else "itl", now - since)
        clock.sent_at = now
        self._count_tokens("new", len(delta.token_ids))
        if delta.finish:
            self._observe("e2e", now - clock.began_at)
            self.count_end(delta.finish)

    def count_end(self, outcome: str) -> None:
        """Count the end of a request, by one of `OUTCOMES`."""
        outcome = outcome if outcome in OUTCOMES else "error"
        self._counted[f"{PREFIX}_requests_total", outcome] += 1

    def take_due(self, load: EngineLoad, in_flight: int) -> Mapping[Series, float]:
        """Return the values to send now: gauges that changed, and from time to time all counts."""
        now = time.monotonic()
        if now < self._gauges_at:
            return {}
        self._gauges_at = now + GAUGES_S
        gauges = {"in_flight": in_flight, **load._asdict()}
        due: dict[Series, float] = {
            (f"{PREFIX}_{name}", ""): value
            for name, value in gauges.items()
            if self._shown.get(name) != value
        }
        self._shown = gauges
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            due.update(self.take_counts())
        return due

    def take_counts(self) -> Mapping[Series, float]:
        """Return all counts that have not been sent."""
        counts: dict[Series, float] = {}
        for histogram in self._histograms.values():
            counts.update(histogram.take())
        counts.update({series: value for series, value in self._counted.items() if value})
        self._counted.clear()
        return counts

    def send(self, values: Mapping[Series, float]) -> None:
        """Write values to the page, which waits for the server at each of them.

        The first call makes the metrics. After a failure nothing is written any more.
        """
        try:
            if self._has_metrics is None:
                self._make()
                self._has_metrics = True
            if self._has_metrics:
                self._metrics.update(values)
        except Exception:
            self._has_metrics = False

    def close(self) -> None:
        """Send the remaining counts and take all metrics off the page."""
        self.send(self.take_counts())
        self._has_metrics = False
        self._metrics.clear()

    def _count_tokens(self, kind: str, count: int) -> None:
        self._counted[f"{PREFIX}_tokens", kind] += count

    def _observe(self, metric: str, seconds: float) -> None:
        self._histograms[metric].observe_one(seconds)

    def _make(self) -> None:
        for name in GAUGES:
            _add(self._metrics, name)
        for histogram in self._histograms.values():
            histogram.add_to(self._metrics)
        _add(self._metrics, "tokens", "kind", TOKENS)
        _add(self._metrics, "requests_total", "outcome", OUTCOMES)


def _add(metrics: CounterSet, name: str, label: str = "", values: Sequence[str] = ("",)) -> None:
    description = GAUGES.get(name) or COUNTERS[name]
    metrics.add(f"{PREFIX}_{name}", description, label=label, values=values)
