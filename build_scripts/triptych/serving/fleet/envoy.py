"""Write Envoy's configuration for replicas, with the reason of each number.

Requests about one server (statistics, shared memory, repository) have no route; clients send them
to that server. Steps of pipelines have none either: a client could pass the limits of preprocess.
The templates are in ``templates``; ``requests.lua`` checks requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.explained import ExplainedValue, render_yaml
from triptych.serving.fleet.access import AccessFiles
from triptych.serving.fleet.clusters import assigned, service_at

_TEMPLATES = Path(__file__).with_name("templates")
_HEAP_MIB, _HEAP_REQUESTS = 512, 64
_PRIVATE_MODE = 0o600
_COLLECTOR = "collector"
_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


@dataclass(frozen=True)
class ProxySettings:
    """Numbers of Envoy's configuration, each with its reason; units are in the names.

    `affinity` is an optional header of streams that selects their replica.
    """

    max_request_mib: ExplainedValue
    retry_percent: ExplainedValue
    latency_buckets_ms: ExplainedValue
    max_heap_mib: ExplainedValue
    affinity: ExplainedValue | None = None
    retries: ExplainedValue = ExplainedValue(
        2,
        "two replicas may stop at the same time; a request that crashes its server crashes at most "
        "three servers",
    )
    min_concurrent_retries: ExplainedValue = ExplainedValue(
        32, "always allowed: a percentage of few requests would round to zero"
    )
    host_selection_attempts: ExplainedValue = ExplainedValue(
        64,
        "a retry must go to another replica, but a dead replica looks idle: with two replicas, "
        "3 of 4 selections choose the idle one",
    )
    min_backoff_s: ExplainedValue = ExplainedValue(
        0.025, "Envoy adds jitter, up to ten times this; meanwhile a full queue may empty"
    )
    connect_s: ExplainedValue = ExplainedValue(
        1, "replicas are in the same network: one that connects later is not available"
    )
    check_interval_s: ExplainedValue = ExplainedValue(
        1,
        "also without traffic, when Envoy would check once per minute and the first request would "
        "find a dead replica",
    )
    check_timeout_s: ExplainedValue = ExplainedValue(
        3, "same as the health check of the image: a server under load answers late"
    )
    check_failures: ExplainedValue = ExplainedValue(
        3, "a single late answer does not remove a replica"
    )
    check_passes: ExplainedValue = ExplainedValue(
        1, "a server reports ready only when all of its models are ready"
    )
    eject_after: ExplainedValue = ExplainedValue(
        2,
        "refused or broken connections in a row. Statuses do not count: UNAVAILABLE may be a full "
        "queue, and INTERNAL may be an error of the request, which every replica returns",
    )
    eject_s: ExplainedValue = ExplainedValue(
        5, "then the replica is tried again; a passed health check ends the ejection earlier"
    )
    eject_percent: ExplainedValue = ExplainedValue(
        50, "a network failure between proxy and replicas must not eject all replicas"
    )
    server_keepalive_s: ExplainedValue = ExplainedValue(
        1,
        "a frozen server does not answer this ping of HTTP/2. Then the connection is closed, and "
        "its requests are retried on another replica; a failed health check closes no connection "
        "with a request in flight",
    )
    server_keepalive_timeout_s: ExplainedValue = ExplainedValue(
        3, "same as the health check; Triton answers pings in threads that do no inference"
    )
    keepalive_s: ExplainedValue = ExplainedValue(
        60, "same as the servers: connections of clients that vanished are closed"
    )
    keepalive_timeout_s: ExplainedValue = ExplainedValue(20, "see the interval")
    headers_timeout_s: ExplainedValue = ExplainedValue(
        10, "clients send the headers of a request at once"
    )
    request_timeout_s: ExplainedValue = ExplainedValue(
        60,
        "time to receive a request, until it is complete or answered: the largest one of most "
        "pipelines takes 60 s at 1 Mbit/s. Without it, unfinished requests are held for ever",
    )
    idle_request_s: ExplainedValue = ExplainedValue(
        600,
        "a request on which nothing was sent or received for this time was abandoned. The deadline "
        "of the client is usually shorter",
    )
    idle_stream_s: ExplainedValue = ExplainedValue(
        3600, "clients keep streams open between their requests, and a stream of text may pause"
    )
    idle_connection_s: ExplainedValue = ExplainedValue(
        600, "a connection without a request for this time; clients connect again"
    )
    max_client_connections: ExplainedValue = ExplainedValue(
        10_000,
        "connections of clients; further ones are refused, since each takes memory and a "
        "descriptor",
    )
    shrink_heap_ratio: ExplainedValue = ExplainedValue(
        0.7, "of the heap's limit, from which free memory is returned to the system"
    )
    min_idle_s: ExplainedValue = ExplainedValue(
        5, "time without a byte, after which a request is ended when the heap is full"
    )
    reset_streams_ratio: ExplainedValue = ExplainedValue(
        0.85,
        "of the heap's limit, from which the requests over HTTP/2 that hold most memory are ended: "
        "clients that send large requests slowly would use up all memory",
    )
    reject_ratio: ExplainedValue = ExplainedValue(
        0.95, "of the heap's limit, from which new requests are rejected as unavailable"
    )
    max_concurrent: ExplainedValue = ExplainedValue(
        1_000_000,
        "requests, pending requests and connections: the pipelines limit requests by what they can "
        "process. Envoy's default of 1024 would reject requests earlier",
    )
    max_mirrored: ExplainedValue = ExplainedValue(
        16,
        "mirrored requests in flight; further requests are not mirrored. Envoy buffers each one "
        "until the candidate answers, so a slow candidate would fill its memory",
    )
    dns_refresh_s: ExplainedValue = ExplainedValue(
        5,
        "a new replica is found within this time; a replica that stops keeps serving for longer",
    )


def proxy_settings(
    *,
    replicas: int,
    max_request_mib: int,
    limits_ms: Iterable[float] = (),
    affinity: str | None = None,
    max_heap_mib: ExplainedValue | None = None,
) -> ProxySettings:
    """Return the settings of a fleet.

    Args:
        replicas: Minimum number of replicas behind the proxy.
        max_request_mib: Maximum request size of the pipelines in MiB (`largest_request_mib`).
        limits_ms: Latency limits of the SLO in milliseconds (`Slo.limits_ms`).
        affinity: Header of streams; streams with the same value go to the same replica.
        max_heap_mib: Maximum heap of Envoy in MiB; None for one by `max_request_mib`.
    """
    limits = sorted(set(limits_ms))
    slo_text = ", ".join(f"{limit:g}" for limit in limits)
    return ProxySettings(
        affinity=None
        if affinity is None
        else ExplainedValue(
            affinity,
            "streams with the same value share a prompt prefix, which one replica then caches. "
            "Streams without the header go to any replica",
        ),
        max_heap_mib=max_heap_mib
        or ExplainedValue(
            _HEAP_MIB + _HEAP_REQUESTS * max_request_mib,
            f"MiB: {_HEAP_MIB} for connections and short requests, and {_HEAP_REQUESTS} of the "
            "largest requests",
        ),
        max_request_mib=ExplainedValue(
            max_request_mib,
            "MiB, same as the limit of the servers: no pipeline accepts a larger request. Envoy "
            "buffers a request until it is answered, so that it can be retried",
        ),
        retry_percent=ExplainedValue(
            min(100, max(20, math.ceil(200 / max(1, replicas - 1)))),
            f"percent of the requests in flight may be retries: twice the load that one failed "
            f"replica of {replicas} leaves to each other, at least 20. The limit prevents retries "
            "from multiplying overload",
        ),
        latency_buckets_ms=ExplainedValue(
            sorted({*map(float, _BUCKETS_MS), *limits}),
            "upper bounds of the latency histograms in ms"
            + (f"; {slo_text} are limits of serving.slo" if limits else ""),
        ),
    )


class Service(NamedTuple):
    """A protocol of the replicas, with the cluster's name in Envoy's statistics."""

    cluster: str
    is_grpc: bool


GRPC = Service("triton_grpc", is_grpc=True)
HTTP = Service("triton_http", is_grpc=False)
CANDIDATES = {
    GRPC: Service("candidate_grpc", is_grpc=True),
    HTTP: Service("candidate_http", is_grpc=False),
}


@dataclass(frozen=True)
class EndpointFiles:
    """Files that list the replicas (see `assignment`), replaced by rename."""

    grpc: Path
    http: Path

    def routes(self, service: Service) -> Path:
        """Return the file of the routes of a listener (see `route_file`)."""
        file = self.grpc if service.is_grpc else self.http
        return file.with_name(f"routes-{file.name}")


@dataclass(frozen=True)
class EndpointNames:
    """DNS name of the replicas, such as a headless Service; each address is a replica."""

    host: str
    grpc_port: int
    http_port: int


Endpoints = EndpointFiles | EndpointNames


@dataclass(frozen=True)
class Mirror:
    """Candidate that gets copies of some requests; its responses are discarded.

    Attributes:
        share: Ratio of the requests for inference, 0 to 1.
        candidate: Address of the candidate.
    """

    share: float
    candidate: EndpointNames


def assignment(service: Service, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """Return the content of an endpoint file: hosts and ports of the replicas in use."""
    found = assigned(service.cluster, addresses)
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    return {"resources": [{"@type": kind, **found}]}


@dataclass(frozen=True)
class Listen:
    """Address and ports of Envoy.

    The metrics port serves only ``/metrics`` and ``/ready`` of the admin page. The drain port, on
    loopback, serves the pages with which a script drains Envoy; None for no such port.
    """

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    drain_port: int | None = None


class Route(NamedTuple):
    """Kind of request, selected by Envoy's match of its path."""

    match: dict[str, Any]
    is_inference: bool = False
    is_stream: bool = False


_GRPC_ROUTES = (
    Route({"path": "/inference.GRPCInferenceService/ModelStreamInfer"}, is_stream=True),
    Route({"path": "/inference.GRPCInferenceService/ModelInfer"}, is_inference=True),
    Route(
        {
            "safe_regex": {
                "regex": "/inference.GRPCInferenceService/(ServerLive|ServerReady|ServerMetadata|"
                "ModelReady|ModelMetadata|ModelConfig)"
            }
        }
    ),
    Route({"prefix": "/grpc.health.v1.Health/"}),
)


def _http_routes(pipelines: Sequence[str]) -> tuple[Route, ...]:
    """Return the routes for HTTP, whose paths have the name of a pipeline."""
    names = "|".join(map(re.escape, sorted(pipelines)))
    model = f"/v2/models/({names})(/versions/[0-9]+)?"
    return (
        Route({"safe_regex": {"regex": f"{model}/generate_stream"}}, is_stream=True),
        Route({"safe_regex": {"regex": f"{model}/(infer|generate)"}}, is_inference=True),
        Route({"safe_regex": {"regex": f"/v2(/health/(live|ready))?|{model}(/(ready|config))?"}}),
    )


ADMIN_SOCKET = "@triptych-envoy-admin"
"""Name of the socket of Envoy's admin page in a container, whose network is its own."""


def bootstrap(
    settings: ProxySettings,
    listen: Listen,
    endpoints: Endpoints,
    pipelines: Sequence[str],
    mirror: Mirror | None = None,
    *,
    admin_socket: str = ADMIN_SOCKET,
    access: AccessFiles | None = None,
    gateway: Path | int | None = None,
    collector: str | None = None,
) -> Any:
    """Return the configuration, with the reasons of its numbers (see `base.explained`).

    Args:
        settings: Numbers of the configuration.
        listen: Address and ports of Envoy.
        endpoints: Replicas; files also have the routes (see `route_file`).
        pipelines: Names that requests may address. Steps of pipelines are not among them.
        mirror: Candidate that gets copies of requests; None without one.
        admin_socket: Path of the Unix socket of Envoy's admin page.
        access: Files of certificates and keys; None for plain text without keys.
        gateway: Unix socket or port of gRPC for the gateway alone, without TLS and keys; None for
            none.
        collector: URL of a collector of OpenTelemetry, which gets a span of each request whose
            caller samples its trace; None for none.
    """
    clusters = [_cluster(service, service.cluster, endpoints) for service in (GRPC, HTTP)]
    if mirror is not None:
        clusters += [
            {**_cluster(service, other.cluster, mirror.candidate), "is_candidate": True}
            for service, other in CANDIDATES.items()
        ]
    listeners = [
        {
            **_listener(service, pipelines),
            "listener": name,
            "address": address,
            "script": _script(settings, service),
            "routes_file": str(endpoints.routes(service))
            if isinstance(endpoints, EndpointFiles)
            else None,
            "transport_socket": files and files.transport_socket(is_grpc=service.is_grpc),
            "access_filters": files.filters("keys", "requests") if files else [],
            "count_filters": files.filters("items") if files else [],
        }
        for name, service, address, files in _addresses(listen, access, gateway)
    ]
    error_texts = {
        413: f"The request is larger than {settings.max_request_mib.value} MiB, the maximum of the "
        "pipelines",
        404: "This proxy does not forward this request, which is not for a pipeline: send it to "
        "the address of one server",
    }
    if access is not None and access.has_keys:
        error_texts[429] = (
            "The limit of the key is reached: try again after the time in Retry-After"
        )
    return render_yaml(
        _TEMPLATES / "envoy.yaml.j2",
        s=settings,
        listen=listen,
        mirror=mirror,
        names=_names(pipelines),
        listeners=listeners,
        clusters=clusters,
        error_texts=error_texts,
        admin_pages=list(_admin_pages(listen)),
        admin_socket=admin_socket,
        collector=collector,
        services=[] if collector is None else [service_at(_COLLECTOR, collector)],
    )


def _addresses(
    listen: Listen, access: AccessFiles | None, gateway: Path | int | None
) -> Iterator[tuple[str, Service, dict[str, Any], AccessFiles | None]]:
    """Yield name, service, address and access of each listener for requests."""

    def address(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": listen.host, "port_value": port}}

    yield "grpc", GRPC, address(listen.grpc_port), access
    yield "http", HTTP, address(listen.http_port), access
    if isinstance(gateway, Path):
        yield "gateway", GRPC, {"pipe": {"path": str(gateway), "mode": _PRIVATE_MODE}}, None
    elif gateway is not None:
        yield "gateway", GRPC, address(gateway), None


def _admin_pages(listen: Listen) -> Iterator[dict[str, Any]]:
    """Yield the template's data of the listeners for pages of the admin interface."""
    pages = {"/metrics": "/stats/prometheus", "/ready": "/ready"}
    yield {"name": "metrics", "host": listen.host, "port": listen.metrics_port, "paths": pages}
    if listen.drain_port is not None:
        pages = {path: path for path in ("/ready", "/stats", "/healthcheck/fail")}
        yield {"name": "drain", "host": "127.0.0.1", "port": listen.drain_port, "paths": pages}


def route_file(
    settings: ProxySettings, service: Service, pipelines: Sequence[str], mirror: Mirror | None
) -> dict[str, Any]:
    """Return the content of a file of routes, `EndpointFiles.routes`, with reasons."""
    found = render_yaml(
        _TEMPLATES / "routes.yaml.j2",
        s=settings,
        mirror=mirror,
        names=_names(pipelines),
        listener=_listener(service, pipelines),
    )
    kind = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
    return {"resources": [{"@type": kind, **found}]}


def _names(pipelines: Sequence[str]) -> dict[str, bool]:
    """Return the names that requests may address; ``*`` shows that a request has a route."""
    return dict.fromkeys(["*", *sorted(pipelines)], True)


def _listener(service: Service, pipelines: Sequence[str]) -> dict[str, Any]:
    """Return the template's data of a listener."""
    return {
        "name": "grpc" if service.is_grpc else "http",
        "routes": _GRPC_ROUTES if service.is_grpc else _http_routes(pipelines),
        "cluster": service.cluster,
        "candidate": CANDIDATES[service].cluster,
        "is_grpc": service.is_grpc,
    }


def _script(settings: ProxySettings, service: Service) -> str:
    """Return the script that checks requests."""
    max_bytes = settings.max_request_mib.value << 20
    constants = f"local IS_GRPC, MAX_BYTES = {str(service.is_grpc).lower()}, {max_bytes}\n"
    return constants + (_TEMPLATES / "requests.lua").read_text(encoding="utf-8").rstrip()


def _cluster(service: Service, name: str, endpoints: Endpoints) -> dict[str, Any]:
    """Return the template's data of a cluster of `endpoints`."""
    cluster = {"name": name, "is_grpc": service.is_grpc, "is_candidate": False, "file": None}
    if isinstance(endpoints, EndpointNames):
        port = endpoints.grpc_port if service.is_grpc else endpoints.http_port
        return {**cluster, "assignment": assigned(name, [(endpoints.host, port)])}
    return {**cluster, "file": str(endpoints.grpc if service.is_grpc else endpoints.http)}
