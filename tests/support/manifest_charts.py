"""Mistakes of public charts for Triton: what each writes, and the checks that must say so.

They are modeled by hand on the charts, in their own values, as far as the mistakes go.
"""

from __future__ import annotations

K8S_ONPREM = """
# After NVIDIA's deploy/k8s-onprem, with the HPA of an API that is gone and no startup probe.
apiVersion: apps/v1
kind: Deployment
metadata: {name: triton}
spec:
  replicas: 1
  selector: {matchLabels: {app: triton}}
  template:
    metadata: {labels: {app: triton}}
    spec:
      securityContext: {runAsUser: 1000, fsGroup: 1000}
      containers:
      - name: triton
        image: nvcr.example/nvidia/tritonserver:21.10-py3
        args: [tritonserver, --model-repository=/models]
        livenessProbe: {httpGet: {path: /v2/health/live, port: http}}
        readinessProbe: {httpGet: {path: /v2/health/ready, port: http}}
---
apiVersion: autoscaling/v2beta2
kind: HorizontalPodAutoscaler
metadata: {name: triton-hpa}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: triton}
  metrics:
  - type: Pods
    pods: {metric: {name: avg_time_queue_us}, target: {type: AverageValue, averageValue: 50}}
---
apiVersion: v1
kind: Service
metadata: {name: triton}
spec:
  type: LoadBalancer
  selector: {app: triton}
  ports: [{name: http, port: 8000}, {name: grpc, port: 8001}, {name: metrics, port: 8002}]
"""
GKE_MARKETPLACE = """
# NVIDIA's deploy/gke-marketplace-app: scales on how busy the accelerator is.
apiVersion: autoscaling/v2beta1
kind: HorizontalPodAutoscaler
metadata: {name: triton-hpa}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: triton}
  metrics:
  - type: External
    external: {metricName: kubernetes.io|container|accelerator|duty_cycle, targetAverageValue: 60}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: triton}
spec:
  replicas: 1
  template:
    metadata: {labels: {app: triton}}
    spec:
      containers:
      - name: triton
        image: tritonserver:21.05-py3
        args: [tritonserver, --model-store=/models, --strict-model-config=true]
        livenessProbe: {httpGet: {path: /v2/health/live, port: http}}
        readinessProbe: {httpGet: {path: /v2/health/ready, port: http}}
"""
SUPERSONIC = """
# SuperSONIC: words after the script of sh -c, 60 s of grace for 60 s of sleep and 60 of exit.
apiVersion: apps/v1
kind: Deployment
metadata: {name: sonic}
spec:
  replicas: 1
  template:
    metadata: {labels: {app: sonic}}
    spec:
      terminationGracePeriodSeconds: 60
      containers:
      - name: triton
        image: nvcr.example/nvidia/tritonserver:26.04-py3-min
        command: [/bin/sh, -c]
        args: ["/opt/tritonserver/bin/tritonserver --model-repository=/tmp/ --exit-timeout-secs=60"]
        startupProbe: {httpGet: {path: /v2/health/ready, port: http}}
        readinessProbe:
          exec:
            command: [/bin/sh, -c, "curl -sf http://localhost:8000/v2/health/ready > /dev/null"]
        lifecycle:
          preStop: {exec: {command: [/bin/sh, -c, touch, /tmp/shutdown;, sleep 60]}}
        resources: {limits: {memory: 2G}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: sonic-keda-so}
spec:
  scaleTargetRef: {name: sonic, kind: Deployment}
  triggers:
  - type: prometheus
    metricType: Value
    metadata:
      threshold: "100"
      query: |-
        sum by (release) (rate(nv_inference_queue_duration_us{release="sonic"}[30s]))
        / sum by (release) ((rate(nv_inference_exec_count{release="sonic"}[30s]) * 1000) + 0.001)
"""
KSERVE = """
# KServe's own runtime of 0.20, and a canary that Standard mode knows nothing of.
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: kserve-tritonserver}
spec:
  supportedModelFormats: [{name: triton, version: "2"}]
  containers:
  - name: kserve-container
    image: tritonserver:23.05-py3
    args: [tritonserver, --model-store=/mnt/models, --grpc-port=9000, --http-port=8080]
    securityContext:
      {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    resources: {limits: {cpu: "1", memory: 2Gi}}
---
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: triton
  annotations: {serving.kserve.io/deploymentMode: RawDeployment}
spec:
  predictor:
    canaryTrafficPercent: 10
    model: {modelFormat: {name: triton}, runtime: kserve-tritonserver}
"""
COMPOSE = """
# A server as many run it at first.
services:
  triton:
    image: nvcr.example/nvidia/tritonserver
    command: tritonserver --model-repository=/models --model-control-mode=poll
    ports: [8000:8000, 8001:8001]
"""
CHARTS: dict[str, tuple[str, set[str]]] = {
    "k8s-onprem": (
        K8S_ONPREM,
        {
            *("api-version", "startup-probe", "shared-memory", "pre-stop", "grace", "restricted"),
            *("memory-limit", "disruption-budget", "replicas-autoscaled", "balanced", "closed"),
        },
    ),
    "gke-marketplace-app": (
        GKE_MARKETPLACE,
        {
            *("api-version", "startup-probe", "shared-memory", "pre-stop", "grace", "restricted"),
            *("memory-limit", "disruption-budget", "replicas-autoscaled", "scales-on-use"),
        },
    ),
    "SuperSONIC": (
        SUPERSONIC,
        {
            *("pre-stop", "grace", "shared-memory", "restricted", "disruption-budget"),
            *("replicas-autoscaled", "null-values", "fallback", "value-metric", "scales-on-ratio"),
        },
    ),
    "KServe": (
        KSERVE,
        {"readiness-probe", "shared-memory", "pre-stop", "grace", "canary-percent", "grpc-port"},
    ),
    "Compose": (
        COMPOSE,
        {
            *("image-tag", "readiness-probe", "shared-memory", "memory-limit", "grace"),
            *("restricted", "model-control"),
        },
    ),
}
"""Chart to its manifests and the checks that find its mistakes."""
