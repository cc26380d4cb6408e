"""What the metrics of Triton, of Envoy and of the steps say of a fleet, as PromQL.

Triton's counters mislead where a request is refused or has steps (seen on 24.10): one that
preprocess refuses is a success of preprocess and two failures of the ensemble, and the ensemble's
queue leaves out that of its steps. So requests are counted where they come in, answers where they
leave, and waiting is what is left of a request's time without the steps' computing.

What the steps of a generation tell of a fleet, as PromQL.

Triton's own counters say little of it (seen on 24.10): a request that fails is two failures of the
ensemble, one that its client leaves is a success, and a decoupled core is done with a request as
soon as it has taken it in. Times and ends are counted by the core, see `runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.operate.tune.new_traffic import ROW_TOKENS
from triptych.repository.config import HISTOGRAM
from triptych.runtime.counters import format_bound
from triptych.runtime.generation_metrics import PREFIX

STEPS = ("preprocess", "core", "postprocess")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LISTENERS = 'envoy_http_conn_manager_prefix=~"grpc|http"'
_CLUSTERS = 'envoy_cluster_name=~"triton_grpc|triton_http"'
_LOST = "disk|large|waiting"
_COMPUTING = ("input", "infer", "output")


@dataclass(frozen=True)
class Metrics:
    """Expressions over the replicas of one pipeline in one namespace.

    Attributes:
        pipeline: its name.
        namespace: of the replicas, and of the Envoy in front.
        workload: the Deployment; its pods' names begin so.
        envoy: the Deployment of an Envoy in front of them, set up as `serve --replicas` does; None
            where clients reach the servers themselves.
        time_scale: every window is so many times what it says; below 1 for tests alone.
    """

    pipeline: str
    namespace: str
    workload: str
    envoy: str | None = None
    time_scale: float = 1.0

    def window(self, text: str) -> str:
        """A duration, such as ``5m``, as it stands in rules."""
        if self.time_scale == 1:
            return text
        return f"{self.seconds(text) * 1e3:.0f}ms"

    def seconds(self, text: str) -> float:
        """The same duration."""
        return int(text[:-1]) * _SECONDS[text[-1]] * self.time_scale

    # Of the whole pipeline

    def offered(self, window: str) -> str:
        """Requests a second that came in: answered, refused and failed.

        Of an Envoy in front what reached it, were there no server to take it.
        """
        if self.envoy is None:
            return self._came_in("rate", window)
        return self._rate(self._of_envoy("http_downstream_rq_total", _LISTENERS), window)

    def count_offered(self, window: str) -> str:
        """Requests that came to the servers during a window."""
        return self._came_in("increase", window)

    def failed_share(self, window: str) -> str:
        """Share of what came in that was not answered: 0 to 1; NaN without requests."""
        return self._bad_share(self._whole("nv_inference_request_success"), window)

    def slow_share(self, limit_ms: float, window: str) -> str:
        """Share of what came in that was not answered within an edge of Triton's histogram."""
        edge = f'le=~"{limit_ms:g}([.]0)?"'
        return self._bad_share(self._whole(f"{HISTOGRAM}_bucket", edge), window)

    def envoy_slow_share(self, limit_ms: float, window: str) -> str:
        """Share of what Envoy passed on that took longer than an edge of its histogram."""
        # Envoy prints the edge as a double with up to 32 digits.
        good, all_ = (
            self._rate(self._of_envoy(f"cluster_upstream_rq_time_{part}", _CLUSTERS, *edge), window)
            for part, edge in (("bucket", (f'le="{limit_ms:.32g}"',)), ("count", ()))
        )
        return f"clamp_min(1 - {good} / {all_}, 0)"

    def envoy_percentile_ms(self, quantile: float, window: str) -> str:
        """Latency of all replicas together, to the edges of Envoy's buckets."""
        series = self._of_envoy("cluster_upstream_rq_time_bucket", _CLUSTERS)
        rates = f"sum by (le) (rate({series}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    def replicas(self) -> str:
        """Servers that Prometheus sees."""
        return f"count({self._series('nv_inference_count', 'preprocess')})"

    def waiting_us(self, window: str) -> str:
        """Mean time that an answered request waited, in queues and preprocess; NaN without any."""
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
        """A latency percentile (``p99_9``) of the last minute: the worst replica's, or by label."""
        series = self._whole(
            "nv_inference_request_summary_us", f'quantile="{quantile_of(percentile):g}"'
        )
        return f"max{f' by ({by}) ' if by else ''}({series})"

    # Of the watch, and of what it looks at

    def watch(self, name: str) -> str:
        """One of the gauges of `triptych watch`."""
        return self._of_pipeline(f"triptych_watch_{name}")

    def samples_dropped(self, window: str) -> str:
        """Sampled rows that were lost, but for those that nobody wanted."""
        lost = self._of_pipeline("triptych_sample_dropped", f'reason=~"{_LOST}"')
        return f"sum(increase({lost}[{self.window(window)}]))"

    def samples_drawn(self, window: str) -> str:
        """Sampled rows that were lost or kept."""
        kept = self._of_pipeline("triptych_sample_kept")
        return f"({self.samples_dropped(window)} + sum(increase({kept}[{self.window(window)}])))"

    def many_samples_dropped(self, window: str, max_ratio: float, min_rows: int) -> str:
        """Condition that more than a ratio of the sampled rows was lost, and enough of them."""
        lost = self.samples_dropped(window)
        return f"{lost} / {self.samples_drawn(window)} > {max_ratio:g}\nand {lost} >= {min_rows}"

    def monitor_stale(self, window: str) -> str:
        """Condition that the monitor has completed no run for a window."""
        run = self.watch("at_seconds")
        return (
            f"time() - max({run}) > {self.seconds(window):g}\n"
            f"or absent_over_time({run}[{self.window(window)}])"
        )

    def samples_by_end(self, window: str) -> dict[str, str]:
        """Rows a second that were kept, and lost by reason; name to expression."""
        kept, lost = (
            f"rate({self._of_pipeline(f'triptych_sample_{end}')}[{self.window(window)}])"
            for end in ("kept", "dropped")
        )
        return {"kept": f"sum({kept})", "{{reason}}": f"sum by (reason) ({lost})"}

    # Of each step

    def step_rate(self, window: str) -> str:
        """Requests a second, by step (label ``model``)."""
        return self._by_step("nv_inference_request_success", window)

    def step_queue_us(self, window: str) -> str:
        """Mean time of a request in the queue of a step."""
        return self._a_request("nv_inference_queue_duration_us", window)

    def step_compute_us(self, window: str) -> str:
        """Mean time of a request in a step, its inputs and outputs included."""
        parts = (
            self._by_step(f"nv_inference_compute_{part}_duration_us", window) for part in _COMPUTING
        )
        return f"({' + '.join(parts)}) / {self.step_rate(window)}"

    def step_batch(self, window: str) -> str:
        """Mean rows that a step executes at once."""
        rows, runs = (
            self._by_step(f"nv_inference_{name}", window) for name in ("count", "exec_count")
        )
        return f"{rows} / {runs}"

    def step_pending(self) -> str:
        """Requests that wait for a step now."""
        return f"sum by (model) ({self._series('nv_inference_pending_request_count', *STEPS)})"

    # Of the rows of the core

    def mean_tokens(self, window: str) -> str:
        """Mean tokens of a row; NaN without rows."""
        tokens, rows = (self._rate(self._rows(part), window) for part in ("sum", "count"))
        return f"{tokens} / {rows}"

    def count_rows(self, window: str) -> str:
        """Rows during a window."""
        return f"sum(increase({self._rows('count')}[{self.window(window)}]))"

    def tokens_quantile(self, quantile: float, window: str) -> str:
        """A quantile of the rows' tokens, to the steps' buckets."""
        rates = f"sum by (le) (rate({self._rows('bucket')}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    # Of Kubernetes and the machines

    def deployed(self, state: str) -> str:
        """Replicas as kube-state-metrics counts them: ``spec_replicas`` and the like."""
        where = f'namespace="{self.namespace}",deployment="{self.workload}"'
        return f"kube_deployment_{state}{{{where}}}"

    def gpu(self, name: str) -> str:
        """One of Triton's metrics of GPUs, for each pod."""
        where = f'namespace="{self.namespace}",pod=~"{self.workload}-.+"'
        return f"max by (pod, gpu_uuid) (nv_gpu_{name}{{{where}}})"

    def _bad_share(self, good: str, window: str) -> str:
        came_in = self._came_in("rate", window)
        return f"clamp_min(1 - {self._rate(good, window)} / {came_in}, 0)"

    def _rate(self, series: str, window: str) -> str:
        return f"sum(rate({series}[{self.window(window)}]))"

    def _by_step(self, name: str, window: str) -> str:
        return f"sum by (model) (rate({self._series(name, *STEPS)}[{self.window(window)}]))"

    def _a_request(self, name: str, window: str) -> str:
        return f"{self._by_step(name, window)} / {self.step_rate(window)}"

    def _came_in(self, function: str, window: str) -> str:
        answered = self._series("nv_inference_request_success", "preprocess")
        refused = self._series("nv_inference_request_failure", "preprocess")
        span = self.window(window)
        return (
            f"(sum({function}({answered}[{span}]))"
            f" + (sum({function}({refused}[{span}])) or vector(0)))"
        )

    def _whole(self, name: str, *more: str) -> str:
        """A series of the ensemble."""
        return self._select(name, f'model="{self.pipeline}"', *more)

    def _series(self, name: str, *steps: str) -> str:
        models = "|".join(f"{self.pipeline}_{step}" for step in steps)
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


def quantile_of(percentile: str) -> float:
    """``p99_9`` as 0.999."""
    return float(percentile[1:].replace("_", ".")) / 100


_FAULTS = 'how=~"overloaded|error"'
"""Ends of requests that were the server's fault."""
_OURS = 'how!="refused"'
"""Ends of requests that were not at fault themselves."""


class GenerationMetrics(Metrics):
    """Expressions over the replicas of one pipeline that generates text."""

    def gauge(self, name: str) -> str:
        """Of each replica: ``running`` and the like."""
        return self._of_pipeline(f"{PREFIX}_{name}")

    def ended(self, window: str) -> str:
        """Requests that came to an end during a window, but those that were at fault."""
        span = self.window(window)
        return f"sum(increase({self._ended(_OURS)}[{span}]))"

    def ended_by_how(self, window: str) -> str:
        """Requests a second that came to an end, by ``how``."""
        return f"sum by (how) (rate({self._ended()}[{self.window(window)}]))"

    def faulty_share(self, window: str) -> str:
        """Share of `ended` that failed or found no room: 0 to 1; NaN without requests."""
        bad, all_ = (self._rate(self._ended(which), window) for which in (_FAULTS, _OURS))
        lost = self._rate(self._unprepared('how="error"'), window)
        return f"({bad} + ({lost} or vector(0))) / ({all_} + ({lost} or vector(0)))"

    def late_share(self, moment: str, limit_ms: float, window: str) -> str:
        """Share of the times of a moment that are above an edge; NaN without any."""
        edge = f'le="{format_bound(limit_ms)}"'
        good = self._rate(self._of_pipeline(f"{PREFIX}_{moment}_ms_bucket", edge), window)
        all_ = self._rate(self._of_pipeline(f"{PREFIX}_{moment}_ms_count"), window)
        return f"clamp_min(1 - {good} / {all_}, 0)"

    def timed(self, moment: str, window: str) -> str:
        """Times of a moment that were counted during a window."""
        series = self._of_pipeline(f"{PREFIX}_{moment}_ms_count")
        return f"sum(increase({series}[{self.window(window)}]))"

    def quantile_ms(self, moment: str, quantile: float, window: str) -> str:
        """Of all replicas together, to the edges of the buckets."""
        series = self._of_pipeline(f"{PREFIX}_{moment}_ms_bucket")
        rates = f"sum by (le) (rate({series}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    def tokens_by_kind(self, window: str) -> str:
        """Tokens a second, by ``kind``."""
        series = self._of_pipeline(f"{PREFIX}_tokens")
        return f"sum by (kind) (rate({series}[{self.window(window)}]))"

    def cached_share(self, window: str) -> str:
        """Of the prompts' tokens, that the prefix cache had."""
        cached, all_ = (
            self._rate(self._of_pipeline(f"{PREFIX}_tokens", f'kind="{kind}"'), window)
            for kind in ("cached", "prompt")
        )
        return f"{cached} / {all_}"

    def crowded(self, max_waiting: float) -> str:
        """Condition that more requests than so many per replica wait, in the mean of 5 minutes."""
        waiting = self.gauge("waiting")
        mean = f"sum(avg_over_time({waiting}[{self.window('5m')}]))"
        return f"{mean} > {max_waiting:.6g} * count({waiting})"

    def silent(self, window: str) -> str:
        """Replicas that had requests throughout a window, and made no token in it."""
        span = self.window(window)
        busy = f"sum by (pod) (min_over_time({self.gauge('under_way')}[{span}])) > 0"
        tokens = self._of_pipeline(f"{PREFIX}_tokens", 'kind="new"')
        return f"{busy}\nand sum by (pod) (increase({tokens}[{span}])) == 0"

    def unprepared_by_how(self, window: str) -> str:
        """Requests a second that did not reach the core, by ``how``."""
        return f"sum by (how) (rate({self._unprepared()}[{self.window(window)}]))"

    def _unprepared(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_unprepared", *where)

    def _ended(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_ended", *where)
