"""gRPC channels: TLS, keep-alive, balancing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from triptych.base.errors import UserError
from triptych.client.address import Target

# The most a gRPC message can carry, and what Triton itself allows.
MAX_MESSAGE_BYTES = 2**31 - 1
# After a restart of the server gRPC's own pause before it connects again grows to two minutes,
# and every call fails until then.
_MAX_RECONNECT_PAUSE_MS = 2_000
# Each server in its turn; and one of several that fails half of its requests, as one that is going
# down does on releases before 25.05 for two seconds, is left out for a second or more. What is sent
# again is not gRPC's to say (`retry`): Triton calls a full queue UNAVAILABLE, too, and a server
# that goes down NOT_FOUND, and only their messages tell which it is.
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
        root_certificates: PEM file of the authorities that sign server certificates. None: those
            of gRPC.
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

    def credentials(self) -> Any:
        """Return gRPC credentials; raise a `UserError` if a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls.root_certificates", self.root_certificates),
            private_key=_read("tls.key", self.key),
            certificate_chain=_read("tls.certificate", self.certificate),
        )


@dataclass(frozen=True)
class KeepAlive:
    """Detection of connections whose other end vanished.

    The default pings slightly less often than every 300 s, because servers may close connections
    that
    ping more often. It also makes TCP drop a connection whose data is not acknowledged within
    `timeout_s`; otherwise that takes a quarter of an hour.

    Attributes:
        interval_s: Interval in seconds between pings on an idle connection.
        timeout_s: Maximum time in seconds for a pong, or for TCP's acknowledgment of data.
        without_calls: Whether to ping without calls in flight; the server must permit it.
    """

    interval_s: float = 330.0
    timeout_s: float = 20.0
    without_calls: bool = False


def open_channel(
    library: Any,
    target: Target,
    credentials: Any,
    server_name: str | None,
    keep_alive: KeepAlive | None,
    max_message_bytes: int,
) -> Any:
    """Return a channel that connects at the first call.

    Args:
        library: `grpc` for threads, `grpc.aio` for the running event loop.
        target: Servers.
        credentials: Credentials of `Tls`; None for plain text.
        server_name: See `Tls.server_name`.
        keep_alive: Keep-alive pings; None for none.
        max_message_bytes: Maximum size of a request or response in bytes.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_PAUSE_MS),
        # Once a connection breaks, a name is looked up again as soon as that.
        ("grpc.dns_min_time_between_resolutions_ms", _MAX_RECONNECT_PAUSE_MS),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]
    if keep_alive is not None:
        options += [
            ("grpc.keepalive_time_ms", int(keep_alive.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(keep_alive.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", int(keep_alive.without_calls)),
        ]
    if target.is_loopback:
        # gRPC would send even this machine's own traffic to the proxy of the environment.
        options.append(("grpc.enable_http_proxy", 0))
    if target.authority:
        options.append(("grpc.default_authority", target.authority))
    if credentials is None:
        return library.insecure_channel(target.uri, options=options)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return library.secure_channel(target.uri, credentials, options=options)


def _read(name: str, file: Path | None) -> bytes | None:
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
