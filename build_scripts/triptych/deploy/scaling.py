"""KEDA's ScaledObject: as many replicas as the offered rate takes at the capacity measured."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.metrics import Metrics
from triptych.deploy.numbers import POLL_S, RATE_WINDOW_S, Sizes
from triptych.deploy.options import DeployOptions
from triptych.deploy.workload import metadata
from triptych.repository.manifest import BuildManifest

WAITING_SHARE = 0.5
"""Of the shortest latency promised: who waits so long on average will miss the promise often."""
_FAILURES = 3


def scaled_object(
    lock: BuildManifest, options: DeployOptions, sizes: Sizes, metrics: Metrics
) -> dict[str, Any]:
    """The autoscaler of the Deployment."""
    window = f"{RATE_WINDOW_S}s"
    limit_us = WAITING_SHARE * min(lock.spec.serving.slo.limits_us.values())
    waits = f"({metrics.waiting_us(window)} > bool {limit_us:.0f})"
    rate = trigger(
        options,
        "rate",
        _offered(metrics, window),
        sizes.threshold_per_s,
    )
    guard = trigger(
        options,
        "queue",
        ExplainedValue(
            f"{waits} * ({metrics.replicas()} + 1)",
            f"a guard: one replica more for as long as a request waits over {limit_us / 1e3:g} ms "
            f"on average ({WAITING_SHARE:.0%} of the shortest promise). Queue time itself explodes "
            "near saturation and would multiply replicas",
        ),
        "1",
    )
    return scaled(options, sizes, [rate, guard])


def scaled(options: DeployOptions, sizes: Sizes, triggers: list[dict[str, Any]]) -> dict[str, Any]:
    """The autoscaler of the Deployment, by some triggers: the one that wants most counts."""
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(options),
        "spec": {
            "scaleTargetRef": {"name": options.name},
            "minReplicaCount": sizes.fewest,
            "maxReplicaCount": sizes.most,
            "pollingInterval": POLL_S,
            "fallback": {
                "failureThreshold": _FAILURES,
                "replicas": sizes.fewest.value,
                "behavior": ExplainedValue(
                    "currentReplicasIfHigher",
                    "without data the fleet stays as it was for the last load known (KEDA 2.17)",
                ),
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {
                            "stabilizationWindowSeconds": ExplainedValue(
                                0, "the headroom pays for the time to ready, not for waiting"
                            )
                        },
                        "scaleDown": {"stabilizationWindowSeconds": sizes.stable_s},
                    }
                }
            },
            "triggers": triggers,
        },
    }


def _offered(metrics: Metrics, window: str) -> ExplainedValue:
    what = (
        "what came in, refused requests included: answers saturate just when replicas are missing"
    )
    where = (
        "What reaches no server is not in it: put the gateway's own rate here, if it has one"
        if metrics.envoy is None
        else "Of the proxy: were there no server to take it"
    )
    return ExplainedValue(metrics.offered(window), f"{what}. {where}")


def trigger(
    options: DeployOptions, name: str, query: ExplainedValue, threshold: Any
) -> dict[str, Any]:
    """A query of Prometheus; as many replicas as `threshold` goes into it."""
    return {
        "type": "prometheus",
        "name": name,
        "metricType": ExplainedValue("AverageValue", "replicas = ceil(query / threshold)"),
        "metadata": {
            "serverAddress": options.prometheus,
            "query": query,
            "threshold": threshold,
            "ignoreNullValues": ExplainedValue(
                "false", "lost metrics are no load of 0: KEDA would remove replicas"
            ),
        },
    }
