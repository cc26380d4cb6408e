"""The pods of a pipeline and how they are reached: Deployment, Service, budget, network."""

from __future__ import annotations

from typing import Any

from triptych.container.health import COMMAND
from triptych.container.settings import read_settings
from triptych.deploy.options import Options
from triptych.deploy.sizing import PROBE_FAILURES, PROBE_S, PROBE_TIMEOUT_S, Sizes
from triptych.fleet.reasons import Because

CONTAINER = "triton"
USER = 1000
"""NVIDIA's images call this user triton-server, and serve.Dockerfile ends as it."""

_LIVE_S, _LIVE_FAILURES = 10, 3
_START_PROBE_S = 5
_TMP_MIB = 64


def labels(options: Options) -> dict[str, str]:
    """What selects the pods; it never changes, as a Deployment demands."""
    return {"app.kubernetes.io/name": options.name, "app.kubernetes.io/part-of": "triptych"}


def metadata(options: Options, **more: Any) -> dict[str, Any]:
    return {"name": options.name, "labels": labels(options), **more}


def deployment(options: Options, sizes: Sizes, version: str) -> dict[str, Any]:
    """The Deployment, without what differs between a CPU and a GPU; `version` of the repository."""
    pod = {
        "metadata": {"labels": {**labels(options), "app.kubernetes.io/version": version}},
        "spec": {
            # Nothing in the pod talks to the cluster.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": sizes.grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                _spread(options, "kubernetes.io/hostname"),
                _spread(options, "topology.kubernetes.io/zone"),
            ],
            "containers": [_container(options, sizes)],
            "volumes": _volumes(options, sizes, version),
        },
    }
    spec = {
        # No `replicas`: the autoscaler owns them, and every apply would reset them.
        "selector": {"matchLabels": labels(options)},
        "strategy": {
            "rollingUpdate": {
                "maxSurge": 1,
                "maxUnavailable": Because(
                    0, "a new replica answers before an old one goes: on GPUs this takes a free one"
                ),
            }
        },
        "progressDeadlineSeconds": Because(
            2 * sizes.start_s.value,
            "twice what a start may take, for scheduling and images",
        ),
        "template": pod,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options),
        "spec": spec,
    }


def service(options: Options) -> dict[str, Any]:
    """A headless Service: clients get the address of each ready replica and balance themselves."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options),
        "spec": {
            "clusterIP": Because(
                "None",
                "gRPC keeps one connection open: behind one address it would stay on one replica. "
                "Clients balance over dns:/// (round_robin), or a proxy does",
            ),
            "selector": labels(options),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "appProtocol": protocol}
                for name, port, protocol in _ports()
                if name != "metrics"
            ],
        },
    }


def disruption_budget(options: Options) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(options),
        "spec": {
            "maxUnavailable": Because(1, "nodes are drained one replica at a time"),
            "unhealthyPodEvictionPolicy": Because(
                "AlwaysAllow", "a replica that never got ready must not hold up a drain"
            ),
            "selector": {"matchLabels": labels(options)},
        },
    }


def network_policy(options: Options) -> dict[str, Any]:
    ports = {name: port for name, port, _ in _ports()}
    namespace = options.monitoring_namespace
    scraper: dict[str, Any] = {"namespaceSelector": {}}
    if namespace is not None:
        scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(options),
        "spec": {
            "podSelector": {"matchLabels": labels(options)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": Because(
                        [{"podSelector": {}}],
                        "Triton checks nobody's identity: only this namespace may ask, where the "
                        "gateway belongs",
                    ),
                    "ports": [{"port": ports["http"]}, {"port": ports["grpc"]}],
                },
                {
                    "from": Because(
                        [scraper],
                        "the metrics page has no key: for Prometheus only, where its namespace is "
                        "known by its address",
                    ),
                    "ports": [{"port": ports["metrics"]}],
                },
            ],
            "egress": Because([], "a replica calls nobody; a collector of traces must be let in"),
        },
    }


def _container(options: Options, sizes: Sizes) -> dict[str, Any]:
    settings = read_settings({})
    exec_health = {"exec": {"command": list(COMMAND)}, "timeoutSeconds": PROBE_TIMEOUT_S}
    return {
        "name": CONTAINER,
        "image": options.image,
        "env": [
            {"name": "TRIPTYCH_EXIT_TIMEOUT_S", "value": sizes.exit_timeout_s},
            {
                "name": "TRIPTYCH_CONNECTION_AGE_S",
                "value": Because(str(sizes.connection_age_s.value), sizes.connection_age_s.reason),
            },
        ],
        "ports": [{"name": name, "containerPort": port} for name, port, _ in _ports()],
        "startupProbe": Because(
            {
                **exec_health,
                "periodSeconds": _START_PROBE_S,
                "failureThreshold": Because(
                    -(-sizes.start_s.value // _START_PROBE_S), sizes.start_s.reason
                ),
            },
            "asks every ensemble a question of its traffic: ready models alone may have dead steps",
        ),
        "readinessProbe": {
            **exec_health,
            "periodSeconds": Because(PROBE_S, "as the image's own health check"),
            "failureThreshold": PROBE_FAILURES,
        },
        "livenessProbe": {
            **exec_health,
            "periodSeconds": _LIVE_S,
            "failureThreshold": Because(
                _LIVE_FAILURES,
                f"{_LIVE_FAILURES * _LIVE_S} s, longer than until it is taken out of the Service: "
                "for a step that is frozen; after a death the container ends by itself",
            ),
        },
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": Because(
                        ["sleep", str(sizes.pre_stop_s.value)], sizes.pre_stop_s.reason
                    )
                }
            }
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": str(settings.repository), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _volumes(options: Options, sizes: Sizes, version: str) -> list[dict[str, Any]]:
    reason = (
        f"{version} is the start of the lock's SHA-256: a new build has a new name and rolls out; "
        "the start-up check compares every file with the lock"
    )
    models: dict[str, Any]
    if options.models is not None:
        reference = Because(f"{options.models}:{version}", reason)
        models = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    else:
        claim = Because(f"{options.name}-{version}", reason)
        models = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return [
        {"name": "models", **models},
        {
            "name": "shm",
            "emptyDir": {
                "medium": "Memory",
                "sizeLimit": Because(f"{sizes.shm_mib.value}Mi", sizes.shm_mib.reason),
            },
        },
        {
            "name": "tmp",
            "emptyDir": {
                "sizeLimit": Because(f"{_TMP_MIB}Mi", "the steps' scratch; nothing is kept there")
            },
        },
    ]


def _ports() -> list[tuple[str, int, str]]:
    """Name, number and protocol of each, as the image listens."""
    settings = read_settings({})
    return [
        ("http", settings.http_port, "http"),
        ("grpc", settings.grpc_port, "kubernetes.io/h2c"),
        ("metrics", settings.metrics_port, "http"),
    ]


def _spread(options: Options, key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": Because(
            "ScheduleAnyway", "a replica on a full node is better than none under load"
        ),
        "labelSelector": {"matchLabels": labels(options)},
    }
