"""The pods of a pipeline and how they are reached: Deployment, Service, budget, network."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.container.health import COMMAND
from triptych.container.settings import read_settings
from triptych.deploy.numbers import PROBE_FAILURES, PROBE_S, PROBE_TIMEOUT_S, Sizes
from triptych.deploy.options import DeployOptions

CONTAINER = "triton"
USER = 1000
"""NVIDIA's images call this user triton-server, and serve.Dockerfile ends as it."""

_IMAGE = read_settings({})
PORTS = {"http": _IMAGE.http_port, "grpc": _IMAGE.grpc_port, "metrics": _IMAGE.metrics_port}
"""As the image listens."""
PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c"}
"""Of the ports that clients ask."""

_LIVE_S, _LIVE_FAILURES = 10, 3
_START_PROBE_S = 5


def labels(options: DeployOptions, name: str | None = None) -> dict[str, str]:
    """What selects pods, the servers' or those of `name`; a Deployment demands that it stays."""
    return {"app.kubernetes.io/name": name or options.name, "app.kubernetes.io/part-of": "triptych"}


def metadata(options: DeployOptions, name: str | None = None) -> dict[str, Any]:
    return {"name": name or options.name, "labels": labels(options, name)}


def deployment(options: DeployOptions, sizes: Sizes, version: str) -> dict[str, Any]:
    """The Deployment, without what differs between a CPU and a GPU; `version` of the repository."""
    pod = {
        "metadata": {"labels": {**labels(options), "app.kubernetes.io/version": version}},
        "spec": {
            **isolated(labels(options), USER),
            "terminationGracePeriodSeconds": sizes.grace_s,
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
                "maxUnavailable": ExplainedValue(
                    0, "a new replica answers before an old one goes: on GPUs this takes a free one"
                ),
            }
        },
        "progressDeadlineSeconds": ExplainedValue(
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


def service(options: DeployOptions, selected: dict[str, str]) -> dict[str, Any]:
    """Where clients ask: one address for pods of these labels, which balance what they get."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options),
        "spec": {"selector": selected, "ports": _service_ports()},
    }


def headless_service(options: DeployOptions, name: str) -> dict[str, Any]:
    """The addresses of the replicas, for who balances over them."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels(options)},
        "spec": {
            "clusterIP": ExplainedValue(
                "None",
                "gRPC keeps one connection open: behind one address it would stay on one replica. "
                "The proxy balances over all of them",
            ),
            "selector": labels(options),
            "ports": _service_ports(),
        },
    }


def disruption_budget(options: DeployOptions, name: str | None = None) -> dict[str, Any]:
    """Of the servers, or of the pods of `name`."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(options, name),
        "spec": {
            "maxUnavailable": ExplainedValue(1, "nodes are drained one replica at a time"),
            "unhealthyPodEvictionPolicy": ExplainedValue(
                "AlwaysAllow", "a replica that never got ready must not hold up a drain"
            ),
            "selector": {"matchLabels": labels(options, name)},
        },
    }


def network_policy(
    options: DeployOptions, askers: ExplainedValue, egress: ExplainedValue, name: str | None = None
) -> dict[str, Any]:
    """Who may ask the servers, or pods of `name`, and whom they ask; Prometheus sees metrics."""
    ingress = [
        {"from": askers, "ports": [{"port": PORTS["http"]}, {"port": PORTS["grpc"]}]},
        metrics_ingress(options),
    ]
    return closed_policy(options, name, ingress=ingress, egress=egress)


def closed_policy(
    options: DeployOptions, name: str | None = None, **rules: object
) -> dict[str, Any]:
    """Pods of `name`, or the servers: what no rule (``ingress``, ``egress``) lets in is closed."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(options, name),
        "spec": {
            "podSelector": {"matchLabels": labels(options, name)},
            "policyTypes": ["Ingress", "Egress"],
            **rules,
        },
    }


def metrics_ingress(options: DeployOptions) -> dict[str, Any]:
    """The rule of a NetworkPolicy by which Prometheus sees the metrics."""
    namespace = options.monitoring_namespace
    scraper = {"namespaceSelector": {}} if namespace is None else pods_of(namespace)
    return {
        "from": ExplainedValue(
            [scraper],
            "the metrics page has no key: for Prometheus only, where its namespace is "
            "known by its address",
        ),
        "ports": [{"port": PORTS["metrics"]}],
    }


def servers_policy(options: DeployOptions, askers: ExplainedValue) -> dict[str, Any]:
    """The servers' own: they call nobody."""
    nobody = ExplainedValue([], "a replica calls nobody; a collector of traces must be let in")
    return network_policy(options, askers, nobody)


def gateway_askers(options: DeployOptions, namespace: str) -> ExplainedValue:
    """Who asks servers behind a gateway of a namespace."""
    peers: list[dict[str, Any]] = [{"podSelector": {}}]
    if namespace != options.namespace:
        peers.append(pods_of(namespace))
    return ExplainedValue(
        peers,
        "Triton checks nobody's identity: only this namespace and the gateway's may ask; a gateway "
        "whose proxies run in another one must be let in",
    )


def _container(options: DeployOptions, sizes: Sizes) -> dict[str, Any]:
    exec_health = {"exec": {"command": list(COMMAND)}, "timeoutSeconds": PROBE_TIMEOUT_S}
    return {
        "name": CONTAINER,
        "image": options.image,
        "env": [
            {"name": "TRIPTYCH_EXIT_TIMEOUT_S", "value": sizes.exit_timeout_s},
            {
                "name": "TRIPTYCH_CONNECTION_AGE_S",
                "value": ExplainedValue(
                    str(sizes.connection_age_s.value), sizes.connection_age_s.reason
                ),
            },
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "startupProbe": ExplainedValue(
            {
                **exec_health,
                "periodSeconds": _START_PROBE_S,
                "failureThreshold": ExplainedValue(
                    -(-sizes.start_s.value // _START_PROBE_S), sizes.start_s.reason
                ),
            },
            "asks every ensemble a question of its traffic: ready models alone may have dead steps",
        ),
        "readinessProbe": {
            **exec_health,
            "periodSeconds": ExplainedValue(PROBE_S, "as the image's own health check"),
            "failureThreshold": PROBE_FAILURES,
        },
        "livenessProbe": {
            **exec_health,
            "periodSeconds": _LIVE_S,
            "failureThreshold": ExplainedValue(
                _LIVE_FAILURES,
                f"{_LIVE_FAILURES * _LIVE_S} s, longer than until it is taken out of the Service: "
                "for a step that is frozen; after a death the container ends by itself",
            ),
        },
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": ExplainedValue(
                        ["sleep", str(sizes.pre_stop_s.value)], sizes.pre_stop_s.reason
                    )
                }
            }
        },
        "securityContext": restricted(),
        "volumeMounts": [
            {"name": "models", "mountPath": str(_IMAGE.repository), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def models_volume(options: DeployOptions, version: str, name: str = "models") -> dict[str, Any]:
    """The repository of a build, by the start of its lock's hash."""
    reason = (
        f"{version} is the start of the lock's SHA-256: a new build has a new name and rolls out; "
        "the start-up check compares every file with the lock"
    )
    if options.repository_image is not None:
        reference = ExplainedValue(f"{options.repository_image}:{version}", reason)
        return {"name": name, "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    claim = ExplainedValue(f"{options.name}-{version}", reason)
    return {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}


def _volumes(options: DeployOptions, sizes: Sizes, version: str) -> list[dict[str, Any]]:
    return [
        models_volume(options, version),
        {
            "name": "shm",
            "emptyDir": {
                "medium": "Memory",
                "sizeLimit": ExplainedValue(f"{sizes.shm_mib.value}Mi", sizes.shm_mib.reason),
            },
        },
        {
            "name": "tmp",
            "emptyDir": {
                "sizeLimit": ExplainedValue(f"{sizes.tmp_mib.value}Mi", sizes.tmp_mib.reason)
            },
        },
    ]


def restricted() -> dict[str, Any]:
    """What a container may not do."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _service_ports() -> list[dict[str, Any]]:
    return [
        {"name": name, "port": PORTS[name], "targetPort": name, "appProtocol": protocol}
        for name, protocol in PROTOCOLS.items()
    ]


def pods_of(namespace: str) -> dict[str, Any]:
    """All pods of a namespace, as a NetworkPolicy selects them."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def isolated(selected: dict[str, str], user: int) -> dict[str, Any]:
    """Of a pod with these labels: a user without rights, no access to the cluster, spread out."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            _spread(selected, "kubernetes.io/hostname"),
            _spread(selected, "topology.kubernetes.io/zone"),
        ],
    }


def _spread(selected: dict[str, str], key: str) -> dict[str, Any]:
    """Pods of these labels on different nodes or zones, where there is room."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": ExplainedValue(
            "ScheduleAnyway", "a replica on a full node is better than none under load"
        ),
        "labelSelector": {"matchLabels": selected},
    }
