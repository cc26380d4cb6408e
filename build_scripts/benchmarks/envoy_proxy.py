"""Envoy in front of one server, with a filter that limits overload.

The settings of the filters are Envoy's defaults, except where a comment says why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.local_envoy import envoy_command
from benchmarks.servers import HOST, run_server
from triptych.serving.ports import reserve_ports

_EXTENSIONS = "type.googleapis.com/envoy.extensions."
_HTTP2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
_NO_LIMIT = 1_000_000


def adaptive_concurrency() -> dict[str, Any]:
    """Return the filter that limits requests in flight by their latency."""
    controller = {
        "concurrency_limit_params": {"concurrency_update_interval": "0.1s"},
        # Envoy's default numbers. With 32 requests in flight instead of 3 while it measures the
        # lowest latency, the limit rose so far that no request was answered in time.
        "min_rtt_calc_params": {"interval": "60s", "request_count": 50, "min_concurrency": 3},
    }
    return _filter("adaptive_concurrency", {"gradient_controller_config": controller})


def admission_control() -> dict[str, Any]:
    """Return the filter that refuses a part of the requests if others failed.

    It refuses up to 95 % of them instead of 80 %, because a fifth of a heavy load is still more
    than the server can do, and it looks back for 5 s instead of 30 s.
    """
    settings = {
        "enabled": {"default_value": True},
        "sampling_window": "5s",
        "max_rejection_probability": {"default_value": {"value": 95}},
        "success_criteria": {"grpc_criteria": {"grpc_success_status": [0]}},
    }
    return _filter("admission_control", settings)


def _filter(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    kind = "".join(part.capitalize() for part in name.split("_"))
    config = {"@type": f"{_EXTENSIONS}filters.http.{name}.v3.{kind}", **settings}
    return {"name": f"envoy.filters.http.{name}", "typed_config": config}


@contextmanager
def envoy_in_front(grpc_url: str, limiter: dict[str, Any]) -> Iterator[str]:
    """Run Envoy with a filter in front of a server while the block runs; yield its address."""
    with (
        reserve_ports(HOST, {"grpc": 0, "admin": 0}) as ports,
        tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as folder,
    ):
        config = Path(folder) / "envoy.json"
        made = _make_config(ports["grpc"], ports["admin"], grpc_url, limiter)
        config.write_text(json.dumps(made), encoding="utf-8")
        command = [*envoy_command(config), "--concurrency", "1"]
        with run_server("Envoy", command, ports["admin"], "ready", Path(folder), {}):
            yield f"{HOST}:{ports['grpc']}"


def _make_config(
    port: int, admin_port: int, grpc_url: str, limiter: dict[str, Any]
) -> dict[str, Any]:
    """Return Envoy's configuration for gRPC to one server."""

    def address(host: str, number: int) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": number}}

    # The deadline of a gRPC client comes in a header. Envoy ends the request a little earlier: of a
    # request that its client ends, the filters do not learn that it failed.
    timeouts = {
        "timeout": "0s",
        "max_stream_duration": {
            "grpc_timeout_header_max": "0s",
            "grpc_timeout_header_offset": "0.05s",
        },
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "triton", **timeouts}}
    router = _filter("router", {})
    manager = {
        "@type": f"{_EXTENSIONS}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}],
        },
        "http_filters": [limiter, router],
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    host, _, server_port = grpc_url.rpartition(":")
    endpoint = {"endpoint": {"address": address(host, int(server_port))}}
    http = f"{_EXTENSIONS}upstreams.http.v3.HttpProtocolOptions"
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _NO_LIMIT)
    cluster = {
        "name": "triton",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {"@type": http, **_HTTP2},
        },
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {
            "cluster_name": "triton",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    listener = {
        "name": "grpc",
        "address": address(HOST, port),
        "filter_chains": [{"filters": [network]}],
    }
    return {
        "admin": {"address": address(HOST, admin_port)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }
