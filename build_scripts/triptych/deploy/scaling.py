"""Triggers of KEDA's ScaledObject, which scale replicas by load over measured capacity."""

from __future__ import annotations

from typing import NamedTuple

from triptych.base.explained import ExplainedValue
from triptych.deploy.metrics import GenerationQueries, Metrics
from triptych.deploy.numbers import RATE_WINDOW_S, Sizes
from triptych.deploy.rules import KV_CACHE_FULL_RATIO, TextSpec
from triptych.repository.manifest import CompiledManifest

WAITING_SHARE = 0.5
"""Ratio of mean wait to lowest latency limit above which requests often miss the SLO."""


class Trigger(NamedTuple):
    """Prometheus query; KEDA runs its value divided by the threshold, rounded up, as replicas."""

    name: str
    query: ExplainedValue
    threshold: object


def encoder_triggers(build: CompiledManifest, sizes: Sizes, metrics: Metrics) -> list[Trigger]:
    """Return the triggers of a pipeline that does not generate text: its rate, and a guard."""
    window = f"{RATE_WINDOW_S}s"
    limit_us = WAITING_SHARE * min(build.spec.serving.slo.limits_us.values())
    waits = f"({metrics.waiting_us(window)} > bool {limit_us:.0f})"
    where = (
        "Requests that reach no server are not counted: use the gateway's own rate, if it has one"
        if metrics.envoy is None
        else "The proxy counts them, also without a server"
    )
    offered = ExplainedValue(
        metrics.offered(window),
        "arriving requests with refused ones: answers saturate just when replicas are missing. "
        f"{where}",
    )
    guard = ExplainedValue(
        f"{waits} * ({metrics.replicas()} + 1)",
        f"a guard: one replica more for as long as a request waits over {limit_us / 1e3:g} ms "
        f"on average ({WAITING_SHARE:.0%} of the lowest latency limit). Queue time itself "
        "explodes near saturation and would multiply replicas",
    )
    return [Trigger("rate", offered, sizes.threshold_per_s), Trigger("queue", guard, "1")]


def generation_triggers(spec: TextSpec, sizes: Sizes, metrics: GenerationQueries) -> list[Trigger]:
    """Return the triggers of a pipeline that generates text: requests in flight, and a guard."""
    requests = ExplainedValue(
        f"sum({metrics.gauge('running')} + {metrics.gauge('waiting')})",
        "running and waiting requests: the duration of an answer depends on its length, so the "
        "rate says little",
    )
    triggers = [Trigger("requests", requests, sizes.threshold_per_s)]
    if spec.has_kv_cache:
        cache, full = metrics.gauge("kv_cache_usage_ratio"), KV_CACHE_FULL_RATIO
        guard = ExplainedValue(
            f"(avg({cache}) > bool {full:g}) * (count({cache}) + 1)",
            f"a guard: one replica more for as long as the KV caches are over {full:.0%} full "
            "on average, as with prompts longer than planned",
        )
        triggers.append(Trigger("kv-cache", guard, "1"))
    return triggers
