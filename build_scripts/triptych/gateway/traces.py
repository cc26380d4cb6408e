"""Spans of the gateway in the traces of its callers, in the format of OpenTelemetry."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_NAMES = ("traceparent", "tracestate")
_EXPORT_S = 3.0
"""Maximum time to send spans, by which a missing collector delays the end of the gateway."""


class RequestTrace:
    """Trace of a request, from its beginning to `end`.

    Attributes:
        trace_id: Id of the trace, 32 hexadecimal digits; of the caller's, if it has one.
        headers: Headers for requests to the server. They are empty if the trace is not sampled,
            because Triton records every request that has a `traceparent`.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else secrets.token_hex(16)
        passed: dict[str, str] = {}
        if context.trace_flags.sampled:
            _PROPAGATOR.inject(passed, set_span_in_context(span))
        self.headers = tuple(passed.items())

    def end(self, status: int) -> None:
        """End the span of the gateway with the HTTP status of the response."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class RequestTracer:
    """Maker of traces; without an exporter it only continues those of callers.

    Args:
        tracer: Tracer of OpenTelemetry; by default one that exports no spans.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = NoOpTracer() if tracer is None else tracer

    def start(self, name: str, headers: Mapping[bytes, bytes]) -> RequestTrace:
        """Return the trace of a request with these headers; `name` has no text of it."""
        given = {
            each: headers[each.encode()].decode("latin-1")
            for each in _NAMES
            if each.encode() in headers
        }
        context = _PROPAGATOR.extract(given)
        return RequestTrace(self._tracer.start_span(name, context, SpanKind.SERVER))


def export_to(url: str, rate: int) -> RequestTracer:
    """Return a tracer whose spans are sent to a collector, in a thread of its own.

    Args:
        url: Address of an OTLP collector over HTTP, with its path.
        rate: Number of requests without a trace of their caller of which one is traced.
    """
    # Loads requests and protobuf, which a gateway without traces does not need.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        ParentBasedTraceIdRatio(1 / rate), Resource.create({"service.name": "triptych-gateway"})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_S)))
    return RequestTracer(provider.get_tracer("triptych.gateway"))
