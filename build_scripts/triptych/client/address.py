"""Where the servers are (an address, several, or a name that has several) -> gRPC's target."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.errors import UserError

_FOREIGN_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")
_NAMED = "dns:///"


@dataclass(frozen=True)
class Target:
    """One server or several that serve the same.

    Attributes:
        uri: as gRPC takes it.
        shown: as the user gave it.
        authority: what the servers are called in requests; empty where gRPC knows that itself.
        is_several: whether it is meant to be more than one server.
        is_loopback: whether it is this machine itself, whatever a name server says.
        is_named: whether a name server says which addresses these are, and may change its mind.
    """

    uri: str
    shown: str
    authority: str = ""
    is_several: bool = False
    is_loopback: bool = False
    is_named: bool = False


def read_target(url: str | Sequence[str]) -> Target:
    """What ``host:port``, ``dns:///name:port`` or several addresses name.

    Several are a list, or have commas between them.

    Raises:
        UserError: it is none of these.
    """
    addresses = url.split(",") if isinstance(url, str) else list(url)
    addresses = [address.strip() for address in addresses]
    if any(not address or address.startswith(_FOREIGN_SCHEMES) for address in addresses or [""]):
        raise UserError(
            "url",
            "must be the host and port of the server's gRPC endpoint",
            given=", ".join(addresses) or "nothing",
            remedy="Write host:port, and ask for encryption with `tls`",
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
            "must be IP addresses of one version, where it is several",
            given=", ".join(addresses),
            remedy=f"Give the servers one name with all their addresses: {_NAMED}name:port",
        )
    return Target(
        f"ipv{versions.pop()}:{','.join(plain)}",
        ",".join(addresses),
        authority=plain[0],
        is_several=True,
        is_loopback=all(map(is_loopback, plain)),
    )


def check_single(url: str, purpose: str) -> None:
    """Raises a `UserError` where `url` is more than one server; `purpose` is what needs one."""
    if read_target(url).is_several:
        raise UserError(
            "url",
            f"must be one server's host:port to {purpose}",
            given=url,
            remedy="Name one of them",
        )


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` names this machine itself, whatever a name server says."""
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
