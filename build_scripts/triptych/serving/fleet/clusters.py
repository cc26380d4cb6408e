"""Envoy's clusters: the replicas, and a candidate that gets copies of their requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.explained import Because
from triptych.serving.fleet.balancing import balancing
from triptych.serving.fleet.settings import ProxySettings

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
            "reuse_connection": Because(
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


def seconds(setting: Because, *, explained: bool = True) -> Because | str:
    """A duration as Envoy writes it; without its reason where that stands beside it."""
    text = f"{setting.value:g}s"
    return Because(text, setting.reason) if explained else text
