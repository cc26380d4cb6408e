"""Connections to servers: addresses, gRPC channels with TLS and keep-alive, and their renewal."""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc

from triptych.base.errors import UserError
from triptych.client.errors import CanceledError

_FOREIGN_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")
_NAMED = "dns:///"


@dataclass(frozen=True)
class Target:
    """One server or several equal servers.

    Attributes:
        uri: Target for gRPC.
        shown: Address as the user gave it.
        authority: Name of the servers in requests; empty if gRPC derives it.
        is_several: Whether the target is meant to be several servers.
        is_loopback: Whether the target is this machine, without asking a name server.
        is_named: Whether a name server provides the addresses, which may change.
    """

    uri: str
    shown: str
    authority: str = ""
    is_several: bool = False
    is_loopback: bool = False
    is_named: bool = False


def read_target(url: str | Sequence[str]) -> Target:
    """Return the target of ``host:port``, ``dns:///name:port`` or several addresses.

    Several addresses are a list, or separated by commas.

    Raises:
        UserError: The text is none of these.
    """
    addresses = url.split(",") if isinstance(url, str) else list(url)
    addresses = [address.strip() for address in addresses]
    if any(":" not in each or each.startswith(_FOREIGN_SCHEMES) for each in addresses or [""]):
        raise UserError(
            "url",
            "must be the host and port of the server's gRPC endpoint",
            given=", ".join(addresses),
            remedy="Give host:port, and use `tls` for encryption",
        )
    if len(addresses) == 1:
        address = addresses[0]
        several, local = address.startswith("dns:"), is_loopback(address)
        named = several or not (local or _ip(address) or "/" in address)
        return Target(address, address, is_several=several, is_loopback=local, is_named=named)
    plain = [_loopback_as_number(address) for address in addresses]
    versions = {ip.version if (ip := _ip(address)) else 0 for address in plain}
    if 0 in versions or len(versions) > 1:
        raise UserError(
            "url",
            "must have IP addresses of one version if it has several addresses",
            given=", ".join(addresses),
            remedy=f"Use one name with all addresses of the servers: {_NAMED}name:port",
        )
    return Target(
        f"ipv{versions.pop()}:{','.join(plain)}",
        ",".join(addresses),
        authority=plain[0],
        is_several=True,
        is_loopback=all(map(is_loopback, plain)),
    )


def check_single(url: str, purpose: str) -> None:
    """Raise a `UserError` if `url` has several servers; `purpose` says what needs a single one."""
    if read_target(url).is_several:
        raise UserError(
            "url",
            f"must be a single server to {purpose}",
            given=url,
            remedy="Give one of them",
        )


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is this machine, without asking a name server."""
    ip = _ip(address)
    return _host(address) == "localhost" if ip is None else ip.is_loopback


def _loopback_as_number(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else address


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_host(address))
    except ValueError:
        return None


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum size of a gRPC message in bytes, and Triton's own limit."""
# After a restart of the server gRPC's own pause before it connects again grows to two minutes,
# and every call fails until then.
_MAX_RECONNECT_PAUSE_MS = 2_000
# gRPC uses the servers in turn and skips one that fails half of its requests for a second or more.
# Before 25.05, a server that shuts down fails its requests for two seconds. `retry` decides what is
# sent again, not gRPC: Triton reports a full queue as UNAVAILABLE and a shutdown as NOT_FOUND,
# so only the message gives the cause.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [
        {
            "outlier_detection_experimental": {
                "interval": "0.25s",
                "baseEjectionTime": "1s",
                "maxEjectionTime": "10s",
                "maxEjectionPercent": 50,
                "failurePercentageEjection": {
                    "threshold": 50,
                    "enforcementPercentage": 100,
                    "minimumHosts": 2,
                    "requestVolume": 3,
                },
                "childPolicy": [{"round_robin": {}}],
            }
        }
    ]
}


@dataclass(frozen=True)
class Tls:
    """Encryption and authentication.

    Attributes:
        root_certificates: PEM file of the authorities that sign server certificates. None: those of
            gRPC.
        certificate: PEM file of the client's certificate, for servers that require one.
        key: PEM file of the private key of `certificate`.
        server_name: Expected name in the server's certificate, if it is not the host of the URL.
    """

    root_certificates: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UserError(
                "tls",
                "must have both `certificate` and `key`, or neither",
                given="only one of them",
                remedy="Give the other one too",
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials; raise a `UserError` if a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read_pem("tls.root_certificates", self.root_certificates),
            private_key=_read_pem("tls.key", self.key),
            certificate_chain=_read_pem("tls.certificate", self.certificate),
        )


@dataclass(frozen=True)
class Credentials:
    """Encryption and key of clients that are created without `tls` and `headers` of their own.

    Attributes:
        tls: Encryption; None for plain text.
        api_key: Key that is sent as ``authorization: Bearer``; None for no key.
    """

    tls: Tls | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


CREDENTIALS: ContextVar[Credentials | None] = ContextVar("credentials", default=None)
"""Credentials of the verb that runs, whose functions create clients by address."""


@dataclass(frozen=True)
class KeepAlive:
    """Detection of connections whose other end vanished.

    The default interval is slightly longer than 300 s, because servers may close connections that
    ping more often. Keep-alive also makes TCP drop a connection whose data is not acknowledged
    within `timeout_s`; otherwise that takes a quarter of an hour.

    Attributes:
        interval_s: Interval in seconds between pings on an idle connection.
        timeout_s: Maximum time in seconds for a pong, or for TCP's acknowledgment of data.
        without_calls: Whether to ping without calls in flight; the server must permit it.
    """

    interval_s: float = 330.0
    timeout_s: float = 20.0
    without_calls: bool = False


class ChannelFactory:
    """Opens the channels of one client; each connects at its first call."""

    def __init__(
        self, target: Target, tls: Tls | None, keep_alive: KeepAlive | None, max_message_bytes: int
    ) -> None:
        """Read the files of `tls` (None: plain text) and collect the options of gRPC.

        Raises:
            UserError: A file cannot be read, or the name in the servers' certificate is unknown.
        """
        self._uri = target.uri
        self._options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_PAUSE_MS),
            # A broken connection makes gRPC resolve the name again, at most this often.
            ("grpc.dns_min_time_between_resolutions_ms", _MAX_RECONNECT_PAUSE_MS),
            ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ]
        if keep_alive is not None:
            self._options += [
                ("grpc.keepalive_time_ms", int(keep_alive.interval_s * 1000)),
                ("grpc.keepalive_timeout_ms", int(keep_alive.timeout_s * 1000)),
                ("grpc.keepalive_permit_without_calls", int(keep_alive.without_calls)),
            ]
        if target.is_loopback:
            # gRPC would send even this machine's own traffic to the proxy of the environment.
            self._options.append(("grpc.enable_http_proxy", 0))
        if target.authority:
            self._options.append(("grpc.default_authority", target.authority))
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        elif tls is not None and target.authority:
            raise UserError(
                "tls.server_name",
                "is required if `url` has several addresses",
                remedy="Give the name in the servers' certificate",
            )
        # Credentials are read once, because channels with equal credentials share connections.
        self._credentials = None if tls is None else tls.credentials()

    def open(self, library: ModuleType) -> grpc.Channel:
        """Return a channel of `grpc` for threads, or of `grpc.aio` for the running event loop."""
        if self._credentials is None:
            return library.insecure_channel(self._uri, options=self._options)
        return library.secure_channel(self._uri, self._credentials, options=self._options)


def _read_pem(name: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(
            name,
            "is not a readable PEM file",
            given=f"{file} ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error


class Opened:
    """A channel with its stub.

    Attributes:
        calls: Number of calls that use it.
        is_interrupted: Whether an interrupt may have left a call in it that never ends: gRPC 1.85
            loses a call in whose start a signal handler raises, and closing the channel then waits
            for ever.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.calls = 0
        self.is_interrupted = False
        self.opened_s = time.monotonic()


class Connection:
    """The newest channel for new calls. An older channel is closed when its last call ends.

    gRPC resolves a name again only when a connection breaks (grpc/grpc#12295), so a new replica
    beside healthy ones would get no requests. A new channel resolves the name and shares the
    connections of the old one, because gRPC has one pool of connections per process.

    Args:
        open_channel: Opens a channel.
        close: Closes a channel that is used no more.
        dns_refresh_s: Age in seconds after which new calls get a new channel; None for never.
    """

    def __init__(
        self,
        open_channel: Callable[[], grpc.Channel],
        close: Callable[[Opened], None],
        dns_refresh_s: float | None,
    ) -> None:
        self._open_channel = open_channel
        self._close = close
        self._dns_refresh_s = dns_refresh_s
        # Reentrant: garbage collection of a generation, on any thread, gives its channel back.
        self._lock = threading.RLock()
        self._opened: list[Opened] = []
        self._drained = False

    def take(self) -> Opened:
        """Return the channel for a call, to be given back at its end.

        Raises:
            CanceledError: The connection was drained.
        """
        with self._lock:
            if self._drained:
                raise CanceledError("The client is closed. Open another.")
            newest = self._opened[-1] if self._opened else None
            if (
                newest is None
                or newest.is_interrupted
                or (
                    self._dns_refresh_s is not None
                    and time.monotonic() - newest.opened_s > self._dns_refresh_s
                )
            ):
                newest = Opened(self._open_channel())
                self._opened.append(newest)
                self._retire()
            newest.calls += 1
            return newest

    def give_back(self, opened: Opened, *, interrupted: bool = False) -> None:
        """Release the channel of a call that ended, or was interrupted: new calls get another."""
        with self._lock:
            opened.calls -= 1
            opened.is_interrupted |= interrupted
            self._retire()

    def drain(self) -> None:
        """Close all channels and open no more."""
        with self._lock:
            self._drained = True
            channels, self._opened = self._opened, []
        for opened in channels:
            self._close(opened)

    def _retire(self) -> None:
        last = self._opened[-1:]
        old = [
            opened
            for opened in self._opened
            if not opened.calls and (opened.is_interrupted or opened not in last)
        ]
        self._opened = [opened for opened in self._opened if opened not in old]
        for opened in old:
            self._close(opened)
