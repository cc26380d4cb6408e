"""Envoy's whole configuration as plain data: gRPC, HTTP and metrics in front of replicas.

What a balancer must not spread over replicas has no route: a server's statistics, its shared memory
and its repository are asked of that server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.base.explained import Because
from triptych.serving.fleet.clusters import (
    CANDIDATES,
    GRPC,
    HTTP,
    Endpoints,
    Mirror,
    Service,
    address,
    assigned,
    candidate,
    replicas,
    seconds,
    typed,
)
from triptych.serving.fleet.settings import ProxySettings

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
    mirror: Mirror | None = None,
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
                Because(
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
            "default_value": Because(
                {"numerator": round(mirror.share * _MILLION), "denominator": "MILLION"},
                f"{mirror.share:g} of the requests are asked of the candidate, too; nobody waits "
                "for it, and its answers are thrown away",
            )
        },
        "disable_shadow_host_suffix_append": Because(
            True, "Envoy would ask for another host name than the client did"
        ),
    }


def _bytes(setting: Because) -> Because:
    return Because(setting.value * _MIB, setting.reason)
