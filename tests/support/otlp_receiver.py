"""A collector of OpenTelemetry: OTLP over HTTP, as protobuf and as JSON."""

import base64
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import openai
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.processes import eventually, serving_http

CALLER = "00f067aa0ba902b7"
STEPS = ("preprocess", "core", "postprocess")


class Span(NamedTuple):
    """A span; times are nanoseconds since 1970, `events` their times by name."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: dict[str, int]


def _read_spans(body: bytes, *, is_json: bool) -> Iterator[Span]:
    """Yield the spans of a request; ids in JSON are hexadecimal, and not base64 as in protobuf."""
    request = ExportTraceServiceRequest()
    if is_json:
        json_format.Parse(body, request, ignore_unknown_fields=True)
    else:
        request.ParseFromString(body)

    def name(identity: bytes) -> str:
        return base64.b64encode(identity).decode() if is_json else identity.hex()

    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                values = {each.key: each.value for each in span.attributes}
                yield Span(
                    name(span.trace_id),
                    name(span.span_id),
                    name(span.parent_span_id),
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {key: value.string_value or value.int_value for key, value in values.items()},
                    {event.name: event.time_unix_nano for event in span.events},
                )


@contextmanager
def otlp_receiver() -> Iterator[tuple[str, list[Span]]]:
    """Address of a collector, and the spans that it has received."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = b"".join(self._parts())
            is_json = self.headers["content-type"].startswith("application/json")
            spans.extend(_read_spans(body, is_json=is_json))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def _parts(self) -> Iterator[bytes]:
            if "content-length" in self.headers:
                yield self.rfile.read(int(self.headers["content-length"]))
                return
            while size := int(self.rfile.readline(), 16):  # chunks, as Envoy sends them
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def log_message(self, format: str, *args: object) -> None: ...

    with serving_http(Handler) as address:
        yield f"{address}/v1/traces", spans


def check_trace(address: str, name: str, spans: list[Span]) -> str:
    """Send requests to a gateway whose traces come as `spans`, and check those of two of them.

    Triton drops what it cannot export at once, as on a machine that stands still, so the requests
    are sent again as other traces where spans are missing.

    Args:
        address: Address of the gateway.
        name: Name of its pipeline of embeddings.
        spans: What the collector receives of the gateway and the server.

    Returns:
        Id of the trace of the request that was answered.
    """
    traces: list[tuple[str, str]] = []

    def below(parent: str, trace: str) -> dict[str, Span]:
        """Spans of a trace below another span by name."""
        return {s.name: s for s in spans if (s.trace_id, s.parent_id) == (trace, parent)}

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

        def are_whole(sampled: str, failed: str) -> bool:
            # A replica may export the spans of a request only after its next request.
            client.embeddings.create(model=name, input="without a trace")
            names = [span.name for span in spans if span.trace_id == sampled]
            wanted = {"InferRequest", name, *(f"{name}_{step}" for step in STEPS)}
            is_whole = names.count("compute") >= len(STEPS) and wanted <= {*names}
            return is_whole and bool(below(CALLER, sampled) and below(CALLER, failed))

        def is_traced() -> bool:
            sampled, unsampled, failed = (secrets.token_hex(16) for _ in range(3))
            traces.append((sampled, failed))

            def embed(trace: str, flag: str, **words: Any) -> Any:
                headers = {"traceparent": f"00-{trace}-{CALLER}-{flag}"}
                given = {"model": name, "input": "a private text", "extra_headers": headers}
                return client.embeddings.with_raw_response.create(**{**given, **words})

            for trace, flag in ((sampled, "01"), (unsampled, "00")):
                assert embed(trace, flag).headers["x-request-id"] == trace
            with pytest.raises(openai.BadRequestError) as caught:
                embed(failed, "01", input="", dimensions=9999)
            assert caught.value.request_id == failed
            return eventually(lambda: are_whole(sampled, failed), 30)

        assert eventually(is_traced, 300), [(span.trace_id, span.name) for span in spans]
    sampled, failed = traces[-1]
    # Triton ignores the flag.
    assert {span.trace_id for span in spans} <= {trace for both in traces for trace in both}
    assert "private" not in str(spans)
    endpoint = "POST /v1/embeddings"
    for trace, status in ((sampled, 200), (failed, 400)):
        (request,) = below(CALLER, trace).values()
        assert (request.name, request.attributes["http.response.status_code"]) == (endpoint, status)
    gateway = below(CALLER, sampled)[endpoint]
    ensemble = below(below(gateway.span_id, sampled)["InferRequest"].span_id, sampled)[name]
    steps = below(ensemble.span_id, sampled)
    assert steps.keys() == {f"{name}_{step}" for step in STEPS}
    for step in steps.values():
        compute = below(step.span_id, sampled)["compute"]
        assert step.events["QUEUE_START"] <= compute.events["COMPUTE_START"]
        assert compute.events["COMPUTE_START"] <= compute.events["COMPUTE_END"]
        assert ensemble.began <= step.began <= step.ended <= ensemble.ended
    return sampled
