"""`triptych deploy --target kserve`: ServingRuntime, InferenceService, and what KServe leaves out.

KServe's own Triton runtime (config/runtimes/kserve-tritonserver.yaml, release 0.20) has no shared
memory (issue 1937), no probe but the look at a port that KServe adds, no named port for gRPC (issue
2961), and one core whatever was measured. The two overlays are its two modes of deployment: what
Knative refuses (pkg/apis/serving/fieldmask.go of knative/serving) is in the other one alone.
"""

from __future__ import annotations

import math
from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.basis import Deployed, Manifests
from triptych.deploy.kubernetes import APPLY, KUSTOMIZATION, servers
from triptych.deploy.monitoring import pod_monitor, told_unready
from triptych.deploy.samples import group, watching
from triptych.deploy.verdict import verdict_job, verdict_policy
from triptych.deploy.workload import (
    PORTS,
    disruption_budget,
    gateway_askers,
    metadata,
    servers_policy,
)

KSERVE_CONTAINER = "kserve-container"
"""KServe mounts models for the container of this name, and gives it its defaults."""
MODELS_MOUNT = "/mnt/models"
GATEWAY_NAMESPACE = "kserve"
"""Of ``kserve/kserve-ingress-gateway``, the gateway that KServe's own settings name."""
FORMAT = "triptych"
_MODE = "serving.kserve.io/deploymentMode"
_POD_OF_STANDARD = (
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
    "automountServiceAccountToken",
    "enableServiceLinks",
)


def kserve_manifests(basis: Deployed) -> Manifests:
    """The manifests.

    Raises:
        UserError: something cannot work; says what and what to do.
    """
    options, sample = basis.options, basis.sample
    unready = ExplainedValue(
        f'kube_deployment_status_replicas_unavailable{{namespace="{options.namespace}",'
        f'deployment=~"{options.workload}.*"}} > 0',
        "the Deployments that KServe or Knative makes",
    )
    base = {
        "serving-runtime.yaml": _runtime(basis),
        "inference-service.yaml": _inference_service(basis),
        **({} if sample is None else watching(basis, sample)),
        **({} if basis.in_place is None else {"verdict-policy.yaml": verdict_policy(options)}),
        "disruption-budget.yaml": disruption_budget(options),
        "pod-monitor.yaml": pod_monitor(options),
        "prometheus-rule.yaml": told_unready(basis.rule(), unready),
    }
    files = {
        "base/kustomization.yaml": {**KUSTOMIZATION, "resources": list(base)},
        **{f"base/{name}": document for name, document in base.items()},
        **{f"overlays/standard/{name}": document for name, document in _standard(basis).items()},
        **{f"overlays/knative/{name}": document for name, document in _knative(basis).items()},
    }
    if basis.in_place is not None:
        files["verdict-job.yaml"] = verdict_job(basis)
    mode = "standard" if options.canary_percent is None else "knative"
    return Manifests(files, basis.version, f"overlays/{mode}", APPLY)


def _pod(basis: Deployed) -> dict[str, Any]:
    """Of the Deployment that stands without KServe: one source for both."""
    pod: dict[str, Any] = servers(basis)["spec"]["template"]
    return pod


def _container(basis: Deployed) -> dict[str, Any]:
    (container,) = _pod(basis)["spec"]["containers"]
    resources, _ = basis.placement()
    kept = {key: value for key, value in container.items() if key not in ("ports", "lifecycle")}
    security = {
        key: value
        for key, value in _pod(basis)["spec"]["securityContext"].items()
        if key not in group()
    }
    return {
        **kept,
        "name": KSERVE_CONTAINER,
        "env": [
            {
                "name": "TRIPTYCH_REPOSITORY",
                "value": ExplainedValue(MODELS_MOUNT, "where KServe mounts storageUri"),
            },
            *container["env"],
        ],
        "resources": resources,
        # Here and not of the pod: Knative takes no other.
        "securityContext": {**security, **container["securityContext"]},
        "volumeMounts": [one for one in container["volumeMounts"] if one["name"] != "models"],
    }


def _runtime(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    pod = _pod(basis)
    _, node = basis.placement()
    spec = {
        "labels": ExplainedValue(
            pod["metadata"]["labels"],
            "of the pods: what watches, guards and scales them selects these",
        ),
        "supportedModelFormats": [
            {
                "name": FORMAT,
                "autoSelect": ExplainedValue(
                    False, "its image and numbers are of this pipeline alone"
                ),
            }
        ],
        "protocolVersions": ["v2", "grpc-v2"],
        **node,
        "containers": [_container(basis)],
        "volumes": [one for one in pod["spec"]["volumes"] if one["name"] != "models"],
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": metadata(options),
        "spec": spec,
    }


def _inference_service(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    reason = (
        f"{basis.version} is the start of the lock's SHA-256: a new build has a new name and rolls "
        "out; the start-up check compares every file with the lock"
    )
    if options.repository_image is None:
        uri = ExplainedValue(f"pvc://{options.name}-{basis.version}", reason)
    else:
        uri = ExplainedValue(
            f"oci+native://{options.repository_image}:{basis.version}",
            f"{reason}. An image volume: KServe 0.20, Kubernetes 1.35",
        )
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            **metadata(options),
            "annotations": {
                "storage.kserve.io/readonly": ExplainedValue(
                    "true", "files must stay as the lock has them"
                )
            },
        },
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": FORMAT},
                    "runtime": options.name,
                    "protocolVersion": "grpc-v2",
                    "storageUri": uri,
                },
            }
        },
    }


def _standard(basis: Deployed) -> dict[str, Any]:
    """KServe makes a Deployment: everything of the target kubernetes holds."""
    options, (container,) = basis.options, _pod(basis)["spec"]["containers"]
    pod = {key: value for key, value in _pod(basis)["spec"].items() if key in _POD_OF_STANDARD}
    if basis.sample is not None:
        pod["securityContext"] = group()
    strategy = servers(basis)["spec"]["strategy"]
    runtime = [
        _add("/spec/containers/0/lifecycle", container["lifecycle"]),
        _add(
            "/spec/containers/0/ports",
            ExplainedValue(
                container["ports"],
                "KServe's Service and route know gRPC by the name of its port; without names it "
                "opens HTTP alone",
            ),
        ),
    ]
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": options.name,
            "annotations": {
                _MODE: ExplainedValue(
                    "Standard",
                    "before KServe 0.16 this was called RawDeployment. canaryTrafficPercent does "
                    "nothing here, and says so nowhere (issue 5335): 0.20 has spec.canary, which "
                    "names a second predictor; overlays/knative splits by percent",
                ),
                "serving.kserve.io/autoscalerClass": ExplainedValue(
                    "external", "the ScaledObject beside this file scales, as without KServe"
                ),
            },
        },
        "spec": {"predictor": {**pod, "deploymentStrategy": {"type": "RollingUpdate", **strategy}}},
    }
    scaled = basis.scaled()
    scaled["spec"]["scaleTargetRef"] = {
        "name": ExplainedValue(options.workload, "the Deployment that KServe makes")
    }
    return {
        "kustomization.yaml": _kustomization(
            basis, ["../../base", "network-policy.yaml", "scaled-object.yaml"]
        ),
        "runtime.yaml": runtime,
        "service.yaml": service,
        "network-policy.yaml": servers_policy(options, gateway_askers(options, GATEWAY_NAMESPACE)),
        "scaled-object.yaml": scaled,
    }


def _knative(basis: Deployed) -> dict[str, Any]:
    """KServe makes a Knative service: it scales itself, and splits requests between builds."""
    options = basis.options
    grpc = PORTS["grpc"]
    rate, at_once = math.floor(float(basis.sizes.threshold_per_s.value)), basis.requests_at_once
    runtime = [
        _add(
            "/spec/containers/0/ports",
            [
                {
                    "name": ExplainedValue(
                        "h2c", "Knative opens one port, and knows gRPC by this name"
                    ),
                    "containerPort": grpc,
                }
            ],
        )
    ]
    predictor: dict[str, Any] = {
        "minReplicas": basis.sizes.fewest,
        "maxReplicas": basis.sizes.most,
        "timeout": ExplainedValue(
            basis.sizes.grace_s.value,
            "Knative's limit of a request, and the grace of a pod: it takes no other, no preStop "
            f"and no spread. {basis.sizes.grace_s.reason}",
        ),
    }
    if basis.sample is not None:
        fs_group = group()["fsGroup"]
        predictor["securityContext"] = {
            "fsGroup": ExplainedValue(
                fs_group.value,
                f"{fs_group.reason}. Knative takes no fsGroupChangePolicy, and this and a volume "
                "that is written to only where its config-features have "
                "kubernetes.podspec-securitycontext and -persistent-volume-write",
            )
        }
    if at_once is not None:
        predictor["scaleMetric"] = "concurrency"
        predictor["scaleTarget"] = at_once
    elif rate >= 1:
        predictor["scaleMetric"] = "rps"
        predictor["scaleTarget"] = ExplainedValue(rate, basis.sizes.threshold_per_s.reason)
    if options.canary_percent is not None:
        predictor["canaryTrafficPercent"] = ExplainedValue(
            options.canary_percent,
            "--canary-percent: the last build that was rolled out whole keeps the rest. Without "
            "it the new build gets all; 0 goes back",
        )
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": options.name,
            "annotations": {
                _MODE: ExplainedValue(
                    "Serverless", "Knative; KServe 0.16 and later take that name, too"
                ),
                "autoscaling.knative.dev/target-utilization-percentage": ExplainedValue(
                    "100", "the headroom is in scaleTarget; Knative would take another 30 % off"
                ),
            },
        },
        "spec": {"predictor": predictor},
    }
    monitor = [
        {"op": "remove", "path": "/spec/podMetricsEndpoints/0/port"},
        _add(
            "/spec/podMetricsEndpoints/0/portNumber",
            ExplainedValue(
                PORTS["metrics"], "the container names no port for it: Knative allows one"
            ),
        ),
    ]
    made = _kustomization(basis, ["../../base"])
    made["patches"].append({"target": {"kind": "PodMonitor"}, "path": "pod-monitor.yaml"})
    return {
        "kustomization.yaml": made,
        "runtime.yaml": runtime,
        "service.yaml": service,
        "pod-monitor.yaml": monitor,
    }


def _kustomization(basis: Deployed, resources: list[str]) -> dict[str, Any]:
    return {
        **KUSTOMIZATION,
        "namespace": ExplainedValue(
            basis.options.namespace, "queries and alerts select it, too: change it with --namespace"
        ),
        "resources": resources,
        "patches": [
            {"target": {"kind": "ServingRuntime"}, "path": "runtime.yaml"},
            {"path": "service.yaml"},
        ],
    }


def _add(path: str, value: Any) -> dict[str, Any]:
    """A step of a JSON patch: Kustomize would replace the lists of a resource that it knows not."""
    return {"op": "add", "path": path, "value": value}
