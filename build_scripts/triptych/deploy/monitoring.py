"""What watches the promise: PodMonitor, recording rules and burn-rate alerts (PrometheusRule).

A latency percentile promised is an objective: ``p99 <= 50 ms`` means that 99 % of the requests are
answered within 50 ms, and that 1 % may not be. An alert compares how fast that budget burns, over a
long and a short window (Google, The Site Reliability Workbook, chapter 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from triptych.base.explained import ExplainedValue
from triptych.deploy.alerting import SHORTEST_FOR, alert, camel, who
from triptych.deploy.metrics import Metrics, quantile_of
from triptych.deploy.numbers import SCRAPE_S, Measured, Sizes
from triptych.deploy.options import DeployOptions
from triptych.deploy.watch_alerts import watch_alerts
from triptych.deploy.workload import labels, metadata
from triptych.operate.tune.drift import WORTH_TUNING
from triptych.repository.config import COUNTED_FROM, has_edge
from triptych.repository.manifest import BuildManifest

DRIFT_WINDOW = "6h"
MIN_ROWS = 1000
"""Their mean is known to a few percent, whatever the lengths."""


class Burn(NamedTuple):
    """An alert where the budget burns `times` as fast as it may, over both windows."""

    times: float
    long: str
    short: str
    severity: str

    def threshold(self, budget: float) -> float:
        """The share of requests that burns a budget so fast, at most what is above all of it."""
        return min(self.times * budget, (1 + budget) / 2)


BURNS = (
    Burn(14.4, "1h", "5m", "page"),
    Burn(6, "6h", "30m", "page"),
    Burn(1, "3d", "6h", "ticket"),
)
WINDOWS = ("5m", "30m", "1h", "6h", "3d")


class Promised(NamedTuple):
    """A pipeline's name, and its promise in words."""

    pipeline: str
    limits: str


class Objective(NamedTuple):
    """One promise over requests: the share that may break it, and the series that says who does."""

    name: str
    kind: str
    """Label of its alerts, by which they are routed and muted: ``failures`` or ``latency``."""
    budget: float
    record: str
    share: Callable[[str], str]
    """Of a window: the expression of the requests that break it."""
    says: str
    where: str
    """Labels that select the series."""
    counted: Callable[[str], str]
    """Of a window: the expression of all that might break it."""
    of: str = "requests"
    """What is counted."""

    def recorded(self, window: str) -> str:
        """The recorded share of a window of `WINDOWS`."""
        return f"{self.record}:{window}{{{self.where}}}"


def pod_monitor(options: DeployOptions) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(options),
        "spec": {
            "selector": {"matchLabels": labels(options)},
            "podMetricsEndpoints": [
                {
                    "port": "metrics",
                    "path": "/metrics",
                    "interval": ExplainedValue(
                        f"{SCRAPE_S}s",
                        "four scrapes in the shortest window that a rate is taken over",
                    ),
                }
            ],
        },
    }


def prometheus_rule(
    lock: BuildManifest, options: DeployOptions, sizes: Sizes, measured: Measured, metrics: Metrics
) -> dict[str, Any]:
    """Recording rules and alerts of one pipeline."""
    promise = Promised(lock.spec.name, str(lock.spec.serving.slo))
    return rule_of(
        promise,
        options,
        list(objectives(lock, options, metrics)),
        [
            *_percentile_alerts(lock, options, metrics),
            *_saturation_alerts(lock, options, measured, metrics),
            *replica_alerts(promise.pipeline, options, sizes, metrics),
            *_row_alerts(lock, options, metrics),
            *watch_alerts(lock, options, metrics),
        ],
    )


def rule_of(
    promise: Promised,
    options: DeployOptions,
    found: Sequence[Objective],
    alerts: list[dict[str, Any]],
) -> dict[str, Any]:
    """The rules of a pipeline of any task: its objectives recorded, their burns, other alerts."""
    records = [
        {
            "record": f"{one.record}:{window}",
            "expr": one.share(window),
            "labels": who(promise.pipeline, options),
        }
        for one in found
        for window in WINDOWS
    ]
    burns = [_burn_alert(one, burn, promise, options) for one in found for burn in BURNS]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata(options),
        "spec": {
            "groups": [
                {"name": f"{options.name}-records", "rules": records},
                {"name": f"{options.name}-alerts", "rules": [*burns, *alerts]},
            ]
        },
    }


def told_unready(rule: dict[str, Any], expression: ExplainedValue) -> dict[str, Any]:
    """The rules with another expression for replicas that do not get ready."""
    groups = [
        {
            **group,
            "rules": [
                {**one, "expr": expression}
                if one.get("alert", "").endswith("ReplicaNotReady")
                else one
                for one in group["rules"]
            ],
        }
        for group in rule["spec"]["groups"]
    ]
    return {**rule, "spec": {"groups": groups}}


def objectives(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[Objective]:
    """What is promised of requests and can be counted: their answer, and each latency."""
    promised = list(_promised(lock))
    where = ",".join(f'{name}="{value}"' for name, value in who(lock.spec.name, options).items())
    yield Objective(
        "Failures",
        "failures",
        min(budget for _, _, budget in promised),
        "triptych:failed:ratio",
        metrics.failed_share,
        "requests fail or are refused",
        where,
        metrics.count_offered,
    )
    for name, limit_ms, budget in promised:
        share = _slow_share(lock, limit_ms, options, metrics)
        if share is not None:
            yield Objective(
                f"Slow{name.upper()}",
                "latency",
                budget,
                f"triptych:slower_{name}:ratio",
                share,
                f"requests are not answered within {limit_ms:g} ms",
                where,
                metrics.count_offered,
            )


def _slow_share(
    lock: BuildManifest, limit_ms: float, options: DeployOptions, metrics: Metrics
) -> Callable[[str], str] | None:
    """Who broke a limit: as Envoy tells, whatever the server is, or as Triton's histogram does."""
    if metrics.envoy is not None:
        return partial(metrics.envoy_slow_share, limit_ms)
    if has_edge(lock.spec, limit_ms, options.release):
        return partial(metrics.slow_share, limit_ms)
    return None


def _promised(lock: BuildManifest) -> Iterator[tuple[str, float, float]]:
    """Name, limit in ms and budget of each percentile."""
    for name, limit_ms in lock.spec.serving.slo.limits_ms.items():
        yield name, limit_ms, round(1 - quantile_of(name), 6)


def _burn_alert(
    one: Objective, burn: Burn, promise: Promised, options: DeployOptions
) -> dict[str, Any]:
    threshold = burn.threshold(one.budget)
    capped = (
        ""
        if threshold == burn.times * one.budget
        else f", capped: {burn.times:g} times it is more than all"
    )
    fewest = math.ceil(2 / threshold)
    expression = "\nand ".join(
        (
            f"{one.recorded(burn.long)} > {threshold:.6g}",
            f"{one.recorded(burn.short)} > {threshold:.6g}",
            f"on () {one.counted(burn.short)} >= {fewest}",
        )
    )
    return alert(
        f"{camel(options.name)}{one.name}Burn{burn.long}",
        {"severity": burn.severity, "kind": one.kind, **who(promise.pipeline, options)},
        ExplainedValue(
            expression,
            f"budget {one.budget:.4g} of the {one.of} ({promise.limits}), burned "
            f"{burn.times:g} times as fast as it may: {threshold:.4g}{capped}. With fewer than "
            f"{fewest} {one.of} in {burn.short} a single one could raise it",
        ),
        f"{promise.pipeline}: {one.says}, {burn.times:g} times what may be",
        "See which replica and step (triptych bench, the metrics page), whether replicas are "
        "missing, and what was rolled out last; roll that back first.",
    )


def _percentile_alerts(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    """For limits that no histogram has an edge at: what Triton's own summaries say."""
    for name, limit_ms, _ in _promised(lock):
        if _slow_share(lock, limit_ms, options, metrics) is not None:
            continue
        shown = name.replace("_", ".")
        yield alert(
            f"{camel(options.name)}{name.upper()}Missed",
            {"severity": "page", "kind": "latency", **who(lock.spec.name, options)},
            ExplainedValue(
                f"{metrics.percentile_us(name)} > {limit_ms * 1e3:.0f}",
                f"{shown} <= {limit_ms:g} ms is promised. Triton {options.release} has no "
                f"histogram with an edge there (serving.triton and --triton of {COUNTED_FROM} or "
                "later have one, and so has an Envoy in front): this is each replica's own "
                "percentile of the last minute, seen by the server, and cannot be added up; so it "
                "says that the promise is missed now, not how much of a budget is left",
            ),
            f"{lock.spec.name}: {shown} of a replica is over {limit_ms:g} ms",
            "One replica alone: replace it. All of them: is the rate above the capacity, are rows "
            "longer than those of the bench, was something rolled out?",
            metrics.window(SHORTEST_FOR),
        )


def _saturation_alerts(
    lock: BuildManifest, options: DeployOptions, measured: Measured, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    name = lock.spec.name
    per_replica = measured.capacity_per_s.value
    yield alert(
        f"{camel(options.name)}Saturated",
        {"severity": "page", "kind": "saturation", **who(name, options)},
        ExplainedValue(
            f"{metrics.offered('5m')} > {per_replica:.6g} * {metrics.replicas()}",
            f"more comes in than all replicas were measured to hold, {per_replica:.4g}/s each",
        ),
        f"{name}: the rate is above the capacity of all replicas",
        "Is maxReplicaCount reached, or has the cluster no room? Raise one of them; until then "
        "requests are refused.",
        metrics.window(SHORTEST_FOR),
    )


def replica_alerts(
    name: str, options: DeployOptions, sizes: Sizes, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    """For replicas of pipeline `name` that do not get ready, or that nobody sees."""
    start = camel(options.name)
    labels = {"severity": "page", **who(name, options)}
    waiting_s = sizes.start_s.value + sizes.stable_s.value
    yield alert(
        f"{start}ReplicaNotReady",
        {**labels, "kind": "replicas"},
        f"{metrics.deployed('status_replicas_unavailable')} > 0",
        f"{name}: a replica does not get ready",
        "kubectl describe pod and kubectl logs --previous: the start-up check says in one line "
        "what it refuses.",
        ExplainedValue(
            metrics.window(f"{waiting_s}s"),
            "longer than a start may take, and than the autoscaler needs to settle",
        ),
    )
    yield alert(
        f"{start}NoMetrics",
        {**labels, "kind": "metrics"},
        ExplainedValue(
            f"absent({metrics.replicas()})",
            "no metrics: neither this page nor the autoscaler knows of any load",
        ),
        f"{name}: Prometheus sees no replica",
        "Are there pods? Does Prometheus select the PodMonitor, and does the NetworkPolicy let it "
        "in?",
        metrics.window(SHORTEST_FOR),
    )


def _row_alerts(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    """For texts: their lengths decide batches, padded lengths and the capacity measured."""
    built_for = lock.traffic.get("mean_tokens")
    if not built_for:
        return
    mean = metrics.mean_tokens(DRIFT_WINDOW)
    expression = "\n".join(
        (
            f"({mean} > {built_for * WORTH_TUNING:.6g}",
            f"or {mean} < {built_for / WORTH_TUNING:.6g})",
            f"and on () {metrics.count_rows(DRIFT_WINDOW)} >= {MIN_ROWS}",
        )
    )
    yield alert(
        f"{camel(options.name)}RowsDrifted",
        {"severity": "ticket", "kind": "rows", **who(lock.spec.name, options)},
        ExplainedValue(
            expression,
            f"built for rows of {built_for:g} tokens in the mean; work of {WORTH_TUNING:g} times "
            f"that, or the reverse, is worth tuning anew. Means of {MIN_ROWS} rows do not "
            "differ so by chance",
        ),
        f"{lock.spec.name}: rows are longer or shorter than those it was built for",
        f"Save a replica's metrics page; triptych tune {lock.spec.name} --check PAGE says what it "
        "costs and what to do.",
        metrics.window(SHORTEST_FOR),
    )
