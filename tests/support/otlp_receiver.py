"""A collector of OpenTelemetry: OTLP over HTTP, as protobuf and as JSON."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


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


def _from_protobuf(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                values = {each.key: each.value for each in span.attributes}
                yield Span(
                    *(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()),
                    *(span.name, span.start_time_unix_nano, span.end_time_unix_nano),
                    {name: value.string_value or value.int_value for name, value in values.items()},
                    {event.name: event.time_unix_nano for event in span.events},
                )


def _from_json(body: bytes) -> Iterator[Span]:
    for resource in json.loads(body)["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    *(span["traceId"], span["spanId"], span.get("parentSpanId", "")),
                    *(span["name"], int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])),
                    {
                        each["key"]: next(iter(each["value"].values()))
                        for each in span.get("attributes", ())
                    },
                    {each["name"]: int(each["timeUnixNano"]) for each in span.get("events", ())},
                )


@contextmanager
def otlp_receiver() -> Iterator[tuple[str, list[Span]]]:
    """Address of a collector, and the spans that it has received."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_json = self.headers["content-type"].startswith("application/json")
            spans.extend((_from_json if is_json else _from_protobuf)(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()
