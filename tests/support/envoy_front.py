"""A real Envoy with the configuration of `deploy` in front of a real server, and requests to it."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from benchmarks.local_envoy import LocalEnvoy, local_envoy
from triptych.base.explained import ExplainedValue
from triptych.deploy.envoy import Mirror, proxy_settings

NAME, OTHER, STEP = "minilm_packed", "minilm_bucketed", "minilm_packed_core"
SERVICE = "/inference.GRPCInferenceService"
TEXT = b"\5\0\0\0hello"


@contextmanager
def envoy(
    server: Any,
    folder: Path,
    pipeline: str,
    *,
    max_mib: int = 1,
    mirror: Mirror | None = None,
    limits: Mapping[str, float] | None = None,
) -> Iterator[LocalEnvoy]:
    """Envoy for a pipeline of the server, with these limits in place of its own."""
    settings = proxy_settings(replicas=1, max_request_mib=max_mib)
    changed = {name: ExplainedValue(value, "a test") for name, value in (limits or {}).items()}
    log_file = folder / "envoy.log"
    with local_envoy(
        replace(settings, **changed), [pipeline], [server], log_file=log_file, mirror=mirror
    ) as proxy:
        yield proxy


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
