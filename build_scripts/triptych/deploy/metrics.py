"""Queries of a fleet in PromQL, on the metrics of Triton, Envoy and the steps.

Triton's counters mislead if a request is rejected or has steps (seen on 24.10). A request that
preprocess rejects is a success of preprocess and two failures of the ensemble, and the ensemble's
queue time excludes that of its steps. Requests are therefore counted in preprocess and answers in
the ensemble, and the wait is the time of a request less the computing time of the steps.

Generated text needs other series (seen on 24.10): a failed request is two failures of the ensemble,
a canceled one is a success, and a decoupled core finishes a request as soon as it accepts it. The
core counts times and outcomes itself, see `runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.repository.config import HISTOGRAM
from triptych.runtime.counters import ROW_TOKENS, format_bound
from triptych.runtime.generation_metrics import PREFIX

STEPS = ("preprocess", "core", "postprocess")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LISTENERS = 'envoy_http_conn_manager_prefix=~"grpc|http"'
_CLUSTERS = 'envoy_cluster_name=~"triton_grpc|triton_http"'
_LOST = "disk|large|waiting"
_COMPUTING = ("input", "infer", "output")


@dataclass(frozen=True)
class Metrics:
    """Expressions over the replicas of one pipeline in one namespace."""

    pipeline: str
    namespace: str  # Namespace of the replicas and of Envoy
    workload: str  # Deployment of the replicas, with which the names of the pods begin
    # Deployment of Envoy, configured as by `deploy.envoy`; None if clients reach the servers
    # directly.
    envoy: str | None = None
    time_scale: float = 1.0  # Factor of every window; below 1 for tests
    is_chain: bool = False  # Whether the pipeline has several models

    def window(self, text: str) -> str:
        """Return a duration such as ``5m``, scaled, as text."""
        if self.time_scale == 1:
            return text
        return f"{self.seconds(text) * 1e3:.0f}ms"

    def seconds(self, text: str) -> float:
        """Return a duration such as ``5m``, scaled, in seconds."""
        return int(text[:-1]) * _SECONDS[text[-1]] * self.time_scale

    # The whole pipeline

    def offered(self, window: str) -> str:
        """Return the requests per second that arrived: answered, rejected and failed.

        Envoy also counts requests for which no server is available.
        """
        if self.envoy is None:
            return self._came_in("rate", window)
        return self._rate(self._of_envoy("http_downstream_rq_total", _LISTENERS), window)

    def count_offered(self, window: str) -> str:
        """Return the number of requests that reached the servers in a window."""
        return self._came_in("increase", window)

    def failed_share(self, window: str) -> str:
        """Return the ratio of requests without an answer, 0 to 1; NaN without requests."""
        return self._bad_share(self._whole("nv_inference_request_success"), window)

    def slow_share(self, limit_ms: float, window: str) -> str:
        """Return the ratio of requests not answered within a bound of Triton's histogram."""
        edge = f'le=~"{limit_ms:g}([.]0)?"'
        return self._bad_share(self._whole(f"{HISTOGRAM}_bucket", edge), window)

    def envoy_slow_share(self, limit_ms: float, window: str) -> str:
        """Return the ratio of requests that took longer than a bound of Envoy's histogram."""
        # Envoy prints the bound as a double with up to 32 digits.
        good, all_ = (
            self._rate(self._of_envoy(f"cluster_upstream_rq_time_{part}", _CLUSTERS, *edge), window)
            for part, edge in (("bucket", (f'le="{limit_ms:.32g}"',)), ("count", ()))
        )
        return f"clamp_min(1 - {good} / {all_}, 0)"

    def envoy_percentile_ms(self, quantile: float, window: str) -> str:
        """Return a latency quantile of all replicas in ms, as exact as Envoy's buckets."""
        series = self._of_envoy("cluster_upstream_rq_time_bucket", _CLUSTERS)
        rates = f"sum by (le) (rate({series}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    def replicas(self) -> str:
        """Return the number of servers that Prometheus scrapes."""
        return f"count({self._series('nv_inference_count', 'preprocess')})"

    def waiting_us(self, window: str) -> str:
        """Return the mean wait of an answered request in µs; NaN without requests."""
        time, answered = (
            self._rate(self._whole(f"nv_inference_request_{name}"), window)
            for name in ("duration_us", "success")
        )
        computing = " - ".join(
            self._rate(self._series(f"nv_inference_compute_{part}_duration_us", *STEPS), window)
            for part in _COMPUTING
        )
        return f"({time} - {computing}) / {answered}"

    def percentile_us(self, percentile: str, by: str = "") -> str:
        """Return a latency percentile (``p99_9``) of the last minute in µs: maximum or by label."""
        series = self._whole(
            "nv_inference_request_summary_us", f'quantile="{parse_quantile(percentile):g}"'
        )
        return f"max{f' by ({by}) ' if by else ''}({series})"

    # The monitor, and the samples that it reads

    def monitor(self, name: str) -> str:
        """Return a gauge of the monitor, such as ``rows``."""
        return self._of_pipeline(f"triptych_monitor_{name}")

    def samples_dropped(self, window: str) -> str:
        """Return the number of sampled rows lost in a window, except those that `redact` drops."""
        lost = self._of_pipeline("triptych_samples_dropped_total", f'reason=~"{_LOST}"')
        return f"sum(increase({lost}[{self.window(window)}]))"

    def samples_taken(self, window: str) -> str:
        """Return the number of sampled rows in a window, written or lost."""
        written = self._of_pipeline("triptych_samples_written_total")
        return f"({self.samples_dropped(window)} + sum(increase({written}[{self.window(window)}])))"

    def many_samples_dropped(self, window: str, max_ratio: float, min_rows: int) -> str:
        """Return the condition that too many of the sampled rows were lost."""
        lost = self.samples_dropped(window)
        return f"{lost} / {self.samples_taken(window)} > {max_ratio:g}\nand {lost} >= {min_rows}"

    def monitor_stale(self, window: str) -> str:
        """Return the condition that the monitor has completed no run for a window."""
        run = self.monitor("last_run_timestamp_seconds")
        return (
            f"time() - max({run}) > {self.seconds(window):g}\n"
            f"or absent_over_time({run}[{self.window(window)}])"
        )

    def samples_by_end(self, window: str) -> dict[str, str]:
        """Return rows per second written, and lost by reason; expressions by legend."""
        written, lost = (
            f"rate({self._of_pipeline(f'triptych_samples_{end}_total')}[{self.window(window)}])"
            for end in ("written", "dropped")
        )
        return {"written": f"sum({written})", "{{reason}}": f"sum by (reason) ({lost})"}

    # Each step

    def step_rate(self, window: str) -> str:
        """Return the requests per second by step (label ``model``)."""
        return self._by_step("nv_inference_request_success", window)

    def step_queue_us(self, window: str) -> str:
        """Return the mean time of a request in the queue of a step in µs."""
        queued = self._by_step("nv_inference_queue_duration_us", window)
        return f"{queued} / {self.step_rate(window)}"

    def step_compute_us(self, window: str) -> str:
        """Return the mean time of a request in a step in µs, including inputs and outputs."""
        parts = (
            self._by_step(f"nv_inference_compute_{part}_duration_us", window) for part in _COMPUTING
        )
        return f"({' + '.join(parts)}) / {self.step_rate(window)}"

    def step_batch(self, window: str) -> str:
        """Return the mean number of rows that a step executes together."""
        rows, runs = (
            self._by_step(f"nv_inference_{name}", window) for name in ("count", "exec_count")
        )
        return f"{rows} / {runs}"

    def step_pending(self) -> str:
        """Return the number of requests that wait for a step now."""
        return f"sum by (model) ({self._series('nv_inference_pending_request_count', *STEPS)})"

    # Rows of the core

    def mean_tokens(self, window: str) -> str:
        """Return the mean tokens of a row; NaN without rows."""
        tokens, rows = (self._rate(self._rows(part), window) for part in ("sum", "count"))
        return f"{tokens} / {rows}"

    def count_rows(self, window: str) -> str:
        """Return the number of rows in a window."""
        return f"sum(increase({self._rows('count')}[{self.window(window)}]))"

    def tokens_quantile(self, quantile: float, window: str) -> str:
        """Return a quantile of the rows' tokens, as exact as the steps' buckets."""
        rates = f"sum by (le) (rate({self._rows('bucket')}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    # Kubernetes and the machines

    def deployed(self, state: str) -> str:
        """Return a count of replicas by kube-state-metrics, such as ``spec_replicas``."""
        where = f'namespace="{self.namespace}",deployment="{self.workload}"'
        return f"kube_deployment_{state}{{{where}}}"

    def restarts(self, window: str) -> str:
        """Return the restarts of servers in a window by pod, by kube-state-metrics."""
        where = f'namespace="{self.namespace}",pod=~"{self.workload}-.+",container!="envoy"'
        series = f"kube_pod_container_status_restarts_total{{{where}}}"
        return f"sum by (pod) (increase({series}[{self.window(window)}]))"

    def gpu(self, name: str) -> str:
        """Return one of Triton's metrics of GPUs by pod."""
        where = f'namespace="{self.namespace}",pod=~"{self.workload}-.+"'
        return f"max by (pod, gpu_uuid) (nv_gpu_{name}{{{where}}})"

    def _bad_share(self, good: str, window: str) -> str:
        came_in = self._came_in("rate", window)
        return f"clamp_min(1 - {self._rate(good, window)} / {came_in}, 0)"

    def _rate(self, series: str, window: str) -> str:
        return f"sum(rate({series}[{self.window(window)}]))"

    def _by_step(self, name: str, window: str) -> str:
        return f"sum by (model) (rate({self._series(name, *STEPS)}[{self.window(window)}]))"

    def _came_in(self, function: str, window: str) -> str:
        answered = self._series("nv_inference_request_success", "preprocess")
        refused = self._series("nv_inference_request_failure", "preprocess")
        span = self.window(window)
        return (
            f"(sum({function}({answered}[{span}]))"
            f" + (sum({function}({refused}[{span}])) or vector(0)))"
        )

    def _whole(self, name: str, *more: str) -> str:
        """Return a series of the ensemble."""
        return self._select(name, f'model="{self.pipeline}"', *more)

    def _series(self, name: str, *steps: str) -> str:
        names = [f"{self.pipeline}_{step}" for step in steps]
        if self.is_chain and steps == STEPS:
            names.append(f"{self.pipeline}[.].+")
        models = "|".join(names)
        return self._select(name, f'model=~"{models}"')

    def _rows(self, part: str) -> str:
        return self._of_pipeline(f"{ROW_TOKENS}_{part}")

    def _of_pipeline(self, name: str, *more: str) -> str:
        return self._select(name, f'pipeline="{self.pipeline}"', *more)

    def _of_envoy(self, name: str, *where: str) -> str:
        return self._select(f"envoy_{name}", f'pod=~"{self.envoy}-.+"', *where)

    def _select(self, name: str, *where: str) -> str:
        labels = ",".join((f'namespace="{self.namespace}"', *where))
        return f"{name}{{{labels}}}"


def parse_quantile(percentile: str) -> float:
    """Return 0.999 for ``p99_9``."""
    return float(percentile[1:].replace("_", ".")) / 100


_FAULTS = 'outcome=~"overloaded|error"'
"""Selector of outcomes caused by the server."""
_OURS = 'outcome!="refused"'
"""Selector of outcomes not caused by the request."""


class GenerationQueries(Metrics):
    """Expressions over the replicas of one pipeline that generates text."""

    def gauge(self, name: str) -> str:
        """Return a gauge of each replica, such as ``running``."""
        return self._of_pipeline(f"{PREFIX}_{name}")

    def ended(self, window: str) -> str:
        """Return the number of requests that ended in a window, faulty requests excluded."""
        span = self.window(window)
        return f"sum(increase({self._ended(_OURS)}[{span}]))"

    def ended_by_outcome(self, window: str) -> str:
        """Return the requests per second by outcome."""
        return f"sum by (outcome) (rate({self._ended()}[{self.window(window)}]))"

    def faulty_share(self, window: str) -> str:
        """Return the ratio of `ended` that failed or was rejected for overload; NaN without any."""
        bad, all_ = (self._rate(self._ended(which), window) for which in (_FAULTS, _OURS))
        lost = self._rate(self._unprepared('outcome="error"'), window)
        return f"({bad} + ({lost} or vector(0))) / ({all_} + ({lost} or vector(0)))"

    def late_share(self, latency: str, limit_ms: float, window: str) -> str:
        """Return the ratio of times above a bound of the histogram; NaN without any."""
        bound = f'le="{format_bound(limit_ms / 1e3)}"'
        good = self._rate(self._of_pipeline(f"{PREFIX}_{latency}_seconds_bucket", bound), window)
        all_ = self._rate(self._of_pipeline(f"{PREFIX}_{latency}_seconds_count"), window)
        return f"clamp_min(1 - {good} / {all_}, 0)"

    def timed(self, latency: str, window: str) -> str:
        """Return the number of times that were observed in a window."""
        series = self._of_pipeline(f"{PREFIX}_{latency}_seconds_count")
        return f"sum(increase({series}[{self.window(window)}]))"

    def quantile_ms(self, latency: str, quantile: float, window: str) -> str:
        """Return a quantile of all replicas in ms, as exact as the buckets."""
        series = self._of_pipeline(f"{PREFIX}_{latency}_seconds_bucket")
        rates = f"sum by (le) (rate({series}[{self.window(window)}]))"
        return f"1000 * histogram_quantile({quantile:g}, {rates})"

    def tokens_by_kind(self, window: str) -> str:
        """Return the tokens per second by kind."""
        series = self._of_pipeline(f"{PREFIX}_tokens")
        return f"sum by (kind) (rate({series}[{self.window(window)}]))"

    def cached_share(self, window: str) -> str:
        """Return the ratio of the prompts' tokens that were in the prefix cache."""
        cached, all_ = (
            self._rate(self._of_pipeline(f"{PREFIX}_tokens", f'kind="{kind}"'), window)
            for kind in ("cached", "prompt")
        )
        return f"{cached} / {all_}"

    def requests_queued(self, max_waiting: float) -> str:
        """Return the condition that waiting requests per replica exceed a limit, 5-minute mean."""
        waiting = self.gauge("waiting")
        mean = f"sum(avg_over_time({waiting}[{self.window('5m')}]))"
        return f"{mean} > {max_waiting:.6g} * count({waiting})"

    def engine_stalled(self, window: str) -> str:
        """Return the replicas that had requests throughout a window but generated no token."""
        span = self.window(window)
        busy = f"sum by (pod) (min_over_time({self.gauge('in_flight')}[{span}])) > 0"
        tokens = self._of_pipeline(f"{PREFIX}_tokens", 'kind="new"')
        return f"{busy}\nand sum by (pod) (increase({tokens}[{span}])) == 0"

    def unprepared_by_outcome(self, window: str) -> str:
        """Return the requests per second that did not reach the core, by outcome."""
        return f"sum by (outcome) (rate({self._unprepared()}[{self.window(window)}]))"

    def _unprepared(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_preprocess_errors_total", *where)

    def _ended(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_requests_total", *where)
