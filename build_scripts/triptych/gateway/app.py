"""The ASGI application: table of operations, OpenAPI document, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from triptych.client import InferenceError
from triptych.gateway.chat import Generate
from triptych.gateway.cohere import Cohere
from triptych.gateway.errors import OPENAI, TEI, ApiError
from triptych.gateway.http import EndpointApp, Operation, Reply, Shared
from triptych.gateway.openai import OpenAi
from triptych.gateway.pages import make_pages
from triptych.gateway.pipelines import Endpoints, Pipelines
from triptych.gateway.tasks import Tasks
from triptych.gateway.tei import Tei

_SCHEMAS = "#/components/schemas/"
_HEALTH_TIMEOUT_S = 5.0


class Operator(Endpoints):
    """Endpoints for operators: health, metrics, and the OpenAPI document."""

    tag = "Operation"

    def __init__(self, pipelines: Pipelines, shared: Shared) -> None:
        super().__init__(pipelines, shared)
        self._registry = shared.metrics.registry
        self.document = b""

    @Operation("/health", errors=TEI, is_open=True)
    async def health(self) -> Reply:
        """Check all pipelines: 200 if the server has them."""
        names = self._pipelines.names()
        calls = [
            self._pipelines.find(name).client.ready(timeout_s=_HEALTH_TIMEOUT_S) for name in names
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, ready in zip(names, answers, strict=True):
            if isinstance(ready, BaseException) and not isinstance(ready, InferenceError):
                raise ready
            if ready is not True:
                raise ApiError(
                    503, "pipeline_not_ready", f"`{name}` is not ready.", retry_after_s=1.0
                )
        return Reply(b"{}")

    @Operation("/metrics", errors=TEI, media_type="text/plain")
    async def metrics(self) -> Reply:
        """Return Prometheus metrics."""
        return Reply(generate_latest(self._registry), CONTENT_TYPE_LATEST)

    @Operation("/openapi.json")
    async def openapi(self) -> Reply:
        """Return this document."""
        return Reply(self.document)


_ENDPOINTS: tuple[type[Endpoints], ...] = (OpenAi, Generate, Cohere, Tasks, Tei)


def make_app(pipelines: Pipelines, shared: Shared) -> Starlette:
    """Return the application; its lifespan closes the connections of `pipelines`."""
    operator = Operator(pipelines, shared)
    operations = [
        each
        for endpoints in (*(make(pipelines, shared) for make in _ENDPOINTS), operator)
        for each in endpoints.operations()
    ]
    operations += make_pages(operations)
    operator.document = to_json(describe(operations))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await pipelines.close()

    methods: dict[str, dict[str, EndpointApp]] = {}
    for each in operations:
        methods.setdefault(each.path, {})[each.method] = EndpointApp(each, shared)
    routes = [Route(path, _Methods(apps), methods=list(apps)) for path, apps in methods.items()]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=shared.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-request-id"],
    )
    return Starlette(
        routes=routes,
        middleware=[cors] if shared.origins else None,
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )


class _Methods:
    """ASGI application of a path, with an application for each method."""

    def __init__(self, apps: Mapping[str, EndpointApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps["POST" if scope["method"] == "POST" else "GET"](scope, receive, send)


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = "method" if status == 405 else "path"
    message = f"`{request.method} {request.url.path[:200]}` is no {known} of this gateway."
    made = ApiError(status, f"unknown_{known}", f"{message} See /openapi.json.")
    headers = getattr(error, "headers", None)
    return Response(to_json(OPENAI.body(made)), status, headers, "application/json")


def _contents(operation: Operation, references: Mapping[Any, Any]) -> dict[str, object]:
    """Return the contents of a result by their media types."""
    is_json = operation.media_type == "application/json"
    schema: object = {"type": "object" if is_json else "string"}
    if operation.result is not None:
        schema = references[operation.result, "serialization"]
    contents: dict[str, object] = {operation.media_type: {"schema": schema}}
    if operation.streams:
        contents["text/event-stream"] = {"schema": {"type": "string"}}
    return contents


def describe(operations: Sequence[Operation]) -> dict[str, object]:
    """Return the OpenAPI document of operations."""
    types = {
        (each, mode)
        for operation in operations
        for each, mode in ((operation.body, "validation"), (operation.result, "serialization"))
        if each is not None
    }
    ordered = sorted(types, key=lambda pair: (pair[0].__module__, pair[0].__name__, pair[1]))
    references, schemas = models_json_schema(ordered, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, object]] = {}
    for operation in operations:
        described: dict[str, object] = {
            "summary": operation.summary,
            "tags": [operation.tag],
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"\{(\w+)\}", operation.path)
            ],
            "responses": {
                "200": {"description": "Result", "content": _contents(operation, references)},
                "default": {
                    "description": "Error",
                    "content": {"application/json": {"schema": operation.errors.schema}},
                },
            },
        }
        if operation.body is not None:
            schema = references[operation.body, "validation"]
            content = {"schema": schema, "example": operation.example}
            described["requestBody"] = {"required": True, "content": {"application/json": content}}
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych gateway", "version": version("triptych")},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
