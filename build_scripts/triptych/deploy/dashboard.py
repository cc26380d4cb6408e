"""The dashboard of a pipeline for Grafana, in a ConfigMap that its sidecar picks up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from triptych.base.explained import ExplainedValue
from triptych.deploy.metrics import Metrics, quantile_of
from triptych.deploy.monitoring import Objective, Promised, objectives
from triptych.deploy.options import DeployOptions
from triptych.deploy.workload import metadata
from triptych.repository.manifest import BuildManifest

SIDECAR_LABEL = "grafana_dashboard"
"""By which Grafana's chart finds dashboards."""

_SCHEMA = 39
_COLUMNS, _HEIGHT = 3, 8
_WIDTH = 24 // _COLUMNS
_WINDOW = "5m"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """A graph.

    Attributes:
        advice: what it shows, and what to do when it looks wrong.
        unit: Grafana's name of it.
        queries: legend to expression.
        limit: drawn as a line; None draws none.
    """

    title: str
    advice: str
    unit: str
    queries: dict[str, str]
    limit: float | None = None


def dashboard_map(
    promise: Promised, options: DeployOptions, rows: Mapping[str, Sequence[Panel]]
) -> dict[str, Any]:
    """The ConfigMap; what is in it is `dashboard`."""
    made = dashboard(promise, options, rows)
    meta = metadata(options, name=f"{options.name}-dashboard")
    meta["labels"] = {
        **meta["labels"],
        SIDECAR_LABEL: ExplainedValue(
            "1", "the label by which the sidecar of Grafana's chart finds it"
        ),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta,
        "data": {f"{options.name}.json": json.dumps(made, indent=1)},
    }


def dashboard(
    promise: Promised, options: DeployOptions, rows: Mapping[str, Sequence[Panel]]
) -> dict[str, Any]:
    """Grafana's own form of rows of panels, by their titles."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows.items():
        panels.append(
            {
                **_place(len(panels), 0, top, 24, 1),
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(row):
            down, across = divmod(index, _COLUMNS)
            place = _place(len(panels), across * _WIDTH, top + down * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append({**place, **_drawn(panel)})
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": f"triptych-{options.name}"[:40],
        "title": f"{promise.pipeline} ({options.namespace})",
        "description": f"{promise.pipeline} promises {promise.limits}",
        "tags": ["triptych"],
        "schemaVersion": _SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def rows_of(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics, capacity_per_s: float
) -> dict[str, list[Panel]]:
    """Title to panels of each row."""
    rows = {
        "The promise": list(_promise(lock, options, metrics)),
        "Capacity": list(_capacity(metrics, capacity_per_s)),
        "Steps": list(_steps(metrics)),
    }
    if "mean_tokens" in lock.traffic:
        rows["Rows"] = list(_rows(lock, metrics))
    if lock.spec.serving.sample is not None:
        rows["Watch"] = list(_watch(options, metrics))
    if lock.spec.core.device == "gpu":
        rows["GPU"] = list(gpu_panels(metrics))
    return rows


def burn_panels(found: Sequence[Objective]) -> Iterator[Panel]:
    """How fast the budgets burn."""
    for window in ("5m", "1h"):
        yield Panel(
            f"Burn of the budget, {window}",
            "Share of requests that break a promise, over the share that may. Above 1 the budget "
            "is spent too fast: roll back what was rolled out last, then go by the runbook.",
            "none",
            {one.name: f"{one.recorded(window)} / {one.budget:g}" for one in found},
            limit=1,
        )


def _promise(lock: BuildManifest, options: DeployOptions, metrics: Metrics) -> Iterator[Panel]:
    yield from burn_panels(list(objectives(lock, options, metrics)))
    limits_ms = lock.spec.serving.slo.limits_ms
    yield Panel(
        "Latency of each replica",
        "Percentiles of the last minute, as each server saw them, against the promise (line: the "
        "first). One replica alone: delete its pod. All of them: look at Capacity, then at Steps.",
        "ms",
        {
            f"{name.replace('_', '.')} {{{{pod}}}}": f"{metrics.percentile_us(name, 'pod')} / 1000"
            for name in limits_ms
        },
        limit=next(iter(limits_ms.values())),
    )
    if metrics.envoy is not None:
        yield Panel(
            "Latency at Envoy",
            "Percentiles of all replicas together, by Envoy's clock, retries and its own queue "
            "included. Far above the replicas' own: too few connections, or a replica that hangs.",
            "ms",
            {
                name.replace("_", "."): metrics.envoy_percentile_ms(quantile_of(name), _WINDOW)
                for name in limits_ms
            },
            limit=next(iter(limits_ms.values())),
        )


def _capacity(metrics: Metrics, capacity_per_s: float) -> Iterator[Panel]:
    replicas = metrics.replicas()
    yield Panel(
        "Rate and capacity",
        f"What comes in, and what all replicas were measured to hold, {capacity_per_s:.4g}/s each. "
        "Where they meet, requests are refused: raise maxReplicaCount or make room in the cluster.",
        "reqps",
        {
            "comes in": metrics.offered(_WINDOW),
            "capacity": f"{capacity_per_s:.6g} * {replicas}",
        },
    )
    yield Panel(
        "Capacity used",
        "Rate over capacity. Long below a half: fewer replicas suffice (--max-growth is high). "
        "Long near 1: the load grows faster than --max-growth says.",
        "percentunit",
        {"used": f"{metrics.offered(_WINDOW)} / ({capacity_per_s:.6g} * {replicas})"},
        limit=1,
    )
    yield replicas_panel(metrics)


def replicas_panel(metrics: Metrics) -> Panel:
    return Panel(
        "Replicas",
        "Wanted, ready, and seen by Prometheus. Fewer ready than wanted for minutes: kubectl "
        "describe pod. Fewer seen than ready: the PodMonitor or the NetworkPolicy.",
        "none",
        {
            "wanted": metrics.deployed("spec_replicas"),
            "ready": metrics.deployed("status_replicas_available"),
            "seen": metrics.replicas(),
        },
    )


def _steps(metrics: Metrics) -> Iterator[Panel]:
    yield Panel(
        "Rate by step",
        "Requests a second. All steps are alike; preprocess above the others: requests are refused "
        "there, for want of room or since they are wrong.",
        "reqps",
        {"{{model}}": metrics.step_rate(_WINDOW)},
    )
    yield Panel(
        "Queue by step",
        "Mean wait for a step. The step with the longest one is the bottleneck: `triptych tune` "
        "gives it instances, or more replicas share its work.",
        "µs",
        {"{{model}}": metrics.step_queue_us(_WINDOW)},
    )
    yield Panel(
        "Compute by step",
        "Mean time in a step. It rises without more load: longer rows (see Rows), a noisy "
        "neighbor, a node that throttles.",
        "µs",
        {"{{model}}": metrics.step_compute_us(_WINDOW)},
    )
    yield Panel(
        "Batch size by step",
        "Mean rows that a step executes at once. The core near its limit and a growing queue: the "
        "replica is full. Near 1 under load: the queue delay is too short, which `triptych tune` "
        "mends.",
        "none",
        {"{{model}}": metrics.step_batch(_WINDOW)},
    )
    yield Panel(
        "Waiting by step",
        "Requests that wait for a step now. It grows without end: more comes in than is answered.",
        "none",
        {"{{model}}": metrics.step_pending()},
    )


def _rows(lock: BuildManifest, metrics: Metrics) -> Iterator[Panel]:
    mean = float(lock.traffic["mean_tokens"])
    yield Panel(
        "Tokens of a row",
        f"Built for a mean of {mean:g} (line). Far from it, batches and capacity no longer fit: "
        f"`triptych tune {lock.spec.name} --check PAGE` says what to do.",
        "none",
        {
            "mean": metrics.mean_tokens(_WINDOW),
            "p50": metrics.tokens_quantile(0.5, _WINDOW),
            "p99": metrics.tokens_quantile(0.99, _WINDOW),
        },
        limit=mean,
    )


def _watch(options: DeployOptions, metrics: Metrics) -> Iterator[Panel]:
    yield Panel(
        "Samples",
        "Rows a second that are kept, and lost by reason. Lost to disk: the volume is full or not "
        "writable. Waiting: more at once than the writer takes, so lower serving.sample.rate.",
        "none",
        metrics.samples_by_end(_WINDOW),
    )
    if options.monitor_image is None:
        return
    yield Panel(
        "Evidence of wrong answers",
        "Of each test since the build, over what an alarm needs. It passes 1: roll back. It climbs "
        "for days: something is slightly off, see the watch's report.",
        "none",
        {"{{test}}": f"max by (test) ({metrics.watch('evidence')})"},
        limit=1,
    )
    yield Panel(
        "Loss against the original model",
        "Mean of all rows since the build, over what is still right. Above 1 with little evidence: "
        "few rows so far. Wait for more looks.",
        "none",
        {
            "{{test}}": f"max by (test) ({metrics.watch('mean_loss')})"
            f" / max by (test) ({metrics.watch('allowed_loss')} > 0)"
        },
        limit=1,
    )
    yield Panel(
        "Looks",
        "Rows of the last look, and hours since it. No rows for long: nothing is asked or sampled. "
        "Hours climb: kubectl logs of the watch.",
        "none",
        {
            "rows": f"max({metrics.watch('rows')})",
            "hours since": f"(time() - max({metrics.watch('at_seconds')})) / 3600",
        },
    )


def gpu_panels(metrics: Metrics) -> Iterator[Panel]:
    """Of the GPUs of all replicas."""
    yield Panel(
        "GPU busy",
        "Share of the time in which the GPU works. Low under load: the CPU steps are the "
        "bottleneck (see Queue by step). On a MIG slice it is not told.",
        "percentunit",
        {"{{pod}}": metrics.gpu("utilization")},
    )
    yield Panel(
        "GPU memory",
        "Share in use. It should be level: growth ends in a failed allocation; roll back.",
        "percentunit",
        {"{{pod}}": f"{metrics.gpu('memory_used_bytes')} / {metrics.gpu('memory_total_bytes')}"},
    )
    yield Panel(
        "GPU power",
        "Watts. At its limit clocks fall and capacity with them: measure capacity under full load.",
        "watt",
        {"{{pod}}": metrics.gpu("power_usage")},
    )


def _place(number: int, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _drawn(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.limit is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.advice,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }
