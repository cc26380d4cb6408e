"""What watches the promise: PodMonitor, recording rules and burn-rate alerts (PrometheusRule).

A latency percentile promised is an objective: ``p99 <= 50 ms`` means that 99 % of the requests are
answered within 50 ms, and that 1 % may not be. An alert compares how fast that budget burns, over a
long and a short window (Google, The Site Reliability Workbook, chapter 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from triptych.deploy.measured import Measured
from triptych.deploy.metrics import Metrics
from triptych.deploy.options import Options
from triptych.deploy.sizing import SCRAPE_S, Sizes
from triptych.deploy.workload import labels, metadata
from triptych.fleet.reasons import Because
from triptych.repository.latencies import COUNTED_FROM, has_edge
from triptych.repository.lock import Lock

SHORTEST_FOR = "5m"


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


class Objective(NamedTuple):
    """One promise over requests: the share that may break it, and the series that says who does."""

    name: str
    budget: float
    record: str
    share: Callable[[str], str]
    """Of a window: the expression of the requests that break it."""
    says: str


def pod_monitor(options: Options) -> dict[str, Any]:
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
                    "interval": Because(
                        f"{SCRAPE_S}s",
                        "four scrapes in the shortest window that a rate is taken over",
                    ),
                }
            ],
        },
    }


def prometheus_rule(
    lock: Lock, options: Options, sizes: Sizes, measured: Measured
) -> dict[str, Any]:
    """Recording rules and alerts of one pipeline."""
    metrics = Metrics(lock.spec.name, options.namespace)
    found = list(objectives(lock, options, metrics))
    records = [
        {
            "record": f"{one.record}:{window}",
            "expr": one.share(window),
            "labels": {"pipeline": lock.spec.name, "namespace": options.namespace},
        }
        for one in found
        for window in WINDOWS
    ]
    alerts = [
        *(_burn_alert(one, burn, lock, options, metrics) for one in found for burn in BURNS),
        *_percentile_alerts(lock, options, metrics),
        *_fleet_alerts(lock, options, sizes, measured, metrics),
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata(options),
        "spec": {
            "groups": [
                {"name": f"{options.name}-records", "rules": records},
                {"name": f"{options.name}-alerts", "rules": alerts},
            ]
        },
    }


def told_unready(rule: dict[str, Any], expression: Because) -> dict[str, Any]:
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


def _promised(lock: Lock) -> Iterator[tuple[str, float, float]]:
    """Name, limit in ms and budget of each percentile."""
    for name, limit_ms in lock.spec.serving.slo.limits_ms.items():
        yield name, limit_ms, round(1 - float(name[1:].replace("_", ".")) / 100, 6)


def objectives(lock: Lock, options: Options, metrics: Metrics) -> Iterator[Objective]:
    """What is promised of requests, as far as the release can tell who breaks it."""
    promised = list(_promised(lock))
    budget = min(budget for _, _, budget in promised)
    yield Objective(
        "Failures",
        budget,
        "triptych:failed:ratio",
        metrics.failed_share,
        "requests fail or are refused",
    )
    for name, limit_ms, budget in promised:
        if has_edge(lock.spec, limit_ms, options.release):
            yield Objective(
                f"Slow{name.upper()}",
                budget,
                f"triptych:slower_{name}:ratio",
                partial(metrics.slow_share, limit_ms),
                f"requests are not answered within {limit_ms:g} ms",
            )


def _burn_alert(
    one: Objective, burn: Burn, lock: Lock, options: Options, metrics: Metrics
) -> dict[str, Any]:
    threshold = burn.threshold(one.budget)
    capped = (
        ""
        if threshold == burn.times * one.budget
        else f", capped: {burn.times:g} times it is more than all"
    )
    fewest = math.ceil(2 / threshold)
    series = f'{{pipeline="{lock.spec.name}",namespace="{options.namespace}"}}'
    expression = "\nand ".join(
        (
            f"{one.record}:{burn.long}{series} > {threshold:.6g}",
            f"{one.record}:{burn.short}{series} > {threshold:.6g}",
            f"on () {metrics.count_offered(burn.short)} >= {fewest}",
        )
    )
    return {
        "alert": f"{_camel(options.name)}{one.name}Burn{burn.long}",
        "expr": Because(
            expression,
            f"budget {one.budget:.4g} of the requests ({lock.spec.serving.slo}), burnt "
            f"{burn.times:g} times as fast as it may: {threshold:.4g}{capped}. With fewer than "
            f"{fewest} requests in {burn.short} a single one could raise it",
        ),
        "labels": {"severity": burn.severity, "pipeline": lock.spec.name},
        "annotations": {
            "summary": f"{lock.spec.name}: {one.says}, {burn.times:g} times what may be",
            "description": "See which replica and step (triptych bench, the metrics page), whether "
            "replicas are missing, and what was rolled out last; roll that back first.",
        },
    }


def _percentile_alerts(lock: Lock, options: Options, metrics: Metrics) -> Iterator[dict[str, Any]]:
    """For limits that no histogram has an edge at: what Triton's own summaries say."""
    for name, limit_ms, _ in _promised(lock):
        if has_edge(lock.spec, limit_ms, options.release):
            continue
        shown = name.replace("_", ".")
        yield {
            "alert": f"{_camel(options.name)}{name.upper()}Missed",
            "expr": Because(
                f"{metrics.percentile_us(name)} > {limit_ms * 1e3:.0f}",
                f"{shown} <= {limit_ms:g} ms is promised. Triton {options.release} has no "
                f"histogram with an edge there (serving.triton and --triton of {COUNTED_FROM} or "
                "later have one): this is each replica's own "
                "percentile of the last minute, seen by the server, and cannot be added up; so it "
                "says that the promise is missed now, not how much of a budget is left",
            ),
            "for": SHORTEST_FOR,
            "labels": {"severity": "page", "pipeline": lock.spec.name},
            "annotations": {
                "summary": f"{lock.spec.name}: {shown} of a replica is over {limit_ms:g} ms",
                "description": "One replica alone: replace it. All of them: is the rate above the "
                "capacity, are rows longer than those of the bench, was something rolled out?",
            },
        }


def _fleet_alerts(
    lock: Lock, options: Options, sizes: Sizes, measured: Measured, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    who = _camel(options.name)
    common = {"severity": "page", "pipeline": lock.spec.name}
    per_replica = measured.capacity_per_s.value
    yield {
        "alert": f"{who}Saturated",
        "expr": Because(
            f"{metrics.offered('5m')} > {per_replica:.6g} * {metrics.replicas()}",
            f"more comes in than all replicas were measured to hold, {per_replica:.4g}/s each",
        ),
        "for": SHORTEST_FOR,
        "labels": common,
        "annotations": {
            "summary": f"{lock.spec.name}: the rate is above the capacity of all replicas",
            "description": "Is maxReplicaCount reached, or has the cluster no room? Raise one of "
            "them; until then requests are refused.",
        },
    }
    waiting_s = sizes.start_s.value + sizes.stable_s.value
    yield {
        "alert": f"{who}ReplicaNotReady",
        "expr": f'kube_deployment_status_replicas_unavailable{{namespace="{options.namespace}",'
        f'deployment="{options.name}"}} > 0',
        "for": Because(
            f"{waiting_s}s", "longer than a start may take, and than the autoscaler needs to settle"
        ),
        "labels": {**common, "severity": "ticket"},
        "annotations": {
            "summary": f"{lock.spec.name}: a replica does not get ready",
            "description": "kubectl describe pod and kubectl logs --previous: the start-up check "
            "says in one line what it refuses.",
        },
    }
    yield {
        "alert": f"{who}NoMetrics",
        "expr": Because(
            f"absent({metrics.replicas()})",
            "no metrics: neither this page nor the autoscaler knows of any load",
        ),
        "for": SHORTEST_FOR,
        "labels": common,
        "annotations": {
            "summary": f"{lock.spec.name}: Prometheus sees no replica",
            "description": "Are there pods? Does Prometheus select the PodMonitor, and does the "
            "NetworkPolicy let it in?",
        },
    }


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))
