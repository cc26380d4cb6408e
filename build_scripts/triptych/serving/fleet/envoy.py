"""Write Envoy's configuration for replicas, with the reason of each number.

Requests about one server (statistics, shared memory, repository) have no route; clients send them
to that server. The template is ``templates/envoy.yaml.j2``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.explained import ExplainedValue, render_yaml

_EDGES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


@dataclass(frozen=True)
class ProxySettings:
    """Numbers of Envoy's configuration, each with its reason; units are in the names.

    `affinity` is an optional header of streams that selects their replica.
    """

    max_request_mib: ExplainedValue
    retry_percent: ExplainedValue
    latency_edges_ms: ExplainedValue
    affinity: ExplainedValue | None = None
    retries: ExplainedValue = ExplainedValue(
        2,
        "two replicas may be going at once; a request that ends its server ends three at most",
    )
    retry_at_least: ExplainedValue = ExplainedValue(
        32, "retries that may always be under way: of few requests a share is nothing"
    )
    reselections: ExplainedValue = ExplainedValue(
        64,
        "a retry must not go where it failed, and a dead replica looks idle: of two replicas "
        "3 in 4 picks are of the idle one, so that few draws would not do",
    )
    least_backoff_s: ExplainedValue = ExplainedValue(
        0.025, "with jitter, and up to ten times that: a queue that was full may have room then"
    )
    connect_s: ExplainedValue = ExplainedValue(
        1, "replicas are near: one that takes longer is not there"
    )
    check_interval_s: ExplainedValue = ExplainedValue(
        1,
        "also without traffic, which Envoy would check once a minute: who asks first must not pay",
    )
    check_timeout_s: ExplainedValue = ExplainedValue(
        3, "as the image's own health check: a server under load answers late"
    )
    check_failures: ExplainedValue = ExplainedValue(3, "one late answer takes no replica out")
    check_passes: ExplainedValue = ExplainedValue(
        1, "a server says that it is ready once all of its models are"
    )
    eject_after: ExplainedValue = ExplainedValue(
        2,
        "refused or broken connections in a row. Statuses do not count: UNAVAILABLE may be a full "
        "queue, and INTERNAL the request's own fault, on every replica that it is sent to",
    )
    eject_s: ExplainedValue = ExplainedValue(
        5, "then it may try again, and earlier where a health check passes meanwhile"
    )
    eject_percent: ExplainedValue = ExplainedValue(
        50, "a network that fails between proxy and replicas must not take out all of them"
    )
    keepalive_s: ExplainedValue = ExplainedValue(
        60, "as the servers' own: clients that vanished are noticed"
    )
    keepalive_timeout_s: ExplainedValue = ExplainedValue(20, "see the interval")
    most_at_once: ExplainedValue = ExplainedValue(
        1_000_000,
        "requests, pending ones and connections: the pipelines know what they can take and refuse "
        "the rest; Envoy's own 1024 would refuse before they do",
    )
    mirrored_at_once: ExplainedValue = ExplainedValue(
        16,
        "mirrored requests under way: of more, none is mirrored. Each is held whole until the "
        "candidate has answered, and a slow one must not fill this proxy's memory",
    )
    dns_refresh_s: ExplainedValue = ExplainedValue(
        5,
        "a replica that got ready is found within that; one that goes sleeps longer before it does",
    )


def proxy_settings(
    *,
    replicas: int,
    max_request_mib: int,
    limits_ms: Iterable[float] = (),
    affinity: str | None = None,
) -> ProxySettings:
    """Return the settings of a fleet.

    Args:
        replicas: Minimum number of replicas behind the proxy.
        max_request_mib: Maximum request size of the pipelines in MiB (`largest_request_mib`).
        limits_ms: Latency limits of the SLO in milliseconds (`Slo.limits_ms`).
        affinity: Header of streams; streams with the same value go to the same replica.
    """
    limits = sorted(set(limits_ms))
    promised = ", ".join(f"{limit:g}" for limit in limits)
    return ProxySettings(
        affinity=None
        if affinity is None
        else ExplainedValue(
            affinity,
            "streams of one value begin alike: one replica keeps what it computed of that. Without "
            "the header a stream goes anywhere",
        ),
        max_request_mib=ExplainedValue(
            max_request_mib,
            "MiB, as the servers' own limit: no pipeline here takes a larger request. A whole one "
            "is held until it is answered, so that it can be sent again",
        ),
        retry_percent=ExplainedValue(
            min(100, max(20, math.ceil(200 / max(1, replicas - 1)))),
            f"of the requests under way may be retries: twice what each of {replicas} replicas "
            "leaves to the others when it dies, at least 20, so that overload is not multiplied",
        ),
        latency_edges_ms=ExplainedValue(
            sorted({*map(float, _EDGES_MS), *limits}),
            "edges of the latency histograms in ms"
            + (f"; {promised} are promised (serving.slo)" if limits else ""),
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


def assigned(cluster: str, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """Return the part of a configuration with the hosts and ports of a cluster."""
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        for host, port in addresses
    ]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


@dataclass(frozen=True)
class Listen:
    """Address and ports of Envoy; the admin page always listens on loopback.

    The metrics port serves only ``/metrics`` and ``/ready`` of the admin page.
    """

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    admin_port: int


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
_MODEL = "/v2/models/[^/]+(/versions/[^/]+)?"
_HTTP_ROUTES = (
    Route({"safe_regex": {"regex": f"{_MODEL}/generate_stream"}}, is_stream=True),
    Route({"safe_regex": {"regex": f"{_MODEL}/(infer|generate)"}}, is_inference=True),
    Route({"safe_regex": {"regex": f"/v2(/health/(live|ready))?|{_MODEL}(/(ready|config))?"}}),
)


def bootstrap(
    settings: ProxySettings, listen: Listen, endpoints: Endpoints, mirror: Mirror | None = None
) -> Any:
    """Return the configuration, with the reasons of its numbers (see `base.explained`)."""
    clusters = [_cluster(service, service.cluster, endpoints) for service in (GRPC, HTTP)]
    if mirror is not None:
        clusters += [
            {**_cluster(service, other.cluster, mirror.candidate), "is_candidate": True}
            for service, other in CANDIDATES.items()
        ]
    listeners = [
        {
            "name": name,
            "port": port,
            "routes": routes,
            "cluster": service.cluster,
            "candidate": CANDIDATES[service].cluster,
            "is_grpc": service.is_grpc,
        }
        for name, port, routes, service in (
            ("grpc", listen.grpc_port, _GRPC_ROUTES, GRPC),
            ("http", listen.http_port, _HTTP_ROUTES, HTTP),
        )
    ]
    refusals = {
        413: f"The request is larger than {settings.max_request_mib.value} MiB, the most that any "
        "pipeline here takes",
        404: "Not to be asked of several servers: ask one of them by its own address",
    }
    return render_yaml(
        Path(__file__).with_name("templates") / "envoy.yaml.j2",
        s=settings,
        listen=listen,
        mirror=mirror,
        listeners=listeners,
        clusters=clusters,
        refusals=refusals,
        admin=assigned("admin", [("127.0.0.1", listen.admin_port)]),
    )


def _cluster(service: Service, name: str, endpoints: Endpoints) -> dict[str, Any]:
    """Return the template's data of a cluster of `endpoints`."""
    cluster = {"name": name, "is_grpc": service.is_grpc, "is_candidate": False, "file": None}
    if isinstance(endpoints, EndpointNames):
        port = endpoints.grpc_port if service.is_grpc else endpoints.http_port
        return {**cluster, "assignment": assigned(name, [(endpoints.host, port)])}
    return {**cluster, "file": str(endpoints.grpc if service.is_grpc else endpoints.http)}
