"""TCP ports on this machine: which are busy, and which can be had."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack

from triptych.base.errors import UserError

# Below the kernel's ephemeral range (from 32768), so that no outgoing connection takes a picked
# port between the pick and the server's own bind.
_PICK_FROM = range(20000, 32000)
_ATTEMPTS = 200
_picked: dict[int, socket.socket] = {}


def port_is_busy(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on this port already.

    Raises:
        UserError: `host` is no address of this machine, or the port may not be used at all.
    """
    _check_range("port", port)
    sock = _bind(host, port)
    if sock is not None:
        sock.close()
    return sock is None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, UnicodeError):
        return True  # no address at all: `reserve_ports` says so


def reserve_ports(host: str, wanted: dict[str, int]) -> dict[str, int]:
    """Checks the wanted ports, by the name of their field, and picks a free one for every 0.

    Servers bind theirs only once their models are loaded. Until `release_ports`, or the end of this
    process, nobody else picks one that was picked here.

    Raises:
        UserError: a port is busy, out of range, wanted twice, or the host is not this machine.
    """
    claimed: dict[str, int] = {}
    # All sockets stay open until every port is known, so that no port is picked twice.
    with ExitStack() as held:
        for field, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            if port == 0:
                claimed[field] = _pick(host)
            else:
                held.enter_context(_claim(host, field, port, claimed))
                claimed[field] = port
    return claimed


def release_ports(ports: Iterable[int]) -> None:
    """Let others pick these that were picked here."""
    for port in ports:
        _picked.pop(port).close()


def _claim(host: str, field: str, port: int, claimed: dict[str, int]) -> socket.socket:
    _check_range(field, port)
    for other, taken in claimed.items():
        if taken == port:
            raise UserError(field, f"must differ from `{other}`", given=port)
    sock = _bind(host, port, field)
    if sock is None:
        raise UserError(
            field,
            "must be a free port",
            given=f"{port}, where something listens already on {host}",
            remedy="Stop that process, name another port, or 0 to have a free one picked",
        )
    return sock


def _check_range(field: str, port: int) -> None:
    if not 0 < port < 65536:
        raise UserError(field, "must be a port from 1 to 65535, or 0 for a free one", given=port)


def _pick(host: str) -> int:
    for port in random.sample(_PICK_FROM, _ATTEMPTS):
        sock = _bind(host, port, is_pick=True)
        if sock is not None:
            _picked[port] = sock
            return port
    raise UserError(
        "port",
        f"must be free: {_ATTEMPTS} ports from {_PICK_FROM.start} to {_PICK_FROM.stop} were tried",
        remedy="Name the ports yourself",
    )


def _bind(
    host: str, port: int, field: str = "port", *, is_pick: bool = False
) -> socket.socket | None:
    """A socket bound there; None where something listens, or a pick holds what is to be picked."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Servers set it, for a port whose last connections are still closing to be free. With it
        # they also bind beside a socket that has it and does not listen; a pick without it cannot.
        if is_pick:
            sock.bind((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not is_pick:
            sock.bind((host, port))
            sock.listen(1)
        return sock
    except PermissionError as error:
        sock.close()
        rule = "must be one that this user may open"
        raise UserError(field, rule, given=port, remedy="Use 1024 up") from error
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise UserError(
            "host",
            "must be an address of this machine",
            given=f"{host} ({error.strerror or error})",
            remedy="Use 127.0.0.1, or 0.0.0.0 to listen on every address",
        ) from error
