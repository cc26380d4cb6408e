"""Envoy's whole configuration as plain data: gRPC, HTTP and metrics in front of replicas.

What a balancer must not spread over replicas has no route: a server's statistics, its shared memory
and its repository are asked of that server.

The numbers of the Envoy in front of replicas, each with its reason: here, and in manifests.

How Envoy chooses a replica: the one with the least to do, or by a header of the stream.

Envoy's clusters: the replicas, and a candidate that gets copies of their requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.explained import ExplainedValue

_EDGES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


@dataclass(frozen=True)
class ProxySettings:
    """Seconds, milliseconds, MiB and percent, as the names say; `proxy_settings` makes one.

    `affinity`, where it is set, is a header of streams that decides on their replica.
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
    """The settings of a fleet.

    Args:
        replicas: fewest that are behind the proxy.
        max_request_mib: the largest request that its pipelines take (`largest_request_mib`).
        limits_ms: of the latency percentiles that are promised (`Slo.limits_ms`).
        affinity: a header of streams: those with the same value go to the same replica.
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


def balancing(settings: ProxySettings) -> dict[str, Any]:
    """Fields of a cluster of Envoy's."""
    if settings.affinity is None:
        return {
            "lb_policy": ExplainedValue(
                "LEAST_REQUEST", "requests take unequal time, by their length"
            ),
            "common_lb_config": {"healthy_panic_threshold": _no_panic()},
        }
    return {
        "lb_policy": ExplainedValue(
            "RING_HASH",
            f"a replica for each value of {settings.affinity.value}, and few change it when "
            "replicas come and go",
        ),
        "common_lb_config": {
            "healthy_panic_threshold": _no_panic(),
            "consistent_hashing_lb_config": {
                "hash_balance_factor": ExplainedValue(
                    150,
                    "percent of the mean that a replica may have under way: a value that "
                    "many ask for overflows to its neighbors",
                )
            },
        },
    }


def _no_panic() -> dict[str, Any]:
    return {"value": ExplainedValue(0, "servers that are known not to be ready get no traffic")}


_TYPES = "type.googleapis.com/envoy"


class Service(NamedTuple):
    """One of the two ways to ask a replica: its name in Envoy's statistics, and the protocol."""

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
    """Replicas as files tell them, which are exchanged by rename; `assignment` makes them."""

    grpc: Path
    http: Path


@dataclass(frozen=True)
class EndpointNames:
    """Replicas as DNS tells them: every address of a host, such as a headless Service's."""

    host: str
    grpc_port: int
    http_port: int


Endpoints = EndpointFiles | EndpointNames


@dataclass(frozen=True)
class Mirror:
    """A candidate that gets a copy of some requests; what it answers is thrown away.

    Attributes:
        share: of the requests for inference, 0 to 1.
        candidate: where it is.
    """

    share: float
    candidate: EndpointNames


def replicas(service: Service, settings: ProxySettings, endpoints: Endpoints) -> dict[str, Any]:
    """The cluster that requests of a protocol are balanced over."""
    protocol = "http2_protocol_options" if service.is_grpc else "http_protocol_options"
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    most = settings.most_at_once
    return {
        "name": service.cluster,
        **_discovery(service, settings, endpoints),
        "connect_timeout": seconds(settings.connect_s),
        **balancing(settings),
        "typed_extension_protocol_options": {
            f"envoy.{kind}": typed(kind, explicit_http_config={protocol: {}})
        },
        "ignore_health_on_host_removal": ExplainedValue(
            True, "a replica that was taken out gets nothing more, also while it is healthy"
        ),
        "close_connections_on_host_health_failure": ExplainedValue(
            True, "what waits for a frozen replica is asked elsewhere"
        ),
        "health_checks": [_health_check(service, settings)],
        "outlier_detection": _outliers(settings),
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": most,
                    "max_pending_requests": most.value,
                    "max_requests": most.value,
                    "retry_budget": {
                        "budget_percent": {"value": settings.retry_percent},
                        "min_retry_concurrency": settings.retry_at_least,
                    },
                }
            ]
        },
    }


def _discovery(service: Service, settings: ProxySettings, endpoints: Endpoints) -> dict[str, Any]:
    if isinstance(endpoints, EndpointNames):
        port = endpoints.grpc_port if service.is_grpc else endpoints.http_port
        return {
            "type": "STRICT_DNS",
            "dns_refresh_rate": seconds(settings.dns_refresh_s),
            "load_assignment": assigned(service.cluster, [(endpoints.host, port)]),
        }
    file = endpoints.grpc if service.is_grpc else endpoints.http
    return {
        "type": "EDS",
        "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(file)}}},
    }


def _health_check(service: Service, settings: ProxySettings) -> dict[str, Any]:
    how: dict[str, Any] = {"grpc_health_check": {}}
    if not service.is_grpc:
        how = {
            "http_health_check": {"path": "/v2/health/ready"},
            "reuse_connection": ExplainedValue(
                False, "a server that is told to stop waits for open connections before it does"
            ),
        }
    return {
        "interval": seconds(settings.check_interval_s),
        "no_traffic_interval": seconds(settings.check_interval_s, explained=False),
        "timeout": seconds(settings.check_timeout_s),
        "unhealthy_threshold": settings.check_failures,
        "healthy_threshold": settings.check_passes,
        **how,
    }


def _outliers(settings: ProxySettings) -> dict[str, Any]:
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": settings.eject_after,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_local_origin_success_rate": 0,
        "enforcing_consecutive_5xx": 0,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "base_ejection_time": seconds(settings.eject_s),
        "max_ejection_percent": settings.eject_percent,
    }


def candidate(service: Service, settings: ProxySettings, mirror: Mirror) -> dict[str, Any]:
    """As the replicas, but that little is under way, and nothing is sent a second time."""
    cluster = replicas(CANDIDATES[service], settings, mirror.candidate)
    most = settings.mirrored_at_once
    thresholds = {
        "max_connections": most,
        "max_pending_requests": most.value,
        "max_requests": most.value,
    }
    return {**cluster, "circuit_breakers": {"thresholds": [thresholds]}}


def assignment(service: Service, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """What an endpoint file holds: the hosts and ports of the replicas that may be asked."""
    found = assigned(service.cluster, addresses)
    return {"resources": [typed("config.endpoint.v3.ClusterLoadAssignment", **found)]}


def assigned(cluster: str, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """The hosts and ports of a cluster."""
    hosts = [{"endpoint": {"address": address(host, port)}} for host, port in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def address(host: str, port: int) -> dict[str, Any]:
    """As Envoy writes one."""
    return {"socket_address": {"address": host, "port_value": port}}


def typed(name: str, **fields: Any) -> dict[str, Any]:
    """A message of one of Envoy's types."""
    return {"@type": f"{_TYPES}.{name}", **fields}


def seconds(setting: ExplainedValue, *, explained: bool = True) -> ExplainedValue | str:
    """A duration as Envoy writes it; without its reason where that stands beside it."""
    text = f"{setting.value:g}s"
    return ExplainedValue(text, setting.reason) if explained else text


_LOOPBACK = "127.0.0.1"
_MIB = 2**20
_MILLION = 10**6
_SERVICE = "inference.GRPCInferenceService"
_STREAM = "ModelStreamInfer"
_INFER = "ModelInfer"
_GRPC_ASKED = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig",
)  # fmt: skip
_MODEL = "/v2/models/[^/]+(/versions/[^/]+)?"
_HTTP_ASKED = f"/v2(/health/(live|ready))?|{_MODEL}(/(ready|config))?"
_HTTP_INFER = f"{_MODEL}/(infer|generate)"
_HTTP_STREAM = f"{_MODEL}/generate_stream"
# What 24.10 says over gRPC while it ends, as NOT_FOUND; an unknown name is told in other words.
_ENDING = "has no available versions"


@dataclass(frozen=True)
class Listen:
    """Where Envoy listens; the admin page is on loopback, whatever the host.

    The metrics port serves ``/metrics`` and ``/ready`` and nothing else of the admin page.
    """

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    admin_port: int


def bootstrap(
    settings: ProxySettings, listen: Listen, endpoints: Endpoints, mirror: Mirror | None = None
) -> dict[str, Any]:
    """The configuration, for `reasons.yaml_of`: numbers that somebody chose carry their reason."""
    return {
        "node": {"id": "triptych", "cluster": "triptych"},
        "admin": {"address": address(_LOOPBACK, listen.admin_port)},
        "stats_config": {
            "histogram_bucket_settings": [
                {"match": {"suffix": "_rq_time"}, "buckets": settings.latency_edges_ms}
            ]
        },
        "static_resources": {
            "listeners": [
                _listener("grpc", listen.host, listen.grpc_port, _grpc_manager(settings, mirror)),
                _listener("http", listen.host, listen.http_port, _http_manager(settings, mirror)),
                _listener("metrics", listen.host, listen.metrics_port, _metrics_manager()),
            ],
            "clusters": [
                replicas(GRPC, settings, endpoints),
                replicas(HTTP, settings, endpoints),
                *(candidate(service, settings, mirror) for service in CANDIDATES if mirror),
                {
                    "name": "admin",
                    "type": "STATIC",
                    "load_assignment": assigned("admin", [(_LOOPBACK, listen.admin_port)]),
                },
            ],
        },
    }


def _filter(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"envoy.filters.{name}", "typed_config": typed(kind, **fields)}


def _listener(name: str, host: str, port: int, manager: Mapping[str, Any]) -> dict[str, Any]:
    kind = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    connections = _filter("network.http_connection_manager", kind, stat_prefix=name, **manager)
    return {
        "name": name,
        "address": address(host, port),
        "filter_chains": [{"filters": [connections]}],
    }


def _grpc_manager(settings: ProxySettings, mirror: Mirror | None) -> dict[str, Any]:
    path = f"/{_SERVICE}/"
    asked = "|".join(_GRPC_ASKED)
    retriable = {
        # RESET: an answer that does not come can be asked for again, inference changes nothing.
        "retry_on": "connect-failure,refused-stream,reset,unavailable,retriable-headers",
        "retriable_headers": [
            {"name": "grpc-message", "string_match": {"contains": _ENDING}},
        ],
    }
    statistics = _filter(
        "http.grpc_stats",
        "extensions.filters.http.grpc_stats.v3.FilterConfig",
        individual_method_stats_allowlist={
            "services": [{"name": _SERVICE, "method_names": [_INFER, _STREAM]}]
        },
        enable_upstream_stats=True,
    )
    return {
        **_manager(
            [
                _route({"path": path + _STREAM}, GRPC, settings, None),
                _route({"path": path + _INFER}, GRPC, settings, retriable, mirror),
                _route({"safe_regex": {"regex": f"{path}({asked})"}}, GRPC, settings, retriable),
                _route({"prefix": "/grpc.health.v1.Health/"}, GRPC, settings, retriable),
            ],
            settings,
            filters=[statistics],
        ),
        "codec_type": "HTTP2",
        "http2_protocol_options": {
            "connection_keepalive": {
                "interval": seconds(settings.keepalive_s),
                "timeout": seconds(settings.keepalive_timeout_s),
            }
        },
    }


def _http_manager(settings: ProxySettings, mirror: Mirror | None) -> dict[str, Any]:
    retriable = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
    }
    return _manager(
        [
            _route({"safe_regex": {"regex": _HTTP_STREAM}}, HTTP, settings, None),
            _route({"safe_regex": {"regex": _HTTP_INFER}}, HTTP, settings, retriable, mirror),
            _route({"safe_regex": {"regex": _HTTP_ASKED}}, HTTP, settings, retriable),
        ],
        settings,
    )


def _metrics_manager() -> dict[str, Any]:
    routes = [
        {
            "match": {"path": path},
            "route": {"cluster": "admin", "prefix_rewrite": page},
        }
        for path, page in (("/metrics", "/stats/prometheus"), ("/ready", "/ready"))
    ]
    return {"route_config": _route_config(routes), "http_filters": [_router()]}


def _manager(
    routes: list[dict[str, Any]],
    settings: ProxySettings,
    *,
    filters: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    return {
        "stream_idle_timeout": ExplainedValue(
            "0s", "a client's own deadline counts, and a stream may pause for as long as it likes"
        ),
        "local_reply_config": {"mappers": _refusals(settings)},
        "route_config": _route_config(routes),
        "http_filters": [
            *filters,
            _filter(
                "http.buffer",
                "extensions.filters.http.buffer.v3.Buffer",
                max_request_bytes=_bytes(settings.max_request_mib),
            ),
            _router(),
        ],
    }


def _refusals(settings: ProxySettings) -> list[dict[str, Any]]:
    """What Envoy says where it refuses a request itself."""
    said = {
        413: f"The request is larger than {settings.max_request_mib.value} MiB, the most that any "
        "pipeline here takes",
        404: "Not to be asked of several servers: ask one of them by its own address",
    }
    return [
        {
            "filter": {
                "status_code_filter": {
                    "comparison": {
                        "op": "EQ",
                        "value": {"default_value": status, "runtime_key": f"refused_{status}"},
                    }
                }
            },
            "body": {"inline_string": text},
        }
        for status, text in said.items()
    ]


def _route_config(routes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]}


def _router() -> dict[str, Any]:
    return _filter("http.router", "extensions.filters.http.router.v3.Router")


def _route(
    match: dict[str, Any],
    service: Service,
    settings: ProxySettings,
    retriable: Mapping[str, Any] | None,
    mirror: Mirror | None = None,
) -> dict[str, Any]:
    """One kind of request; what cannot be sent again passes without being held."""
    route: dict[str, Any] = {
        "cluster": service.cluster,
        "timeout": ExplainedValue(
            "0s", "the client's deadline counts; Envoy's own 15 s would cut it"
        ),
    }
    if service.is_grpc:
        route["max_stream_duration"] = {
            "grpc_timeout_header_max": ExplainedValue(
                "0s", "the client's deadline as it is, all tries"
            )
        }
    if mirror is not None:
        route["request_mirror_policies"] = [_mirror_policy(service, mirror)]
    if retriable is None:
        if settings.affinity is not None:
            route["hash_policy"] = [{"header": {"header_name": settings.affinity}}]
        kind = "extensions.filters.http.buffer.v3.BufferPerRoute"
        streams = {"envoy.filters.http.buffer": typed(kind, disabled=True)}
        return {
            "match": match,
            "route": route,
            "request_headers_to_remove": [
                ExplainedValue(
                    "triton_grpc_error",
                    "a stream that Triton ends with a status, as this asks, may abort Triton",
                )
            ],
            "typed_per_filter_config": streams,
        }
    route["retry_policy"] = {
        **retriable,
        "num_retries": settings.retries,
        "retry_back_off": {"base_interval": seconds(settings.least_backoff_s)},
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed(
                    "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                ),
            }
        ],
        "host_selection_retry_max_attempts": settings.reselections,
    }
    return {
        "match": match,
        "route": route,
        "request_body_buffer_limit": _bytes(settings.max_request_mib),
    }


def _mirror_policy(service: Service, mirror: Mirror) -> dict[str, Any]:
    return {
        "cluster": CANDIDATES[service].cluster,
        "runtime_fraction": {
            "default_value": ExplainedValue(
                {"numerator": round(mirror.share * _MILLION), "denominator": "MILLION"},
                f"{mirror.share:g} of the requests are asked of the candidate, too; nobody waits "
                "for it, and its answers are thrown away",
            )
        },
        "disable_shadow_host_suffix_append": ExplainedValue(
            True, "Envoy would ask for another host name than the client did"
        ),
    }


def _bytes(setting: ExplainedValue) -> ExplainedValue:
    return ExplainedValue(setting.value * _MIB, setting.reason)
