"""What Triton's metrics say of a fleet, as PromQL.

Counters mislead where a request is refused or has steps (seen on 24.10): one that preprocess
refuses is a success of preprocess and two failures of the ensemble, and the ensemble's queue leaves
out that of its steps. So requests are counted where they come in, answers where they leave, and
waiting is what is left of a request's time without the steps' computing.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.repository.latencies import HISTOGRAM

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

    def failed_share(self, window: str) -> str:
        """Share of what came in that was not answered: 0 to 1; NaN without requests."""
        answered = f"sum(rate({self._whole('nv_inference_request_success')}[{window}]))"
        return f"clamp_min(1 - {answered} / {self.offered(window)}, 0)"

    def replicas(self) -> str:
        """Servers that Prometheus sees."""
        return f"count({self._series('nv_inference_count', 'preprocess')})"

    def waiting_us(self, window: str) -> str:
        """Mean time that an answered request waited, in queues and preprocess; NaN without any."""
        answered = f"sum(rate({self._whole('nv_inference_request_success')}[{window}]))"
        time = f"sum(rate({self._whole('nv_inference_request_duration_us')}[{window}]))"
        parts = (
            self._series(f"nv_inference_compute_{part}_duration_us", *STEPS)
            for part in ("input", "infer", "output")
        )
        computing = " - ".join(f"sum(rate({part}[{window}]))" for part in parts)
        return f"({time} - {computing}) / {answered}"

    def slow_share(self, limit_ms: float, window: str) -> str:
        """Share of what came in that was not answered within an edge of the histogram's buckets."""
        edge = f'le=~"{limit_ms:g}([.]0)?"'
        good = f"sum(rate({self._whole(f'{HISTOGRAM}_bucket', edge)}[{window}]))"
        return f"clamp_min(1 - {good} / {self.offered(window)}, 0)"

    def percentile_us(self, percentile: str) -> str:
        """The worst replica's latency percentile (``p99_9``) over the last minute."""
        quantile = float(percentile[1:].replace("_", ".")) / 100
        series = self._whole("nv_inference_request_summary_us", f'quantile="{quantile:g}"')
        return f"max({series})"

    def _whole(self, name: str, *more: str) -> str:
        """A series of the ensemble."""
        where = (f'namespace="{self.namespace}"', f'model="{self.pipeline}"', *more)
        return f"{name}{{{','.join(where)}}}"

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
