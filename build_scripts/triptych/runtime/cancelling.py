"""How postprocess tells the core that nobody waits for a request: Triton does not, in an ensemble.

The core listens on a datagram socket in Linux's abstract namespace, under a name nobody can guess,
and sends that name along with each request. A datagram is the key of a request to give up.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

MAX_KEY = 256


class CancelInbox:
    """Where the core hears of requests to give up.

    Args:
        on_key: called on the loop with each key.
    """

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self.name = f"triptych-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._on_key = on_key

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear from now on; to be called on the loop."""
        loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._on_key(self._socket.recv(MAX_KEY).decode("ascii", "replace"))

    def close(self) -> None:
        self._socket.close()


class CancelSender:
    """Tells cores which requests to give up."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, inbox: str, key: str) -> None:
        """Tell once; an inbox that is full just now is told with the request's next chunk."""
        with suppress(OSError):
            self._socket.sendto(key.encode("ascii"), _address(inbox))


def _address(name: str) -> bytes:
    return b"\0" + name.encode("ascii")
