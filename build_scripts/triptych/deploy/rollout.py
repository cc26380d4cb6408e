"""Argo Rollouts: a new build gets requests step by step, as long as the promise is kept.

It takes the Deployment as its template and moves the weights of the route. Each step is judged by
the recording rules that the alerts compare, in the same way.
"""

from __future__ import annotations

import math
from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.basis import Deployed
from triptych.deploy.gateway import canary_name
from triptych.deploy.monitoring import BURNS, told_unready
from triptych.deploy.verdict import verdict_name, verdict_policy, verdict_spec
from triptych.deploy.workload import labels, metadata

PLUGIN = "argoproj-labs/gatewayAPI"
_BURN = BURNS[1]
_WINDOW = "5m"
_STEP_PERCENT = 5
_LOOKS = 3
_REVISIONS = 5


def progressive(basis: Deployed, base: dict[str, Any]) -> dict[str, Any]:
    """The files of `base` with a Rollout in charge of the Deployment's pods."""
    options = basis.options
    scaled = base["scaled-object.yaml"]
    scaled["spec"]["scaleTargetRef"] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "name": options.name,
    }
    unready = ExplainedValue(
        f'rollout_info_replicas_unavailable{{name="{options.name}"}} > 0',
        "of Argo Rollouts' controller, whose own namespace a scraper may write there: the "
        "Deployment's pods are gone",
    )
    return {
        **base,
        "prometheus-rule.yaml": told_unready(base["prometheus-rule.yaml"], unready),
        "rollout.yaml": _rollout(basis),
        "analysis-template.yaml": _analysis(basis),
        **_compared(basis),
    }


def _compared(basis: Deployed) -> dict[str, Any]:
    """The verdict of `triptych shadow` as an analysis, where the build in place is known."""
    options = basis.options
    if basis.in_place is None:
        return {}
    name = verdict_name(options)
    job = {"metadata": {"labels": labels(options, name)}, "spec": verdict_spec(basis)}
    return {
        "verdict-analysis-template.yaml": {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "AnalysisTemplate",
            "metadata": metadata(options, name),
            "spec": {"metrics": [{"name": "answers", "provider": {"job": job}}]},
        },
        "verdict-network-policy.yaml": verdict_policy(options),
    }


def _rollout(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    judged = {
        "analysis": {"templates": [{"templateName": options.name}]},
    }
    steps = [
        step
        for weight in _weights(basis)
        for step in ({"setWeight": weight}, {"pause": {"duration": _pause()}}, judged)
    ]
    if basis.in_place is not None:
        compared = {"templates": [{"templateName": verdict_name(options)}]}
        steps.insert(
            0,
            {
                "analysis": ExplainedValue(
                    compared,
                    "what users asked of late, asked of both builds, before the new one gets a "
                    "single request. Too few sampled rows tell nothing, and end the rollout",
                )
            },
        )
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "metadata": metadata(options),
        "spec": {
            "selector": {"matchLabels": labels(options)},
            "workloadRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": options.name,
                "scaleDown": ExplainedValue(
                    "onsuccess", "the Deployment's own pods go once the Rollout's answer"
                ),
            },
            "revisionHistoryLimit": ExplainedValue(
                _REVISIONS, "builds that `kubectl argo rollouts undo` can go back to"
            ),
            "progressDeadlineSeconds": ExplainedValue(
                2 * basis.sizes.start_s.value, "as the Deployment's: twice what a start may take"
            ),
            "strategy": {
                "canary": {
                    "stableService": options.name,
                    "canaryService": canary_name(options),
                    "trafficRouting": {
                        "plugins": {
                            PLUGIN: {
                                "grpcRoutes": [{"name": options.name}],
                                "namespace": options.namespace,
                            }
                        }
                    },
                    "maxSurge": 1,
                    "maxUnavailable": 0,
                    "steps": steps,
                }
            },
        },
    }


def _analysis(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    judged = []
    for one in basis.objectives():
        threshold = _BURN.threshold(one.budget)
        judged.append(
            {
                "name": one.name.lower(),
                "count": _LOOKS,
                "interval": "1m",
                "failureLimit": 0,
                "successCondition": ExplainedValue(
                    f"len(result) > 0 && result[0] <= {threshold:.6g}",
                    f"the budget of {one.budget:.4g} may burn {_BURN.times:g} times as fast for a "
                    "while, as in the alerts; a canary of which all requests fail is over that. "
                    "Without data or requests it is neither good nor bad: the rollout waits for "
                    "a person",
                ),
                "failureCondition": f"len(result) > 0 && result[0] > {threshold:.6g}",
                "provider": {
                    "prometheus": {
                        "address": options.prometheus,
                        "query": one.recorded(_WINDOW),
                    }
                },
            }
        )
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "AnalysisTemplate",
        "metadata": metadata(options),
        "spec": {"metrics": judged},
    }


def _weights(basis: Deployed) -> list[Any]:
    """Percent of the requests for the new build: the first that shows one that fails them all."""
    thresholds = [_BURN.threshold(one.budget) for one in basis.objectives()]
    least = _STEP_PERCENT * math.floor(100 * max(thresholds) / _STEP_PERCENT + 1)
    first = ExplainedValue(
        least,
        f"the rules see both builds together: with a smaller share not even a build that fails "
        f"every request would burn the budget {_BURN.times:g} times too fast",
    )
    return [first, *[w for w in (50,) if w > least]]


def _pause() -> ExplainedValue:
    return ExplainedValue(_WINDOW, "the window that the rules look at must be of this weight alone")
