"""Run the gateway with uvicorn: timeouts and limits of connections, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.gateway.app import make_app
from triptych.gateway.http import RequestLimits
from triptych.gateway.pipelines import Pipelines

MAX_CONNECTIONS = 1000
"""Maximum number of connections; another gets the status 503."""

HEADERS_S = 10.0
"""Maximum time to receive the headers of a request, in seconds."""

STALLED_S = 60.0
"""Maximum time in which a client takes no part of a response, in seconds."""

_GRACE_S = 30


class _Protocol(HttpToolsProtocol):  # type: ignore[misc]
    """HTTP/1.1 connection that ends if its headers are slow, or its response is not read."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start(HEADERS_S)
        if len(self.connections) > 2 * MAX_CONNECTIONS:  # beyond the limit of uvicorn, a 503
            transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start(HEADERS_S)

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start(STALLED_S)

    def resume_writing(self) -> None:
        self._stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self, seconds: float) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):  # type: ignore[misc]
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])


def make_server(
    pipelines: Pipelines,
    limits: RequestLimits,
    *,
    host: str,
    port: int,
    on_ready: Callable[[int], None],
) -> uvicorn.Server:
    """Return a server whose `run` ends at SIGTERM or SIGINT; it answers requests in flight first.

    Args:
        pipelines: Pipelines of the gateway.
        limits: RequestLimits of each request.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        on_ready: Called with the port when the gateway listens.
    """
    config = uvicorn.Config(
        make_app(pipelines, limits),
        host=host,
        port=port,
        http=_Protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,  # requests may contain private texts
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return _Server(config, on_ready)
