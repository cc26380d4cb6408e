"""Channel of a client, reopened periodically if its name may have new addresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2_grpc

from triptych.client.errors import CanceledError


class Opened:
    """A channel with its stub and the number of calls that use it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.calls = 0
        self.opened_s = time.monotonic()


class Connection:
    """The newest channel for new calls. An older channel is closed when its last call ends.

    gRPC resolves a name again only when a connection breaks (grpc/grpc#12295), so a new replica
    beside
    healthy ones would get no requests. A new channel resolves the name and shares the connections
    of
    the old one, because gRPC has one pool of connections per process.

    Args:
        open_channel: Opens a channel.
        close: Closes a channel without calls.
        dns_refresh_s: Age in seconds after which new calls get a new channel; None for never.
    """

    def __init__(
        self,
        open_channel: Callable[[], Any],
        close: Callable[[Any], None],
        dns_refresh_s: float | None,
    ) -> None:
        self._open_channel = open_channel
        self._close = close
        self._dns_refresh_s = dns_refresh_s
        # Garbage collection of a generation, on any thread, gives its channel back.
        self._turn = threading.RLock()
        self._opened: list[Opened] = []
        self._drained = False

    def take(self) -> Opened:
        """Return the channel for a call, to be given back at its end.

        Raises:
            CanceledError: The connection was drained.
        """
        with self._turn:
            if self._drained:
                raise CanceledError("The client is closed. Open another.")
            newest = self._opened[-1] if self._opened else None
            if newest is None or (
                self._dns_refresh_s is not None
                and time.monotonic() - newest.opened_s > self._dns_refresh_s
            ):
                newest = Opened(self._open_channel())
                self._opened.append(newest)
                self._retire()
            newest.calls += 1
            return newest

    def give_back(self, opened: Opened) -> None:
        """Release the channel of a call that ended."""
        with self._turn:
            opened.calls -= 1
            self._retire()

    def drain(self) -> list[Any]:
        """Return all channels, for the caller to close, and open no more."""
        with self._turn:
            self._drained = True
            channels = [opened.channel for opened in self._opened]
            self._opened.clear()
            return channels

    def _retire(self) -> None:
        old = [opened for opened in self._opened[:-1] if not opened.calls]
        self._opened = [opened for opened in self._opened if opened not in old]
        for opened in old:
            self._close(opened.channel)
