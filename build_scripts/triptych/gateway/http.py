"""ASGI endpoints with JSON bodies: limits, deadlines, cancellation of abandoned work, metrics."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from triptych.client import InferenceError
from triptych.client.flows import CALL_HEADERS
from triptych.gateway import MAX_BODY_MIB, MAX_ITEMS
from triptych.gateway.errors import (
    CLIENT_CLOSED,
    OPENAI,
    ApiError,
    ErrorFormat,
    as_json,
    from_inference,
    from_validation,
)
from triptych.gateway.keys import CALLER, Keys
from triptych.gateway.traces import RequestTracer


class Body(BaseModel):
    """Body of a request. An unknown field is an error, because it could change the answer.

    Null, the default of the original API, and a value that asks for what happens anyway are
    accepted: a field that has only these has a type such as `No`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)


def _whole(given: object) -> object:
    if isinstance(given, list):
        return [_whole(each) for each in given] if float in set(map(type, given)) else given
    return int(given) if isinstance(given, float) and given.is_integer() else given


# A literal takes 0 for False.
No = Annotated[Literal[False], BeforeValidator(lambda given: given is not False)] | None
"""A switch that is off."""
WHOLE = BeforeValidator(_whole)
"""Validator of an integer, or a list of them, after their range: 5.0 is one in JSON."""
One = Annotated[int, Field(ge=1, le=1), WHOLE] | None
"""A number of answers."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        body_bytes: Maximum size of a body.
        body_s: Maximum time to receive a body, in seconds.
        items: Maximum number of texts, pairs or images.
    """

    body_bytes: int = MAX_BODY_MIB << 20
    body_s: float = 30.0
    items: int = MAX_ITEMS

    def check_items(self, field_name: str, count: int) -> None:
        """Count the items of a request; raise `ApiError` if it has none or too many."""
        if not 1 <= count <= self.items:
            raise ApiError(
                413 if count else 422,
                "invalid_value",
                f"`{field_name}` must have 1 to {self.items} elements. Given: {count}. "
                + ("Send several requests." if count else "Send at least one."),
                param=field_name,
            )
        caller = CALLER.get()
        if caller is not None:
            caller.take_items(count)


class GatewayMetrics:
    """Prometheus metrics of the gateway, without texts and without names of clients."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "triptych_gateway_requests",
            "Requests by endpoint and HTTP status; 499: the client disconnected.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "triptych_gateway_request_seconds",
            "Time from the first byte of a request to the last of its response.",
            ("endpoint",),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "triptych_gateway_in_flight", "Requests in flight.", registry=self.registry
        )
        self.items = Counter(
            "triptych_gateway_items",
            "Texts, pairs and images answered, by pipeline.",
            ("pipeline",),
            registry=self.registry,
        )


@dataclass(frozen=True)
class Reply:
    """Content of a response that is not JSON of plain data, or has another status."""

    content: bytes
    media_type: str = "application/json"
    status: int = 200


@dataclass(frozen=True)
class Stream:
    """Response of server-sent events, each sent at once; closing `events` ends their work."""

    events: AsyncIterator[bytes]


Handler = Callable[..., Awaitable[object]]
Marked = TypeVar("Marked", bound=Handler)
Result = TypeVar("Result")
OPERATIONS = "operations"
"""Attribute of a method with the operations that it handles."""


async def _unbound(*_: object, **__: object) -> None:
    raise NotImplementedError


@dataclass(frozen=True)
class Operation:
    """One method of one path. As a decorator it marks a method of `Endpoints` as its handler.

    Attributes:
        path: Path with the names of its parameters in braces.
        result: Type of the result, for the OpenAPI document.
        rows: Name of the field with the rows, to which the row of an error refers.
        example: Example of a body.
        errors: Format of errors.
        is_open: Whether it needs no key.
        streams: Whether the response may be server-sent events.
        media_type: Media type of the response.
        summary: Purpose; the first line of the docstring of a method.
        tag: Group of the operation in the OpenAPI document.
        handler: Called with the body, if there is one, and the parameters of the path.
        body: Type of the body, which is that of the argument `body` of a method; None for GET.
    """

    path: str
    result: type[BaseModel] | None = None
    rows: str = ""
    example: Mapping[str, object] = field(default_factory=dict)
    errors: ErrorFormat = OPENAI
    is_open: bool = False
    streams: bool = False
    media_type: str = "application/json"
    summary: str = ""
    tag: str = ""
    handler: Handler = _unbound
    body: type[BaseModel] | None = None

    def __call__(self, handler: Marked) -> Marked:
        vars(handler).setdefault(OPERATIONS, []).append(self)
        return handler

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


@dataclass(frozen=True)
class Shared:
    """Limits, metrics, keys, access log and traces of all endpoints.

    Attributes:
        keys: Keys of the callers; None if every client is served.
        log: Called with each line of the access log; None for none.
        tracer: Maker of the traces of requests.
        origins: Origins of web pages that may read responses; ``*`` for all.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    keys: Keys | None = None
    log: Callable[[str], None] | None = None
    tracer: RequestTracer = field(default_factory=RequestTracer)
    origins: Sequence[str] = ()


class EndpointApp:
    """ASGI application of one operation."""

    def __init__(self, operation: Operation, shared: Shared) -> None:
        self._operation = operation
        self._name = f"{operation.method} {operation.path}"
        self._shared = shared
        self._limits = shared.limits
        self._metrics = shared.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        self._metrics.in_flight.inc()
        status = CLIENT_CLOSED
        received = dict(scope["headers"])
        trace = self._shared.tracer.start(self._name, received)
        CALL_HEADERS.set(trace.headers)
        CALLER.set(None)  # a pipelined request has the context of the one before it
        try:
            reply, headers = await self._reply(scope, receive, received)
            headers["x-request-id"] = trace.trace_id
            if isinstance(reply, Stream):
                events = _send_events(send, reply.events, headers)
                if await _unless_disconnected(events, receive):
                    status = 200
            elif reply is not None:
                await self._send(send, reply, headers)
                status = reply.status
        finally:
            trace.end(status)
            seconds = time.perf_counter() - began
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(self._operation.path, status).inc()
            self._metrics.seconds.labels(self._operation.path).observe(seconds)
            if self._shared.log is not None:
                self._shared.log(self._log_line(status, seconds, trace.trace_id))

    def _log_line(self, status: int, seconds: float, trace_id: str) -> str:
        """Return a line of the access log, which has no text of a request."""
        caller = CALLER.get()
        values = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "method": self._operation.method,
            "endpoint": self._operation.path,
            "status": status,
            "seconds": round(seconds, 6),
            "key": None if caller is None else caller.name,
            "trace_id": trace_id,
        }
        return to_json(values).decode()

    async def _reply(
        self, scope: Scope, receive: Receive, headers: Mapping[bytes, bytes]
    ) -> tuple[Reply | Stream | None, dict[str, str]]:
        """Return the response and its own headers; no response if the client disconnected."""
        operation = self._operation
        try:
            if self._shared.keys is not None and not operation.is_open:
                caller = self._shared.keys.find(headers.get(b"authorization", b""))
                CALLER.set(caller)
                caller.take_request()
            arguments: list[object] = []
            if operation.body is not None:
                raw = await self._read(receive, headers)
                if raw is None:
                    return None, {}
                arguments.append(operation.body.model_validate_json(raw))
            result = await _unless_disconnected(
                operation.handler(*arguments, **scope.get("path_params", {})), receive
            )
            if result is None:
                return None, {}
            return (result if isinstance(result, Reply | Stream) else Reply(to_json(result))), {}
        except ApiError as caught:
            error = caught
        except ValidationError as caught:
            error = from_validation(caught)
        except InferenceError as caught:
            error = from_inference(caught, operation.rows)
        except asyncio.CancelledError:
            raise
        except Exception as caught:
            # Without the message, which may have a text of the request.
            print(f"error: {type(caught).__name__}", file=sys.stderr)
            traceback.print_tb(caught.__traceback__)
            error = ApiError(
                500,
                "internal",
                f"{type(caught).__name__} in the gateway. This is a bug of the gateway.",
            )
        body = to_json(operation.errors.body(error))
        return Reply(body, status=operation.errors.status(error)), error.headers

    async def _read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the body; None if the client disconnected.

        Raises:
            ApiError: The body is too large or too slow, or it is not JSON or is compressed.
        """
        limit = self._limits.body_bytes
        for header, wanted in (
            (b"content-type", b"application/json"),
            (b"content-encoding", b"identity"),
        ):
            given = headers.get(header, wanted).partition(b";")[0].strip().lower()
            if given != wanted:
                raise ApiError(
                    415,
                    "unsupported_media_type",
                    f"`{header.decode()}` must be {wanted.decode()}. Given: "
                    f"{as_json(given.decode('latin-1'))}. Send JSON that is not compressed.",
                    closes=True,
                )
        stated = headers.get(b"content-length", b"0")
        size = int(stated) if stated.isdigit() else 0
        if size <= limit:
            try:
                body = await asyncio.wait_for(_receive(receive, limit), self._limits.body_s)
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    "body_too_slow",
                    f"The body must arrive within {self._limits.body_s:g} s. Send it faster.",
                    closes=True,
                ) from None
            if body is None or len(body) <= limit:
                return body
            size = len(body)
        raise ApiError(
            413,
            "body_too_large",
            f"The body must have at most {limit} bytes. Given: {size} or more. "
            "Send several requests.",
            closes=True,
        )

    async def _send(self, send: Send, reply: Reply, headers: dict[str, str]) -> None:
        sent = {
            "content-type": reply.media_type,
            "content-length": str(len(reply.content)),
            "x-content-type-options": "nosniff",
            **headers,
        }
        pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": pairs})
        await send({"type": "http.response.body", "body": reply.content})


async def _send_events(
    send: Send, events: AsyncIterator[bytes], headers: Mapping[str, str]
) -> bool:
    """Send all events, and return True."""
    sent = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
    pairs = [(name.encode(), value.encode()) for name, value in (sent | dict(headers)).items()]
    await send({"type": "http.response.start", "status": 200, "headers": pairs})
    try:
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    finally:
        if isinstance(events, AsyncGenerator):  # also if the client disconnects
            await events.aclose()
    await send({"type": "http.response.body", "body": b""})
    return True


async def _receive(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or its beginning if it has over `limit` bytes; None if the client left."""
    parts: list[bytes] = []
    size = 0
    while size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body"):
            break
    return b"".join(parts)


async def _unless_disconnected(work: Awaitable[Result], receive: Receive) -> Result | None:
    """Return the result of `work`; cancel it and return None if the client disconnects.

    Work is not begun if the client has disconnected already: under overload a gateway reads many
    requests late.
    """
    leaving = asyncio.ensure_future(_disconnected(receive))
    await asyncio.sleep(0)
    working = asyncio.ensure_future(work)
    try:
        if not leaving.done():
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
