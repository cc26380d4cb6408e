"""Envoy's whole configuration as plain data: gRPC, HTTP and metrics in front of replicas.

What a balancer must not spread over replicas has no route: a server's statistics, its shared memory
and its repository are asked of that server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.fleet.balancing import balancing
from triptych.fleet.reasons import Because
from triptych.fleet.settings import ProxySettings

_LOOPBACK = "127.0.0.1"
_MIB = 2**20
_TYPES = "type.googleapis.com/envoy"
_SERVICE = "inference.GRPCInferenceService"
_STREAM = "ModelStreamInfer"
_INFER = "ModelInfer"
_GRPC_ASKED = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig",
    _INFER,
)  # fmt: skip
_MODEL = "/v2/models/[^/]+(/versions/[^/]+)?"
_HTTP_ASKED = f"/v2(/health/(live|ready))?|{_MODEL}(/(ready|config|infer|generate))?"
_HTTP_STREAM = f"{_MODEL}/generate_stream"
# What 24.10 says over gRPC while it ends, as NOT_FOUND; an unknown name is told in other words.
_ENDING = "has no available versions"


class Service(NamedTuple):
    """One of the two ways to ask a replica: its name in Envoy's statistics, and the protocol."""

    cluster: str
    is_grpc: bool


GRPC = Service("triton_grpc", is_grpc=True)
HTTP = Service("triton_http", is_grpc=False)


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


def bootstrap(settings: ProxySettings, listen: Listen, endpoints: Endpoints) -> dict[str, Any]:
    """The configuration, for `reasons.yaml_of`: numbers that somebody chose carry their reason."""
    return {
        "node": {"id": "triptych", "cluster": "triptych"},
        "admin": {"address": _address(_LOOPBACK, listen.admin_port)},
        "stats_config": {
            "histogram_bucket_settings": [
                {"match": {"suffix": "_rq_time"}, "buckets": settings.latency_edges_ms}
            ]
        },
        "static_resources": {
            "listeners": [
                _listener("grpc", listen.host, listen.grpc_port, _grpc_manager(settings)),
                _listener("http", listen.host, listen.http_port, _http_manager(settings)),
                _listener("metrics", listen.host, listen.metrics_port, _metrics_manager()),
            ],
            "clusters": [
                _replicas(GRPC, settings, endpoints),
                _replicas(HTTP, settings, endpoints),
                {
                    "name": "admin",
                    "type": "STATIC",
                    "load_assignment": _assignment("admin", [(_LOOPBACK, listen.admin_port)]),
                },
            ],
        },
    }


def assignment(service: Service, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """What an endpoint file holds: the hosts and ports of the replicas that may be asked."""
    found = _assignment(service.cluster, addresses)
    return {"resources": [_typed("config.endpoint.v3.ClusterLoadAssignment", **found)]}


def _assignment(cluster: str, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"{_TYPES}.{name}", **fields}


def _filter(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"envoy.filters.{name}", "typed_config": _typed(kind, **fields)}


def _listener(name: str, host: str, port: int, manager: Mapping[str, Any]) -> dict[str, Any]:
    kind = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    connections = _filter("network.http_connection_manager", kind, stat_prefix=name, **manager)
    return {
        "name": name,
        "address": _address(host, port),
        "filter_chains": [{"filters": [connections]}],
    }


def _grpc_manager(settings: ProxySettings) -> dict[str, Any]:
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
                _route({"safe_regex": {"regex": f"{path}({asked})"}}, GRPC, settings, retriable),
                _route({"prefix": "/grpc.health.v1.Health/"}, GRPC, settings, retriable),
            ],
            settings,
            filters=[statistics],
        ),
        "codec_type": "HTTP2",
        "http2_protocol_options": {
            "connection_keepalive": {
                "interval": _seconds(settings.keepalive_s),
                "timeout": _seconds(settings.keepalive_timeout_s),
            }
        },
    }


def _http_manager(settings: ProxySettings) -> dict[str, Any]:
    retriable = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
    }
    return _manager(
        [
            _route({"safe_regex": {"regex": _HTTP_STREAM}}, HTTP, settings, None),
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
        "stream_idle_timeout": Because(
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
) -> dict[str, Any]:
    """One kind of request; what cannot be sent again passes without being held."""
    route: dict[str, Any] = {
        "cluster": service.cluster,
        "timeout": Because("0s", "the client's deadline counts; Envoy's own 15 s would cut it"),
    }
    if service.is_grpc:
        route["max_stream_duration"] = {
            "grpc_timeout_header_max": Because("0s", "the client's deadline as it is, all tries")
        }
    if retriable is None:
        if settings.affinity is not None:
            route["hash_policy"] = [{"header": {"header_name": settings.affinity}}]
        kind = "extensions.filters.http.buffer.v3.BufferPerRoute"
        streams = {"envoy.filters.http.buffer": _typed(kind, disabled=True)}
        return {"match": match, "route": route, "typed_per_filter_config": streams}
    route["retry_policy"] = {
        **retriable,
        "num_retries": settings.retries,
        "retry_back_off": {"base_interval": _seconds(settings.least_backoff_s)},
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": _typed(
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


def _replicas(service: Service, settings: ProxySettings, endpoints: Endpoints) -> dict[str, Any]:
    protocol = "http2_protocol_options" if service.is_grpc else "http_protocol_options"
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    most = settings.most_at_once
    return {
        "name": service.cluster,
        **_discovery(service, settings, endpoints),
        "connect_timeout": _seconds(settings.connect_s),
        **balancing(settings),
        "typed_extension_protocol_options": {
            f"envoy.{kind}": _typed(kind, explicit_http_config={protocol: {}})
        },
        "ignore_health_on_host_removal": Because(
            True, "a replica that was taken out gets nothing more, also while it is healthy"
        ),
        "close_connections_on_host_health_failure": Because(
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
            "dns_refresh_rate": _seconds(settings.dns_refresh_s),
            "load_assignment": _assignment(service.cluster, [(endpoints.host, port)]),
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
            "reuse_connection": Because(
                False, "a server that is told to stop waits for open connections before it does"
            ),
        }
    return {
        "interval": _seconds(settings.check_interval_s),
        "no_traffic_interval": _seconds(settings.check_interval_s, explained=False),
        "timeout": _seconds(settings.check_timeout_s),
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
        "base_ejection_time": _seconds(settings.eject_s),
        "max_ejection_percent": settings.eject_percent,
    }


def _seconds(setting: Because, *, explained: bool = True) -> Because | str:
    text = f"{setting.value:g}s"
    return Because(text, setting.reason) if explained else text


def _bytes(setting: Because) -> Because:
    return Because(setting.value * _MIB, setting.reason)
