"""Envoy in front of the replicas: the proxy of `serve --replicas`, as the objects of a cluster.

It knows the replicas by DNS, all ready addresses of a headless Service. The rate that scales
them is taken here: what reaches no server is in it, too.
"""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.container.sizes import largest_request_mib
from triptych.deploy.basis import Deployed
from triptych.deploy.candidate import candidate_name, mirror
from triptych.deploy.monitoring import pod_monitor
from triptych.deploy.numbers import PRE_STOP_S
from triptych.deploy.options import DeployOptions
from triptych.deploy.workload import (
    PORTS,
    disruption_budget,
    headless_service,
    isolated,
    labels,
    metadata,
    network_policy,
    restricted,
    servers_policy,
    service,
)
from triptych.serving.fleet.envoy import EndpointNames, Listen, bootstrap, proxy_settings

ADMIN_PORT = 9901
CONFIG_FOLDER = "/etc/envoy-config"
USER = 101
"""Envoy's images call this user envoy."""

_REPLICAS = 2
_CPU_MILLI, _MEMORY_MIB = 500, 128
_MAX_AT_ONCE = 8
_SETTLE_S = 1
_MARGIN_S = 5
# What ``stats`` of the admin page calls requests under way, of both protocols.
_UNDER_WAY = "^http[.](grpc|http)[.]downstream_rq_active"


def replicas_name(options: DeployOptions) -> str:
    """Of the headless Service that tells Envoy the addresses of the replicas."""
    return f"{options.name}-replicas"


def proxy_name(options: DeployOptions) -> str:
    """Of all objects of the proxy but the Service, which has the pipeline's name."""
    if options.envoy is None:
        raise ValueError("no proxy of its own")
    return options.envoy


def proxy_labels(options: DeployOptions) -> dict[str, str]:
    return labels(options, proxy_name(options))


def configuration(basis: Deployed, host: str) -> Any:
    """Envoy's, with the servers behind every address that `host` resolves to."""
    settings = proxy_settings(
        replicas=basis.sizes.fewest.value,
        max_request_mib=largest_request_mib(basis.repository),
        limits_ms=basis.limits_ms,
        affinity=basis.options.affinity_header,
    )
    listen = Listen("0.0.0.0", PORTS["grpc"], PORTS["http"], PORTS["metrics"], ADMIN_PORT)
    replicas = EndpointNames(host, PORTS["grpc"], PORTS["http"])
    return bootstrap(settings, listen, replicas, mirror(basis.options))


def arguments(workers: int) -> list[str]:
    """Of the image, with so many threads."""
    config = f"{CONFIG_FOLDER}/envoy.yaml"
    return ["--config-path", config, "--disable-hot-restart", "--concurrency", str(workers)]


def drain_script(settle_s: int, most_s: int) -> str:
    """For a bash beside Envoy: let its clients go, and return once nothing is under way.

    Its health check fails from the first line on, so that answers tell clients to connect anew.
    The image holds no curl.
    """
    return (
        "ask() { exec 3<>/dev/tcp/127.0.0.1/" + str(ADMIN_PORT) + " && "
        r"printf '%s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'"
        ' "$1" >&3 && cat <&3; }\n'
        "ask 'POST /healthcheck/fail'\n"
        f"sleep {settle_s}\n"
        f"for _ in $(seq {most_s}); do\n"
        f"  ask 'GET /stats?filter={_UNDER_WAY}' | grep -q ': [1-9]' || exit 0\n"
        f"  sleep {_SETTLE_S}\n"
        "done"
    )


def ready_script() -> str:
    """For a bash beside Envoy: whether it takes requests."""
    return (
        f"exec 3<>/dev/tcp/127.0.0.1/{ADMIN_PORT} && "
        r"printf 'GET /ready HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' >&3 && "
        "grep -q LIVE <&3"
    )


def memory_limit(basis: Deployed, unit: str) -> ExplainedValue:
    """Of a proxy; `unit` is what MiB are called."""
    request_mib = largest_request_mib(basis.repository)
    return ExplainedValue(
        f"{_MEMORY_MIB + _MAX_AT_ONCE * request_mib}{unit}",
        f"not measured: {_MEMORY_MIB} MiB, and {_MAX_AT_ONCE} requests of {request_mib} MiB, "
        "the largest, which are held until they are answered",
    )


def deployment(basis: Deployed) -> dict[str, Any]:
    """The proxies; their number is fixed, they need little."""
    options = basis.options
    exit_s = int(basis.sizes.exit_timeout_s.value)
    memory = memory_limit(basis, "Mi")
    ready = {"httpGet": {"path": "/ready", "port": "metrics"}}
    container = {
        "name": "envoy",
        "image": options.envoy_image,
        "args": arguments(workers=2),
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "startupProbe": {**ready, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {
            **ready,
            "periodSeconds": 2,
            "failureThreshold": ExplainedValue(
                2, "not ready while it drains, too: no client comes anew"
            ),
        },
        "livenessProbe": {
            "tcpSocket": {"port": "metrics"},
            "periodSeconds": 10,
            "failureThreshold": ExplainedValue(
                3, "by its port: /ready says no while it drains, and it must not end for that"
            ),
        },
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": [
                        "bash",
                        "-c",
                        ExplainedValue(
                            drain_script(PRE_STOP_S, exit_s),
                            f"{PRE_STOP_S} s in which clients are told to connect anew, then until "
                            f"nothing is under way, {exit_s} s at most, as the servers' exit "
                            "timeout. On SIGTERM Envoy ends at once",
                        ),
                    ]
                }
            }
        },
        "resources": {
            "requests": {
                "cpu": ExplainedValue(f"{_CPU_MILLI}m", "not measured: watch it, and set it here"),
                "memory": memory,
            },
            "limits": {"memory": memory.value},
        },
        "securityContext": restricted(),
        "volumeMounts": [{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}],
    }
    pod = {
        **isolated(proxy_labels(options), USER),
        "terminationGracePeriodSeconds": ExplainedValue(
            PRE_STOP_S + exit_s * (1 + _SETTLE_S) + _MARGIN_S, "what preStop may take, and a margin"
        ),
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": proxy_name(options)}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options, proxy_name(options)),
        "spec": {
            "replicas": ExplainedValue(
                _REPLICAS, "one may end while the other answers; no autoscaler owns this number"
            ),
            "selector": {"matchLabels": proxy_labels(options)},
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": proxy_labels(options)}, "spec": pod},
        },
    }


def proxy_policy(options: DeployOptions) -> dict[str, Any]:
    """Who asks the proxy, and whom it asks."""
    askers = ExplainedValue(
        [{"podSelector": {}}],
        "nobody's identity is checked: only this namespace may ask, where a gateway belongs",
    )
    asked = [None, *([] if options.mirrored is None else [candidate_name(options)])]
    servers = {
        "to": [{"podSelector": {"matchLabels": labels(options, one)}} for one in asked],
        "ports": [{"port": PORTS["http"]}, {"port": PORTS["grpc"]}],
    }
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    egress = ExplainedValue([servers, names], "the replicas, and DNS, which tells their addresses")
    return network_policy(options, askers, egress, proxy_name(options))


def proxy_monitor(options: DeployOptions) -> dict[str, Any]:
    """Prometheus' view of the proxy, as often as of the servers."""
    monitor = pod_monitor(options)
    spec = {**monitor["spec"], "selector": {"matchLabels": proxy_labels(options)}}
    return {**monitor, "metadata": metadata(options, proxy_name(options)), "spec": spec}


def proxy_askers(options: DeployOptions) -> ExplainedValue:
    """Who may reach the servers."""
    return ExplainedValue(
        [{"podSelector": {"matchLabels": proxy_labels(options)}}],
        "Triton checks nobody's identity, and what went past the proxy would not be counted: the "
        "proxy alone may ask",
    )


def behind_envoy(basis: Deployed) -> dict[str, Any]:
    """All that stands in front of the Deployment: file to document."""
    options = basis.options
    return {
        "service.yaml": service(options, proxy_labels(options)),
        "replicas.yaml": headless_service(options, replicas_name(options)),
        "network-policy.yaml": servers_policy(options, proxy_askers(options)),
        "envoy-deployment.yaml": deployment(basis),
        "envoy-disruption-budget.yaml": disruption_budget(options, proxy_name(options)),
        "envoy-network-policy.yaml": proxy_policy(options),
        "envoy-pod-monitor.yaml": proxy_monitor(options),
    }
