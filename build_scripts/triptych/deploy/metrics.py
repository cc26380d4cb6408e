"""What Triton's metrics say of a fleet, as PromQL.

An ensemble's own counters mislead: its queue leaves out that of its steps, and a failed request
counts twice. So requests are counted where they come in, at preprocess, and failures and queues are
summed over the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.releases import Release

ORDINARY_HISTOGRAMS = Release(26, 1)
"""From here on `HISTOGRAM` counts ordinary models, too (core pull request 464)."""
HISTOGRAM = "nv_inference_first_response_histogram_ms"
EDGES_MS = (100, 500, 2000, 5000)
"""Of its buckets, where a model's config names no others."""

STEPS = ("preprocess", "core", "postprocess")


@dataclass(frozen=True)
class Metrics:
    """Expressions over the replicas of one pipeline in one namespace."""

    pipeline: str
    namespace: str

    def offered(self, window: str) -> str:
        """Requests a second that came in: answered, refused and failed."""
        return self._came_in("rate", window)

    def count_offered(self, window: str) -> str:
        """Requests that came in during a window."""
        return self._came_in("increase", window)

    def failed(self, window: str) -> str:
        """Requests a second that failed in any step; 0 where nothing is known to have failed."""
        series = self._series("nv_inference_request_failure", *STEPS)
        return f"(sum(rate({series}[{window}])) or vector(0))"

    def replicas(self) -> str:
        """Servers that Prometheus sees."""
        return f"count({self._series('nv_inference_count', 'preprocess')})"

    def queue_us(self, window: str) -> str:
        """Mean time that a request waited, over all steps; NaN without requests."""
        waited = self._series("nv_inference_queue_duration_us", *STEPS)
        return f"sum(rate({waited}[{window}])) / {self.offered(window)}"

    def within(self, limit_ms: float, window: str) -> str:
        """Requests a second that were answered within an edge of the histogram's buckets."""
        model = f'namespace="{self.namespace}",model="{self.pipeline}"'
        edge = f'le=~"{limit_ms:g}([.]0)?"'
        return f"sum(rate({HISTOGRAM}_bucket{{{model},{edge}}}[{window}]))"

    def percentile_us(self, percentile: str) -> str:
        """The worst replica's latency percentile (``p99_9``) over the last minute."""
        quantile = float(percentile[1:].replace("_", ".")) / 100
        model = f'namespace="{self.namespace}",model="{self.pipeline}"'
        return f'max(nv_inference_request_summary_us{{{model},quantile="{quantile:g}"}})'

    def _came_in(self, function: str, window: str) -> str:
        answered = self._series("nv_inference_request_success", "preprocess")
        refused = self._series("nv_inference_request_failure", "preprocess")
        return (
            f"(sum({function}({answered}[{window}]))"
            f" + (sum({function}({refused}[{window}])) or vector(0)))"
        )

    def _series(self, name: str, *steps: str) -> str:
        models = "|".join(f"{self.pipeline}_{step}" for step in steps)
        return f'{name}{{namespace="{self.namespace}",model=~"{models}"}}'


def has_edge(limit_ms: float, release: Release) -> bool:
    """Whether a release's histogram can tell which requests kept to a limit."""
    return release >= ORDINARY_HISTOGRAMS and limit_ms in EDGES_MS
