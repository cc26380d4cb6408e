"""`triptych deploy --target kubernetes`: a Kustomize folder of a built pipeline of any task."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.base.cache import CACHE_VARIABLE
from triptych.base.explained import ExplainedValue, render_files, render_yaml
from triptych.container.health import COMMAND
from triptych.container.manifests import largest_request_mib
from triptych.container.settings import read_settings, read_trace
from triptych.deploy.assumptions import core_files_mib
from triptych.deploy.context import DeploymentContext, Manifests
from triptych.deploy.dashboard import Rows, lay_out
from triptych.deploy.envoy import (
    EndpointNames,
    Listen,
    Mirror,
    bootstrap,
    find_tls,
    gateway_port,
    mounts,
    proxy_settings,
)
from triptych.deploy.http_api import http_api_values
from triptych.deploy.metrics import parse_quantile
from triptych.deploy.numbers import (
    POLL_S,
    PRE_STOP_S,
    PROBE_FAILURES,
    PROBE_S,
    PROBE_TIMEOUT_S,
    SCRAPE_S,
    TMP_MIB,
    round_up_mib,
)
from triptych.deploy.options import WATCH_EVERY, DeployOptions
from triptych.deploy.rules import (
    BURNS,
    KV_CACHE_FULL_RATIO,
    MAX_WAITING_RATIO,
    WINDOWS,
    burn_alerts,
    camel,
)

TEMPLATES = Path(__file__).with_name("templates")
APPLY = "kubectl apply -k {}"
USER = 1000
"""User ID of the containers, called triton-server in NVIDIA's images."""
ENVOY_USER = 101
"""User ID of Envoy's containers, called envoy in its images."""
DRAIN_PORT = 9901
CONFIG_FOLDER = "/etc/envoy-config"
SAMPLES = "/samples"
MONITOR_ENVIRONMENT = {
    "HOME": "/tmp",
    CACHE_VARIABLE: f"{SAMPLES}/.cache",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the monitor, which has a read-only file system and no network."""
ON_CALL = "https://on-call.example.com/triptych"
TICKETS = "https://tickets.example.com/triptych"

_IMAGE = read_settings({})
PORTS = {"http": _IMAGE.http_port, "grpc": _IMAGE.grpc_port, "metrics": _IMAGE.metrics_port}
"""Ports of the serving image."""

_MIB = 2**20
_MONITOR_MIB, _MONITOR_CORE_FACTOR = 1024, 4
_SAMPLE_FOLDERS, _SAMPLE_CACHE_MIB = 2, 256
_ENVOY_MIB, _ENVOY_REQUESTS, _HEAP_RATIO = 128, 8, 0.8
_SETTLE_S, _MARGIN_S = 1, 5
_BURN = BURNS[1]
_STEP_PERCENT = 5
# The name of requests in flight, of both protocols, on ``stats`` of Envoy's admin page.
_IN_FLIGHT = "^http[.](grpc|http)[.]downstream_rq_active"


def make_files(c: DeploymentContext) -> Manifests:
    """Return the files of the target."""
    options = c.options
    overlay = f"overlays/{c.placement.overlay}"
    values = template_values(c)
    files = render_files(TEMPLATES / "kubernetes.yaml.j2", **values)
    base = [path.removeprefix("base/") for path in files if path.startswith("base/")]
    files |= render_files(
        TEMPLATES / "kustomization.yaml.j2", **values, resources=base, overlay=overlay
    )
    if options.envoy is not None:
        proxy = envoy_files(c, f"{options.name}-replicas")
        files |= {f"base/{name}": data for name, data in proxy.items()}
    return Manifests({**files, **render_alertmanager()}, c.version, overlay, APPLY)


def labels(name: str) -> dict[str, str]:
    """Return the labels that select the pods of a name; a Deployment cannot change them."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "triptych"}


def template_values(c: DeploymentContext) -> dict[str, Any]:
    """Return the values of the templates of Kubernetes and KServe by name."""
    options, sizes = c.options, c.sizes
    exit_s = int(sizes.exit_timeout_s.value)
    namespace, _, gateway = (options.gateway or "").rpartition("/")
    thresholds = [_BURN.threshold(one.budget) for one in c.objectives]
    monitor = monitor_memory(c)
    peers, peers_reason = _peers(options, namespace)
    tls = find_tls(options, CONFIG_FOLDER)
    dashboard = lay_out(
        options.name,
        f"{c.pipeline} ({options.namespace})",
        f"SLO of {c.pipeline}: {c.slo}",
        render_panels(c),
    )
    return {
        **_base_values(c),
        "metadata": lambda name: {"name": name, "labels": labels(name)},
        "labels": labels,
        "pods_of": _pods_of,
        "ports": PORTS,
        "user": None if options.run_as_user else USER,
        "envoy_user": None if options.run_as_user else ENVOY_USER,
        "health": list(COMMAND),
        "repository": str(_IMAGE.repository),
        "probe_s": PROBE_S,
        "probe_timeout_s": PROBE_TIMEOUT_S,
        "probe_failures": PROBE_FAILURES,
        "scrape_s": SCRAPE_S,
        "poll_s": POLL_S,
        "tmp_mib": TMP_MIB,
        "start_probes": ExplainedValue(-(-sizes.start_s.value // 5), sizes.start_s.reason),
        "sleep": ExplainedValue(["sleep", str(sizes.pre_stop_s.value)], sizes.pre_stop_s.reason),
        "monitor_environment": MONITOR_ENVIRONMENT,
        "monitor_memory": monitor,
        "samples_mib": _samples_mib(c),
        "verdict_memory": _verdict_memory(c, monitor),
        "gateway_name": gateway,
        "gateway_namespace": namespace or options.namespace,
        "peers": peers,
        "peers_reason": peers_reason,
        "proxy": {
            "arguments": envoy_arguments(workers=2),
            "drain": ExplainedValue(
                drain_script(PRE_STOP_S, exit_s),
                f"{PRE_STOP_S} s in which clients are told to reconnect, then until no request is "
                f"in flight, {exit_s} s at most, as the servers' exit timeout. On SIGTERM Envoy "
                "ends at once",
            ),
            "grace_s": PRE_STOP_S + exit_s * (1 + _SETTLE_S) + _MARGIN_S,
            "memory_mib": envoy_memory(c),
        },
        "envoy_mounts": mounts(options),
        "envoy_files": ["envoy.yaml", *(tls.files() if tls else ())],
        "gateway_port": gateway_port(options),
        "http_api": http_api_values(
            c, str(_IMAGE.repository), gateway_port(options) or PORTS["grpc"]
        ),
        "dashboard": json.dumps(dashboard, indent=1),
        "camel": camel,
        "windows": WINDOWS,
        "burns": burn_alerts(c.objectives, c.pipeline, c.slo),
        "max_waiting_ratio": MAX_WAITING_RATIO,
        "burn": _BURN,
        "judged": list(zip(c.objectives, map("{:.6g}".format, thresholds), strict=True)),
        "weights": _weights(thresholds),
    }


def _base_values(c: DeploymentContext) -> dict[str, Any]:
    """Return the values that the dashboard's template also has."""
    return {
        "c": c,
        "o": c.options,
        "s": c.sizes,
        "m": c.metrics,
        "f": c.rule_values,
        "parse_quantile": parse_quantile,
        "watch_every": WATCH_EVERY,
        "kv_cache_full_ratio": KV_CACHE_FULL_RATIO,
    }


def render_scaled_object(c: DeploymentContext) -> object:
    """Return the ScaledObject."""
    return render_yaml(TEMPLATES / "scaled-object.yaml.j2", **template_values(c))


def render_panels(c: DeploymentContext) -> Rows:
    """Return the panels of each row of the dashboard by its title."""
    rows: Rows = render_yaml(TEMPLATES / "dashboard.yaml.j2", **_base_values(c))
    return rows


def render_alertmanager(
    on_call: str = ON_CALL, tickets: str = TICKETS, wait: str = "30s", interval: str = "5m"
) -> dict[str, object]:
    """Return an example of an Alertmanager's configuration by its file name.

    Args:
        on_call: URL of a webhook for alerts of severity ``page``.
        tickets: URL of a webhook for alerts of severity ``ticket``.
        wait: Time in which alerts of a group are collected for the first message.
        interval: Time between messages of a group.
    """
    receivers = {"on-call": on_call, "tickets": tickets}
    return render_files(
        TEMPLATES / "alertmanager.yaml.j2", receivers=receivers, wait=wait, interval=interval
    )


def envoy_files(c: DeploymentContext, host: str) -> dict[str, object]:
    """Return the files of Envoy's configuration, with the servers behind each address of a host."""
    settings = proxy_settings(
        replicas=c.sizes.min_replicas.value,
        max_request_mib=largest_request_mib(c.repository, c.pipeline),
        limits_ms=c.limits_ms,
        affinity=c.options.affinity_header,
        max_heap_mib=ExplainedValue(
            math.floor(_HEAP_RATIO * envoy_memory(c).value),
            f"MiB, {_HEAP_RATIO:.0%} of the container's memory; the rest is for what is no heap",
        ),
    )
    ports = PORTS["grpc"], PORTS["http"], PORTS["metrics"]
    listen = Listen("0.0.0.0", *ports, DRAIN_PORT, gateway_port(c.options))
    mirror = None
    if c.options.mirrored is not None:
        at = EndpointNames(f"{c.options.name}-candidate", PORTS["grpc"], PORTS["http"])
        mirror = Mirror(c.options.mirrored.share, at)
    endpoints = EndpointNames(host, PORTS["grpc"], PORTS["http"])
    trace = read_trace(c.options.server_variables)
    tls = find_tls(c.options, CONFIG_FOLDER)
    configuration = bootstrap(
        settings,
        listen,
        endpoints,
        [c.pipeline],
        mirror,
        tls=tls,
        collector=trace and trace.collector,
    )
    return {"envoy.yaml": configuration, **(tls.files() if tls else {})}


def envoy_arguments(workers: int) -> list[str]:
    """Return the arguments of Envoy's image for a number of threads."""
    config = f"{CONFIG_FOLDER}/envoy.yaml"
    return ["--config-path", config, "--disable-hot-restart", "--concurrency", str(workers)]


def envoy_memory(c: DeploymentContext) -> ExplainedValue:
    """Return the memory limit of Envoy in MiB."""
    request_mib = largest_request_mib(c.repository, c.pipeline)
    return ExplainedValue(
        _ENVOY_MIB + _ENVOY_REQUESTS * request_mib,
        f"not measured: {_ENVOY_MIB} MiB, and {_ENVOY_REQUESTS} requests of {request_mib} MiB, "
        "the largest, which are buffered until they are answered",
    )


def drain_script(settle_s: int, max_s: int) -> str:
    """Return a script for bash beside Envoy that returns once no request is in flight.

    Envoy's health check fails from the first line on, so that its answers tell clients to connect
    again. The image has no curl.
    """
    return (
        "ask() { exec 3<>/dev/tcp/127.0.0.1/" + str(DRAIN_PORT) + " && "
        r"printf '%s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'"
        ' "$1" >&3 && cat <&3; }\n'
        "ask 'POST /healthcheck/fail'\n"
        f"sleep {settle_s}\n"
        f"for _ in $(seq {max_s}); do\n"
        f"  ask 'GET /stats?filter={_IN_FLIGHT}' | grep -q ': [1-9]' || exit 0\n"
        f"  sleep {_SETTLE_S}\n"
        "done"
    )


def ready_script() -> str:
    """Return a script for bash beside Envoy that succeeds if it takes requests."""
    return (
        f"exec 3<>/dev/tcp/127.0.0.1/{DRAIN_PORT} && "
        r"printf 'GET /ready HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' >&3 && "
        "grep -q LIVE <&3"
    )


def monitor_memory(c: DeploymentContext) -> ExplainedValue:
    """Return the memory of one run of the monitor in MiB."""
    size_mib = core_files_mib(c.repository, c.pipeline)
    mib = _MONITOR_MIB + _MONITOR_CORE_FACTOR * size_mib
    return ExplainedValue(
        round_up_mib(mib),
        f"{_MONITOR_MIB} MiB, and {_MONITOR_CORE_FACTOR} times the core's files ({size_mib:.0f} "
        "MiB), whose weights may be a fourth of the original's: MiniLM's 90 MiB took 570. Not "
        "measured for this model: observe it",
    )


def _verdict_memory(c: DeploymentContext, monitor: ExplainedValue) -> ExplainedValue:
    server_mib = int(c.sizes.memory_mib.value.removesuffix("Mi"))
    return ExplainedValue(
        monitor.value + 2 * server_mib,
        f"a server of each build ({server_mib} MiB, as a replica), and the original model: "
        f"{monitor.reason}",
    )


def _samples_mib(c: DeploymentContext) -> ExplainedValue | None:
    if c.sample is None:
        return None
    rows_mib = _SAMPLE_FOLDERS * c.sample.max_bytes / _MIB
    return ExplainedValue(
        round_up_mib(rows_mib + _SAMPLE_CACHE_MIB),
        f"{_SAMPLE_FOLDERS} x serving.sample.max_bytes ({c.sample.max_bytes} bytes): each "
        "replica may be over it by a file of a tenth, and a candidate has a folder of its own; "
        f"{_SAMPLE_CACHE_MIB} MiB for the results of the monitor",
    )


def _peers(options: DeployOptions, namespace: str) -> tuple[list[dict[str, object]], str]:
    """Return the pods that may send requests to the servers, and the reason."""
    if options.envoy is not None:
        return [{"podSelector": {"matchLabels": labels(options.envoy)}}], (
            "Triton does not authenticate clients, and requests past the proxy would not be "
            "counted: only the proxy has access"
        )
    peers: list[dict[str, object]] = [{"podSelector": {}}]
    if options.target == "kserve":
        # The namespace of ``kserve/kserve-ingress-gateway``, which KServe's own settings name.
        namespace = "kserve"
    if namespace not in ("", options.namespace):
        peers.append(_pods_of(namespace))
    return peers, (
        "Triton does not authenticate clients: only this namespace and the gateway's have access; "
        "add the namespace of the gateway's proxies, if it is another one"
    )


def _pods_of(namespace: str) -> dict[str, object]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def _weights(thresholds: Sequence[float]) -> list[object]:
    """Return the percentages of requests for the new build, one for each step of the rollout."""
    first = _STEP_PERCENT * math.floor(100 * max(thresholds) / _STEP_PERCENT + 1)
    explained = ExplainedValue(
        first,
        "the rules measure both builds together: with a smaller share not even a build that fails "
        f"every request would burn the budget {_BURN.times:g} times too fast",
    )
    return [explained, *[weight for weight in (50,) if weight > first]]
