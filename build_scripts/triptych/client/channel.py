"""Where the server is and how to talk to it (TLS, headers, keep-alive) -> a gRPC channel."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from triptych.errors import UserError

# The most a gRPC message can carry, and what Triton itself allows.
LARGEST_MESSAGE_BYTES = 2**31 - 1
# After a restart of the server gRPC's own pause before it connects again grows to two minutes,
# and every call fails until then.
_LONGEST_RECONNECT_PAUSE_MS = 2_000
_FOREIGN_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")


@dataclass(frozen=True)
class Tls:
    """Encryption, and proof of who is talking.

    Attributes:
        root_certificates: PEM file of the authorities that may have signed the server's
            certificate; None takes those that come with gRPC.
        certificate: PEM file of the client's own certificate, for a server that asks for one.
        key: PEM file of that certificate's private key.
        server_name: name to expect in the server's certificate, where it is not the URL's host.
    """

    root_certificates: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UserError(
                "tls",
                "must have `certificate` and `key` together",
                given="only one of them",
                remedy="Give both, or neither",
            )

    def credentials(self) -> Any:
        """The gRPC credentials of these files; raises a `UserError` where one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls.root_certificates", self.root_certificates),
            private_key=_read("tls.key", self.key),
            certificate_chain=_read("tls.certificate", self.certificate),
        )


@dataclass(frozen=True)
class KeepAlive:
    """How a connection whose other end vanished is noticed.

    The default pings a little less often than every 300 s, since a server may close a connection
    that pings more often. Its presence also lets TCP drop a connection whose data is not
    acknowledged for `timeout_s`; without it that takes a quarter of an hour.

    Attributes:
        interval_s: pause between pings on a connection that is otherwise silent.
        timeout_s: how long an answer, or TCP's acknowledgement of sent data, may take.
        without_calls: ping while no call is under way; the server must permit it.
    """

    interval_s: float = 330.0
    timeout_s: float = 20.0
    without_calls: bool = False


@dataclass(frozen=True)
class Connection:
    """All that is needed to open a channel; the attributes are arguments of `PipelineClient`."""

    url: str = "127.0.0.1:8001"
    tls: Tls | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keep_alive: KeepAlive | None = KeepAlive()
    max_message_bytes: int = LARGEST_MESSAGE_BYTES

    def __post_init__(self) -> None:
        if self.url.startswith(_FOREIGN_SCHEMES) or not self.url:
            raise UserError(
                "url",
                "must be the host and port of the server's gRPC endpoint",
                given=self.url or "nothing",
                remedy="Write host:port, and ask for encryption with `tls`",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """`headers` as gRPC takes them: it refuses capital letters in a name."""
        return tuple((name.lower(), value) for name, value in self.headers.items())

    def open(self) -> Any:
        """A channel for threads; it connects at the first call."""
        if self.tls is None:
            return grpc.insecure_channel(self.url, options=self._options())
        return grpc.secure_channel(self.url, self.tls.credentials(), options=self._options())

    def open_async(self) -> Any:
        """A channel for the running event loop; it connects at the first call."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.url, options=self._options())
        return grpc.aio.secure_channel(self.url, self.tls.credentials(), options=self._options())

    def _options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_PAUSE_MS),
        ]
        if self.keep_alive is not None:
            options += [
                ("grpc.keepalive_time_ms", int(self.keep_alive.interval_s * 1000)),
                ("grpc.keepalive_timeout_ms", int(self.keep_alive.timeout_s * 1000)),
                ("grpc.keepalive_permit_without_calls", int(self.keep_alive.without_calls)),
            ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        if _is_loopback(self.url):
            # gRPC would send even this machine's own traffic to the proxy of the environment.
            options.append(("grpc.enable_http_proxy", 0))
        return options


def _is_loopback(url: str) -> bool:
    host = url.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(name: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UserError(
            name,
            "must be a PEM file that can be read",
            given=f"{file} ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
