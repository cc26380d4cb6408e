"""Manifests for Triton: one that is fine, and ways to break it, each with the check that tells."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import yaml

Objects = list[dict[str, Any]]
FINE = list(
    yaml.safe_load_all("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: triton}
spec:
  selector: {matchLabels: {app: triton}}
  template:
    metadata: {labels: {app: triton}}
    spec:
      terminationGracePeriodSeconds: 60
      containers:
      - name: server
        image: tritonserver:26.08-py3
        args: [tritonserver, --model-repository=/models]
        startupProbe:
          httpGet: {path: /v2/health/ready, port: 8000}
          timeoutSeconds: 5
          failureThreshold: 30
        readinessProbe: {httpGet: {path: /v2/health/ready, port: 8000}, timeoutSeconds: 5}
        livenessProbe: {httpGet: {path: /v2/health/live, port: 8000}}
        lifecycle: {preStop: {exec: {command: [sleep, "10"]}}}
        resources: {limits: {memory: 4Gi}}
        securityContext:
          {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}
      volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]
---
apiVersion: v1
kind: Service
metadata: {name: triton}
spec: {clusterIP: None, selector: {app: triton}, ports: [{name: grpc, port: 8001}]}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: triton}
spec: {maxUnavailable: 1, selector: {matchLabels: {app: triton}}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: triton}
spec:
  scaleTargetRef: {name: triton}
  fallback: {failureThreshold: 3, replicas: 2}
  triggers:
  - type: prometheus
    metricType: AverageValue
    metadata:
      query: sum(rate(nv_inference_request_success{model="m"}[1m]))
      threshold: "50"
      ignoreNullValues: "false"
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: triton}
spec: {groups: [{name: triton, rules: [{alert: Slow, expr: nv_inference_request_summary_us > 1}]}]}
""")
)


def pod(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects[0]["spec"]["template"]["spec"]
    return spec


def container(objects: Objects) -> dict[str, Any]:
    first: dict[str, Any] = pod(objects)["containers"][0]
    return first


def trigger(objects: Objects) -> dict[str, Any]:
    first: dict[str, Any] = objects[3]["spec"]["triggers"][0]
    return first


def scaled_by(metric: str) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "triton-hpa"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "triton"},
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": metric}}}],
        },
    }


def kserve(objects: Objects, **predictor: Any) -> None:
    """The same server as a predictor of KServe."""
    first = container(objects)
    model = {**first, "modelFormat": {"name": "triton"}, "runtime": "own"}
    runtime = {"name": "kserve-container", "image": first["image"]}
    inner = {key: value for key, value in pod(objects).items() if key != "containers"}
    objects[:] = [
        {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "ServingRuntime",
            "metadata": {"name": "own"},
            "spec": {"containers": [runtime]},
        },
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": "triton"},
            "spec": {"predictor": {**inner, "model": model, **predictor}},
        },
    ]


def _set(path: Callable[[Objects], dict[str, Any]], **fields: Any) -> Callable[[Objects], None]:
    return lambda objects: path(objects).update(fields)


def _without(path: Callable[[Objects], dict[str, Any]], name: str) -> Callable[[Objects], None]:
    return lambda objects: path(objects).pop(name)


def _pre_stop(*command: str) -> Callable[[Objects], None]:
    return _set(container, lifecycle={"preStop": {"exec": {"command": list(command)}}})


def _query(text: str) -> Callable[[Objects], None]:
    return lambda objects: trigger(objects)["metadata"].update(query=text)


def _rule(text: str) -> Callable[[Objects], None]:
    return lambda objects: objects[4]["spec"]["groups"][0]["rules"][0].update(expr=text)


def _spec(number: int, **fields: Any) -> Callable[[Objects], None]:
    return lambda objects: objects[number]["spec"].update(fields)


def _rename(objects: Objects, old: str, new: str) -> None:
    container(objects)[new] = container(objects).pop(old)


BROKEN: list[tuple[str, Callable[[Objects], Any], str]] = [
    ("serves-triton", lambda o: o.__delitem__(0), "none with an image or command"),
    (
        "api-version",
        lambda o: o[2].update(apiVersion="policy/v1beta1"),
        "removed in Kubernetes 1.25",
    ),
    ("field-known", lambda o: _rename(o, "readinessProbe", "readynessProbe"), "`readinessProbe`?"),
    ("field-known", _set(pod, terminationGracePeriod=90), "`terminationGracePeriodSeconds`?"),
    (
        "field-known",
        lambda o: container(o)["startupProbe"].update(failureTreshold=3),
        "`failureThreshold`?",
    ),
    ("image-tag", _set(container, image="host:5000/tritonserver"), "host:5000/tritonserver"),
    ("image-tag", _set(container, image="tritonserver:latest"), "tritonserver:latest"),
    ("startup-probe", _without(container, "startupProbe"), "no startupProbe"),
    ("readiness-probe", _without(container, "readinessProbe"), "no readinessProbe"),
    ("readiness-probe", _set(container, readinessProbe={"tcpSocket": {"port": 8000}}), "tcpSocket"),
    (
        "readiness-probe",
        _set(container, readinessProbe={"httpGet": {"path": "/v2/health/live", "port": 8000}}),
        "/v2/health/live",
    ),
    (
        "liveness-probe",
        _set(container, livenessProbe={"httpGet": {"path": "/v2/models/m/ready", "port": 8000}}),
        "/v2/models/m/ready",
    ),
    (
        "liveness-probe",
        _set(
            container,
            livenessProbe={"exec": {"command": ["curl", "-f", "localhost:8000/v2/health/ready"]}},
        ),
        "/v2/health/ready",
    ),
    (
        "probe-timeout",
        _set(
            container,
            readinessProbe={"exec": {"command": ["python3", "-m", "triptych.container.health"]}},
        ),
        "timeoutSeconds of readinessProbe: 1",
    ),
    ("shared-memory", _without(pod, "volumes"), "no emptyDir of medium Memory"),
    ("shared-memory", _set(pod, volumes=[{"name": "shm", "emptyDir": {}}]), "no emptyDir"),
    (
        "shared-memory",
        _set(pod, volumes=[{"name": "shm", "emptyDir": {"medium": "Memory"}}]),
        "without sizeLimit",
    ),
    (
        "shared-memory-measured",
        _set(
            pod, volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}}]
        ),
        "take 256 MiB",
    ),
    ("memory-limit", _without(container, "resources"), "no limit of memory"),
    ("memory-measured", _set(container, resources={"limits": {"memory": "512Mi"}}), "it used 701"),
    (
        "engine-gpu",
        _set(pod, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-L4"}),
        "the engine is of NVIDIA-H200",
    ),
    ("engine-gpu", _without(pod, "nodeSelector"), "not selected"),
    ("pre-stop", _without(container, "lifecycle"), "no preStop"),
    ("pre-stop", _pre_stop("sh", "-c"), "nothing to run"),
    ("grace", _without(pod, "terminationGracePeriodSeconds"), "30 s; preStop 10 s"),
    (
        "grace",
        lambda o: container(o)["args"].append("--exit-timeout-secs=120"),
        "requests in flight 120 s",
    ),
    (
        "grace",
        _set(container, env=[{"name": "TRIPTYCH_EXIT_TIMEOUT_S", "value": "50"}]),
        "requests in flight 50 s",
    ),
    ("restricted", _without(container, "securityContext"), "runAsNonRoot: true, allowPriv"),
    (
        "model-control",
        lambda o: container(o)["args"].append("--model-control-mode=poll"),
        "--model-control-mode=poll",
    ),
    ("recreated", _spec(0, strategy={"type": "Recreate"}), "strategy: Recreate"),
    ("disruption-budget", lambda o: o.__delitem__(2), "no PodDisruptionBudget"),
    ("replicas-autoscaled", _spec(0, replicas=3), "replicas: 3 of Deployment triton"),
    ("one-autoscaler", lambda o: o.append(scaled_by("any")), "HorizontalPodAutoscaler triton-hpa"),
    (
        "null-values",
        lambda o: trigger(o)["metadata"].pop("ignoreNullValues"),
        "not set, which is true",
    ),
    ("fallback", lambda o: o[3]["spec"].pop("fallback"), "no fallback"),
    (
        "value-metric",
        lambda o: (
            trigger(o).update(metricType="Value"),
            _query("max(nv_inference_queue_summary_us)")(o),
        ),
        "metricType: Value",
    ),
    ("scales-on-use", _query("avg(DCGM_FI_DEV_GPU_UTIL)"), "DCGM_FI_DEV_GPU_UTIL"),
    ("scales-on-use", _query("avg(nv_gpu_utilization)"), "nv_gpu_utilization"),
    (
        "scales-on-ratio",
        _query(
            "rate(nv_inference_queue_duration_us[1m])"
            " / rate(nv_inference_compute_infer_duration_us[1m])"
        ),
        "a queue time over",
    ),
    (
        "metric-known",
        _rule("rate(nv_inference_request_sucess[5m]) > 1"),
        "nv_inference_request_sucess",
    ),
    ("metric-known", _rule("nv_inference_request_duration_us_bucket > 1"), "_bucket"),
    (
        "histogram-release",
        lambda o: (
            _rule("rate(nv_inference_first_response_histogram_ms_bucket[5m]) > 1")(o),
            container(o).update(image="tritonserver:25.12-py3"),
        ),
        "the image is 25.12",
    ),
    ("balanced", lambda o: o[1]["spec"].pop("clusterIP"), "one address for the gRPC port"),
    ("closed", _spec(1, type="LoadBalancer"), "type: LoadBalancer"),
    ("canary-percent", lambda o: kserve(o, canaryTrafficPercent=10), "deploymentMode not set"),
    ("grpc-port", kserve, "ports: none"),
]
"""Check, what breaks it, what is said."""


def text_of(objects: Objects) -> str:
    return yaml.safe_dump_all(objects)


def fine() -> Objects:
    return copy.deepcopy(FINE)
