"""Run the gateway with uvicorn: timeouts and limits of connections, and a clean end."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.base.errors import UserError, print_line
from triptych.container.supervisor import raise_limits
from triptych.gateway import GRACE_S
from triptych.gateway.app import make_app
from triptych.gateway.http import Shared
from triptych.gateway.keys import file_stamps
from triptych.gateway.pipelines import Pipelines

MAX_CONNECTIONS = 1000
"""Maximum number of connections. Another takes the place of the one that has been idle for the
longest time, or gets the status 503 if none is idle."""

HEADERS_S = 10.0
"""Maximum time to receive the headers of a request, in seconds."""

STALLED_S = 60.0
"""Maximum time in which a client takes no part of a response, in seconds."""

_TICKS_PER_LOOK = 20
"""Number of ticks of uvicorn, 0.1 s each, between two looks at the files of certificates."""


@dataclass(frozen=True)
class ServerTls:
    """Certificate of a server.

    Attributes:
        certificate: PEM file of the certificate and its chain.
        key: PEM file of its private key.
        client_ca: PEM file of the authorities of client certificates, which are then required.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else ())]

    def context(self) -> ssl.SSLContext:
        """Return a context for new connections.

        Raises:
            UserError: A file cannot be read, or certificate and key do not fit.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one
            raise UserError(
                "--tls-certificate",
                "must be a PEM file, with its key in --tls-key",
                given=f"{self.certificate} and {self.key} ({error.strerror or error})",
                remedy="Check the paths, and that both belong together",
            ) from error
        return context


class _Protocol(HttpToolsProtocol):  # type: ignore[misc]
    """HTTP/1.1 connection that ends if its headers are slow, or its response is not read."""

    _timer: asyncio.TimerHandle | None = None
    _idle_since = math.inf  # a request is in flight

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start(HEADERS_S)
        if len(self.connections) >= MAX_CONNECTIONS:
            longest = min(self.connections, key=lambda each: each._idle_since)
            if longest._idle_since < math.inf:
                self.connections.discard(longest)  # it would count until it is closed
                longest.transport.abort()
        self._idle_since = time.monotonic()  # uvloop counts milliseconds: too coarse
        if len(self.connections) > 2 * MAX_CONNECTIONS:  # beyond the limit of uvicorn, a 503
            transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start(HEADERS_S)

    def on_headers_complete(self) -> None:
        self._stop()
        self._idle_since = math.inf
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

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
    """Server that reports its port, and takes over new certificates for new connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ServerTls | None,
        context: ssl.SSLContext | None,
        on_ready: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._context = context
        self._stamps = file_stamps(tls.paths) if tls else None
        self._on_ready = on_ready

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        if self._tls is not None and counter % _TICKS_PER_LOOK == 0:
            self._renew(self._tls)
        return bool(await super().on_tick(counter))

    def _renew(self, tls: ServerTls) -> None:
        stamps = file_stamps(tls.paths)
        if stamps == self._stamps or not stamps or self._context is None:
            return
        self._stamps = stamps
        try:
            tls.context()  # A key that does not fit would break the context that is in use.
            self._context.load_cert_chain(tls.certificate, tls.key)
        except (UserError, OSError) as error:
            print_line(f"warning: the certificate is not changed: {error}")


def make_server(
    pipelines: Pipelines,
    shared: Shared,
    *,
    host: str,
    port: int,
    on_ready: Callable[[int], None],
    tls: ServerTls | None = None,
) -> uvicorn.Server:
    """Return a server whose `run` ends at SIGTERM or SIGINT; it answers requests in flight first.

    Args:
        pipelines: Pipelines of the gateway.
        shared: Limits, keys, metrics and access log.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        on_ready: Called with the port when the gateway listens.
        tls: Certificate; None for plain text.

    Raises:
        UserError: A file of `tls` cannot be read.
    """
    raise_limits()
    context = None if tls is None else tls.context()
    config = uvicorn.Config(
        make_app(pipelines, shared),
        host=host,
        port=port,
        http=_Protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,  # the access log of the gateway has no texts
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    return _Server(config, tls, context, on_ready)
