"""Objectives of a pipeline and their burn-rate alerts, for the rules of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from triptych.base.explained import ExplainedValue
from triptych.deploy.metrics import GenerationQueries, Metrics, parse_quantile
from triptych.deploy.numbers import MeasuredReplica
from triptych.deploy.options import DeployOptions
from triptych.repository.config import COUNTED_FROM, has_bucket_bound
from triptych.repository.manifest import CompiledManifest
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec

TextSpec = GenerationSpec | Text2TextSpec
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Windows of the recorded ratios."""
DRIFT_WINDOW = "6h"
MIN_LOAD_CHANGE = 1.25
"""Minimum change of the mean length of rows, as a factor up or down, to tune again."""
MIN_DRIFT_ROWS = 1000
"""Number of rows that gives the mean length to a few percent."""
MAX_FAILED_RATIO = 0.01
"""Error budget of a pipeline whose SLO has no percentile."""
KV_CACHE_FULL_RATIO = 0.9
"""Usage ratio of the KV cache above which requests wait, or are evicted and recomputed."""
MAX_WAITING_RATIO = 0.2
"""Waiting requests per slot above which the autoscaler is too slow or at its maximum."""

_LATENCIES = {
    "ttft": "first tokens",
    "itl": "times between tokens",
    "e2e": "answers",
}


class Burn(NamedTuple):
    """Alert on an error budget that burns `times` as fast as allowed, over both windows."""

    times: float
    long: str
    short: str
    severity: str

    def threshold(self, budget: float) -> float:
        """Return the ratio of bad requests at which a budget burns at the alert's rate.

        The ratio is at most halfway between the budget and 1, so that a total failure exceeds it.
        """
        return min(self.times * budget, (1 + budget) / 2)


BURNS = (
    Burn(14.4, "1h", "5m", "page"),
    Burn(6, "6h", "30m", "page"),
    Burn(1, "3d", "6h", "ticket"),
)


class SloObjective(NamedTuple):
    """Limit of the SLO over requests."""

    name: str
    # Label of its alerts, by which they are routed and muted: ``failures`` or ``latency``.
    kind: str
    budget: float  # Ratio of requests that may miss the limit
    record: str  # Prefix of the recorded series
    # Expression of the ratio of requests that miss the limit in a window.
    share: Callable[[str], str]
    summary: str  # Text of the alerts
    where: str  # Labels that select the recorded series
    counted: Callable[[str], str]  # Expression of the number of requests in a window
    unit: str = "requests"  # Name of the counted items

    def recorded(self, window: str) -> str:
        """Return the recorded ratio of a window of `WINDOWS`."""
        return f"{self.record}:{window}{{{self.where}}}"


def encoder_objectives(
    build: CompiledManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[SloObjective]:
    """Yield the countable limits of requests: failures and each latency."""
    budgets = {name: _budget(name) for name in build.spec.serving.slo.limits_ms}
    where = _select(build.spec.name, options)
    yield SloObjective(
        "Failures",
        "failures",
        min(budgets.values()),
        "triptych:failed:ratio",
        metrics.failed_share,
        "requests fail or are refused",
        where,
        metrics.count_offered,
    )
    for name, limit_ms in build.spec.serving.slo.limits_ms.items():
        share = _slow_share(build, limit_ms, options, metrics)
        if share is not None:
            yield SloObjective(
                f"Slow{name.upper()}",
                "latency",
                budgets[name],
                f"triptych:slower_{name}:ratio",
                share,
                f"requests are not answered within {limit_ms:g} ms",
                where,
                metrics.count_offered,
            )


def generation_objectives(
    spec: TextSpec, options: DeployOptions, metrics: GenerationQueries
) -> Iterator[SloObjective]:
    """Yield the countable limits of generated text: failures and each latency."""
    limits_ms = spec.serving.slo.limits_ms
    budgets = {name: _budget(name.partition("_")[2]) for name in limits_ms}
    where = _select(spec.name, options)
    yield SloObjective(
        "Failures",
        "failures",
        min(budgets.values(), default=MAX_FAILED_RATIO),
        "triptych:generation_failed:ratio",
        metrics.faulty_share,
        "requests fail or are refused for overload",
        where,
        metrics.ended,
    )
    for name, limit_ms in limits_ms.items():
        latency = name.partition("_")[0]
        yield SloObjective(
            f"Slow{name.title().replace('_', '')}",
            "latency",
            budgets[name],
            f"triptych:generation_later_{name}:ratio",
            partial(metrics.late_share, latency, limit_ms),
            f"{_LATENCIES[latency]} take longer than {limit_ms:g} ms",
            where,
            partial(metrics.timed, latency),
            _LATENCIES[latency],
        )


def burn_alerts(objectives: Sequence[SloObjective], pipeline: str, slo: str) -> list[object]:
    """Return the burn-rate alerts of all objectives, for the template of the rules."""
    return [_burn_alert(one, burn, pipeline, slo) for one in objectives for burn in BURNS]


def _burn_alert(one: SloObjective, burn: Burn, pipeline: str, slo: str) -> Mapping[str, object]:
    threshold = burn.threshold(one.budget)
    capped = (
        ""
        if threshold == burn.times * one.budget
        else f", capped: {burn.times:g} times the budget is more than all requests"
    )
    min_requests = math.ceil(2 / threshold)
    conditions = (
        f"{one.recorded(burn.long)} > {threshold:.6g}",
        f"{one.recorded(burn.short)} > {threshold:.6g}",
        f"on () {one.counted(burn.short)} >= {min_requests}",
    )
    return {
        "name": f"{one.name}Burn{burn.long}",
        "severity": burn.severity,
        "kind": one.kind,
        "expression": ExplainedValue(
            "\nand ".join(conditions),
            f"budget {one.budget:.4g} of the {one.unit} ({slo}), burned {burn.times:g} times as "
            f"fast as allowed: {threshold:.4g}{capped}. With fewer than {min_requests} {one.unit} "
            f"in {burn.short} a single one could raise it",
        ),
        "summary": f"{pipeline}: {one.summary}, {burn.times:g} times the allowed ratio",
    }


def encoder_rule_values(
    build: CompiledManifest, options: DeployOptions, measured: MeasuredReplica, metrics: Metrics
) -> dict[str, object]:
    """Return the values of rules and dashboard for a pipeline that does not generate text."""
    tokens = build.traffic.get("mean_tokens")
    return {
        "capacity_per_s": measured.capacity_per_s.value,
        "limits_ms": build.spec.serving.slo.limits_ms,
        "mean_tokens": None if tokens is None else float(tokens),
        "missed": list(_percentile_alerts(build, options, metrics)),
        "drift": _drift(float(tokens), metrics) if tokens else None,
    }


def generation_rule_values(spec: TextSpec, metrics: GenerationQueries) -> dict[str, object]:
    """Return the values of rules and dashboard for a pipeline that generates text."""
    limits_ms = spec.serving.slo.limits_ms
    latencies = []
    for latency, title, advice in (
        (
            "ttft",
            "Time to first token",
            "From token ids in the core to the first new one. It climbs with waiting requests: see "
            "Load. Without any: longer prompts, or fewer hits in the prefix cache (see Work).",
        ),
        (
            "itl",
            "Time between tokens",
            "It climbs with requests in a batch, and with long prompts between the tokens: "
            "lower core.max_num_seqs or core.max_num_batched_tokens, or add replicas.",
        ),
        (
            "e2e",
            "Whole answers",
            "From token ids to the last new one; it grows with the length of answers. Compare with "
            "tokens per second (see Work).",
        ),
    ):
        names = [name for name in limits_ms if name.startswith(latency)]
        shown = dict.fromkeys(["p50", *(name.partition("_")[2] for name in names), "p99"])
        queries = {one: metrics.quantile_ms(latency, parse_quantile(one), "5m") for one in shown}
        limit = limits_ms[names[0]] if names else None
        latencies.append({"title": title, "advice": advice, "queries": queries, "limit": limit})
    return {
        "capacity_per_s": None,
        "max_num_seqs": spec.core.max_num_seqs,
        "has_kv_cache": spec.has_kv_cache,
        "latencies": latencies,
        "mean_tokens": None,
        "missed": (),
    }


def camel(name: str) -> str:
    """Return a name with dashes as the beginning of an alert's name."""
    return "".join(part.capitalize() for part in name.split("-"))


def _budget(percentile: str) -> float:
    return round(1 - parse_quantile(percentile), 6)


def _select(pipeline: str, options: DeployOptions) -> str:
    return f'pipeline="{pipeline}",namespace="{options.namespace}"'


def _slow_share(
    build: CompiledManifest, limit_ms: float, options: DeployOptions, metrics: Metrics
) -> Callable[[str], str] | None:
    """Return the ratio of slow requests by the histogram of Envoy or Triton; None without one."""
    if metrics.envoy is not None:
        return partial(metrics.envoy_slow_share, limit_ms)
    if has_bucket_bound(build.spec, limit_ms, options.release):
        return partial(metrics.slow_share, limit_ms)
    return None


def _percentile_alerts(
    build: CompiledManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[Mapping[str, object]]:
    """Yield alerts on Triton's own summaries, for limits that are no bound of a histogram."""
    for name, limit_ms in build.spec.serving.slo.limits_ms.items():
        if _slow_share(build, limit_ms, options, metrics) is not None:
            continue
        shown = name.replace("_", ".")
        yield {
            "name": name.upper(),
            "expression": ExplainedValue(
                f"{metrics.percentile_us(name)} > {limit_ms * 1e3:.0f}",
                f"{shown} <= {limit_ms:g} ms is the SLO. Triton {options.release} has no "
                f"histogram with a bound there (serving.triton and --triton of {COUNTED_FROM} or "
                "later have one, and so has Envoy): this is each replica's own percentile of the "
                "last minute, by the server's clock, and cannot be summed; it shows that the SLO "
                "is missed now, not the remaining budget",
            ),
            "summary": f"{build.spec.name}: {shown} of a replica is over {limit_ms:g} ms",
        }


def _drift(built_for: float, metrics: Metrics) -> ExplainedValue:
    """Return the condition that the rows' mean length differs from that of the build's traffic.

    Text lengths decide the batches, padded lengths and measured capacity.
    """
    mean = metrics.mean_tokens(DRIFT_WINDOW)
    expression = "\n".join(
        (
            f"({mean} > {built_for * MIN_LOAD_CHANGE:.6g}",
            f"or {mean} < {built_for / MIN_LOAD_CHANGE:.6g})",
            f"and on () {metrics.count_rows(DRIFT_WINDOW)} >= {MIN_DRIFT_ROWS}",
        )
    )
    return ExplainedValue(
        expression,
        f"built for rows of {built_for:g} tokens in the mean; a change by a factor of "
        f"{MIN_LOAD_CHANGE:g} is worth tuning again. Means of {MIN_DRIFT_ROWS} rows do not differ "
        "so much by chance",
    )
