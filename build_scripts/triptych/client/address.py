"""Parse server addresses into gRPC targets."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.errors import UserError

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
    if any(not address or address.startswith(_FOREIGN_SCHEMES) for address in addresses or [""]):
        raise UserError(
            "url",
            "must be the host and port of the server's gRPC endpoint",
            given=", ".join(addresses) or "nothing",
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
