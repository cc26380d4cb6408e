"""Check and reserve TCP ports of this machine."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from triptych.base.errors import UserError

# The range is below the kernel's ephemeral ports (from 32768), so that no outgoing connection uses
# a picked port before the server binds it.
_PICK_FROM = range(20000, 32000)
_ATTEMPTS = 200


def port_is_busy(port: int) -> bool:
    """Return whether another process listens on this port of 127.0.0.1.

    Raises:
        UserError: It is no number of a port, or the user may not open it.
    """
    _check_range("port", port)
    sock = _bind("127.0.0.1", port)
    if sock is not None:
        sock.close()
    return sock is None


def is_loopback(host: str) -> bool:
    """Return whether a server on `host` is only reachable from this machine."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, UnicodeError):
        return True  # not an address: `reserve_ports` reports it


@contextmanager
def reserve_ports(host: str, wanted: dict[str, int]) -> Iterator[dict[str, int]]:
    """Check the wanted ports, by field name, pick a free port for every 0, and yield all of them.

    Servers bind their ports after their models have loaded. Picked ports are reserved while the
    block runs.

    Raises:
        UserError: A port is busy, out of range or given twice, or the host is not this machine.
    """
    claimed: dict[str, int] = {}
    with ExitStack() as picked:
        # Wanted ports stay open until every port is chosen, so that no port is picked twice.
        with ExitStack() as checked:
            for field, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
                if port == 0:
                    claimed[field] = picked.enter_context(_pick(host)).getsockname()[1]
                else:
                    checked.enter_context(_claim(host, field, port, claimed))
                    claimed[field] = port
        yield claimed


def _claim(host: str, field: str, port: int, claimed: dict[str, int]) -> socket.socket:
    _check_range(field, port)
    for other, taken in claimed.items():
        if taken == port:
            raise UserError(
                field, f"must differ from `{other}`", given=port, remedy="Choose another port"
            )
    sock = _bind(host, port, field)
    if sock is None:
        raise UserError(
            field,
            "must be a free port",
            given=f"{port}, which is in use on {host}",
            remedy="Stop that process, or choose another port, or 0 for any free one",
        )
    return sock


def _check_range(field: str, port: int) -> None:
    if not 0 < port < 65536:
        raise UserError(
            field,
            "must be a port from 1 to 65535, or 0 for a free one",
            given=port,
            remedy="Choose another port",
        )


def _pick(host: str) -> socket.socket:
    for port in random.sample(_PICK_FROM, _ATTEMPTS):
        sock = _bind(host, port, is_pick=True)
        if sock is not None:
            return sock
    raise UserError(
        "port",
        f"has no free value in {_ATTEMPTS} attempts from {_PICK_FROM.start} to {_PICK_FROM.stop}",
        remedy="Choose the ports yourself",
    )


def _bind(
    host: str, port: int, field: str = "port", *, is_pick: bool = False
) -> socket.socket | None:
    """Return a bound socket; None if the port is in use or already picked."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Servers set SO_REUSEADDR, so that ports with closing connections count as free. It also
        # lets them bind a port whose other socket has it and does not listen. A pick binds without
        # it, so that a port is not picked twice.
        if is_pick:
            sock.bind((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not is_pick:
            sock.bind((host, port))
            sock.listen(1)
        return sock
    except PermissionError as error:
        sock.close()
        rule = "requires privileges that this user lacks"
        raise UserError(field, rule, given=port, remedy="Use 1024 or above") from error
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
