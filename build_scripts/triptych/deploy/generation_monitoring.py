"""Rules, alerts and panels of a pipeline that generates text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.alerting import alert, camel, who
from triptych.deploy.dashboard import Panel, burn_panels, gpu_panels, replicas_panel
from triptych.deploy.metrics import GenerationMetrics, quantile_of
from triptych.deploy.monitoring import Objective, Promised, replica_alerts, rule_of
from triptych.deploy.numbers import Sizes
from triptych.deploy.options import DeployOptions
from triptych.spec.generation_fields import GeneratingSpec, GenerationSpec, Text2TextSpec

Spec = GenerationSpec | Text2TextSpec
FULL = 0.9
"""Of a replica's KV cache: beyond, what comes waits or is thrown out and computed again."""
FULL_FOR = "15m"
CROWDED = 0.2
"""Waiting requests, over the places of all replicas: the autoscaler is behind, or at its end."""
CROWDED_FOR = "10m"
SILENT = "5m"
FAILURES = 0.01
"""Budget of a pipeline that promises no percentile."""

_WINDOW = "5m"
_OF = {"ttft": "first tokens", "itl": "times between tokens", "e2e": "answers"}


def generation_promise(spec: GeneratingSpec) -> Promised:
    return Promised(spec.name, str(spec.serving.slo))


def generation_objectives(
    spec: GeneratingSpec, options: DeployOptions, metrics: GenerationMetrics
) -> Iterator[Objective]:
    """What is promised and can be counted: an answer at all, and each of its times."""
    promised = {
        name: (limit_ms, round(1 - quantile_of(name.partition("_")[2]), 6))
        for name, limit_ms in spec.serving.slo.limits_ms.items()
    }
    where = ",".join(f'{name}="{value}"' for name, value in who(spec.name, options).items())
    yield Objective(
        "Failures",
        "failures",
        min([budget for _, budget in promised.values()], default=FAILURES),
        "triptych:generation_failed:ratio",
        metrics.faulty_share,
        "requests fail, or find no room",
        where,
        metrics.ended,
    )
    for name, (limit_ms, budget) in promised.items():
        moment = name.partition("_")[0]
        yield Objective(
            f"Slow{name.title().replace('_', '')}",
            "latency",
            budget,
            f"triptych:generation_later_{name}:ratio",
            partial(metrics.late_share, moment, limit_ms),
            f"{_OF[moment]} take longer than {limit_ms:g} ms",
            where,
            partial(metrics.timed, moment),
            _OF[moment],
        )


def generation_rule(
    spec: Spec, options: DeployOptions, sizes: Sizes, metrics: GenerationMetrics
) -> dict[str, Any]:
    """Recording rules and alerts."""
    found = list(generation_objectives(spec, options, metrics))
    alerts = [
        *_load_alerts(spec, options, metrics),
        *replica_alerts(spec.name, options, sizes, metrics),
    ]
    return rule_of(generation_promise(spec), options, found, alerts)


def _load_alerts(
    spec: Spec, options: DeployOptions, metrics: GenerationMetrics
) -> Iterator[dict[str, Any]]:
    start, name, places = camel(options.name), spec.name, spec.core.max_num_seqs
    labels = who(name, options)
    yield alert(
        f"{start}Silent",
        {"severity": "page", "kind": "failures", **labels},
        ExplainedValue(
            metrics.silent(SILENT),
            "a replica that had requests all the time and made no token: its engine hangs, which "
            "no health check sees and no time counts that never ends",
        ),
        f"{name}: a replica makes no tokens",
        "kubectl logs of the pod, then delete it: the others take its requests.",
    )
    yield alert(
        f"{start}Crowded",
        {"severity": "page", "kind": "saturation", **labels},
        ExplainedValue(
            f"sum(avg_over_time({metrics.gauge('waiting')}[{metrics.window(_WINDOW)}]))"
            f" > {CROWDED * places:.6g} * count({metrics.gauge('waiting')})",
            f"requests wait for {CROWDED:.0%} of the {places} places (core.max_num_seqs) of each "
            "replica: the autoscaler should have added one long before",
        ),
        f"{name}: requests wait for a place in the engines",
        "Is maxReplicaCount reached, or has the cluster no room? Raise one of them; beyond "
        "serving.queue.max_in_flight requests are refused.",
        metrics.window(CROWDED_FOR),
    )
    if spec.has_kv_cache:
        yield alert(
            f"{start}KvCacheFull",
            {"severity": "ticket", "kind": "saturation", **labels},
            ExplainedValue(
                f"avg({metrics.gauge('kv_cache_share')}) > {FULL:g}",
                "the autoscaler adds a replica for as long as this is so: it is at its end",
            ),
            f"{name}: the KV caches are full",
            "Prompts and answers are longer than planned: more replicas, a larger "
            "core.kv_cache, or a smaller core.max_num_seqs.",
            metrics.window(FULL_FOR),
        )


def generation_rows(
    spec: Spec, options: DeployOptions, metrics: GenerationMetrics, *, on_gpu: bool
) -> dict[str, Sequence[Panel]]:
    """Title to panels of each row of the dashboard."""
    found = list(generation_objectives(spec, options, metrics))
    rows: dict[str, Sequence[Panel]] = {
        "The promise": [*burn_panels(found), *_times(spec, metrics)],
        "Load": list(_load(spec, metrics)),
        "Work": list(_work(metrics)),
    }
    if on_gpu:
        rows["GPU"] = list(gpu_panels(metrics))
    return rows


def _times(spec: GeneratingSpec, metrics: GenerationMetrics) -> Iterator[Panel]:
    limits_ms = spec.serving.slo.limits_ms
    for moment, (title, advice) in {
        "ttft": (
            "Time to first token",
            "From token ids in the core to the first new one. It climbs with waiting requests: see "
            "Load. Without any: longer prompts, or the prefix cache no longer helps (see Work).",
        ),
        "itl": (
            "Time between tokens",
            "It climbs with requests in a batch, and where long prompts are computed between: "
            "lower core.max_num_seqs or core.max_num_batched_tokens, or add replicas.",
        ),
        "e2e": (
            "Whole answers",
            "From token ids to the last new one; as long as answers are. Compare with tokens a "
            "second (see Work).",
        ),
    }.items():
        names = [name for name in limits_ms if name.startswith(moment)]
        shown = dict.fromkeys(["p50", *(name.partition("_")[2] for name in names), "p99"])
        yield Panel(
            title,
            f"{advice} The line is the first limit promised, if there is one.",
            "ms",
            {one: metrics.quantile_ms(moment, quantile_of(one), _WINDOW) for one in shown},
            limit=limits_ms[names[0]] if names else None,
        )


def _load(spec: Spec, metrics: GenerationMetrics) -> Iterator[Panel]:
    running, waiting = metrics.gauge("running"), metrics.gauge("waiting")
    yield Panel(
        "Requests",
        "In the engines' batches, before them, and places in all. Waiting ones with free places: "
        "the KV caches are full. Without free places: replicas are missing.",
        "none",
        {
            "running": f"sum({running})",
            "waiting": f"sum({waiting})",
            "places": f"{spec.core.max_num_seqs} * count({running})",
        },
    )
    if spec.has_kv_cache:
        yield Panel(
            "KV cache",
            "Share that running requests hold, by replica. Above the line what comes waits, or is "
            "thrown out and computed again. One replica alone: --affinity-header crowds it.",
            "percentunit",
            {"{{pod}}": metrics.gauge("kv_cache_share")},
            limit=FULL,
        )
    yield replicas_panel(metrics)


def _work(metrics: GenerationMetrics) -> Iterator[Panel]:
    yield Panel(
        "Ends",
        "Requests a second by their end. overloaded: no room, see Load. error: kubectl logs. "
        "refused: a client's mistake. cancelled: clients that left, and stop strings.",
        "reqps",
        {
            "{{how}}": metrics.ended_by_how(_WINDOW),
            "before the core: {{how}}": metrics.unprepared_by_how(_WINDOW),
        },
    )
    yield Panel(
        "Tokens",
        "Tokens a second: of prompts, those of them that the prefix cache had, and new ones. New "
        "ones that fall while requests wait: an engine is slow. See GPU, and delete its pod.",
        "none",
        {"{{kind}}": metrics.tokens_by_kind(_WINDOW)},
    )
    yield Panel(
        "Prefix cache",
        "Share of the prompts' tokens that need not be computed. It falls with more replicas: "
        "--affinity-header keeps streams that begin alike together.",
        "percentunit",
        {"cached": metrics.cached_share(_WINDOW)},
    )
    yield Panel(
        "Queue by step",
        "Mean wait for a step. postprocess, which is one process, near the time between tokens: "
        "add replicas. preprocess: give it instances.",
        "µs",
        {"{{model}}": metrics.step_queue_us(_WINDOW)},
    )
