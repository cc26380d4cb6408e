"""A real Envoy in front of a real server, and requests to it."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from triptych.base.explained import ExplainedValue
from triptych.serving.fleet.access import Access
from triptych.serving.fleet.envoy import Listen, Mirror, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports

NAME, OTHER, STEP = "minilm_packed", "minilm_bucketed", "minilm_packed_core"
SERVICE = "/inference.GRPCInferenceService"
LOOPBACK = "127.0.0.1"
TEXT = b"\5\0\0\0hello"


@contextmanager
def envoy(
    server: Any,
    folder: Path,
    *pipelines: str,
    max_mib: int = 1,
    access: Access | None = None,
    gateway_socket: Path | None = None,
    mirror: Mirror | None = None,
    limits: Mapping[str, float] | None = None,
) -> Iterator[Proxy]:
    """Envoy for `pipelines` of the server, with these limits in place of its own."""
    names = ("grpc_port", "http_port", "metrics_port")
    settings = proxy_settings(replicas=1, max_request_mib=max_mib)
    changed = {name: ExplainedValue(value, "a test") for name, value in (limits or {}).items()}
    proxy = Proxy(
        replace(settings, **changed),
        Listen(LOOPBACK, **reserve_ports(LOOPBACK, dict.fromkeys(names, 0))),
        log_file=folder / "envoy.log",
        access=access,
        gateway_socket=gateway_socket,
        mirror=mirror,
    )
    try:
        proxy.start([server], [*pipelines])
        assert proxy.wait_healthy([server], 60)
        yield proxy
    finally:
        proxy.stop()


def infer_request(model: str = NAME, raw: bytes = TEXT, *, rows: int = 1) -> Any:
    """A request of `rows` texts over gRPC."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw * rows])
    request.inputs.add(name="text", datatype="BYTES", shape=[rows, 1])
    return request


def send_http(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, str, dict[str, str]]:
    """Return status, text and headers of the response; closes the connection."""
    try:
        connection.request("POST" if body else "GET", path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()
