"""A client's channel, opened anew now and then where a name may have got other addresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2_grpc

from triptych.client.errors import CanceledError


class Opened:
    """A channel, its stub, and how many calls use it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.calls = 0
        self.opened_s = time.monotonic()


class Connection:
    """The newest channel for new calls; an older one is closed with the last call that uses it.

    gRPC asks a name server again only once a connection breaks (grpc/grpc#12295), so a replica
    that joins healthy ones would never be asked anything. A fresh channel looks the name up, and
    shares the connections of the one before: gRPC keeps one pool of them in a process.

    Args:
        open_channel: makes a channel.
        close: ends one that has no calls.
        renew_s: age in seconds from which new calls get a fresh channel; None keeps the first.
    """

    def __init__(
        self,
        open_channel: Callable[[], Any],
        close: Callable[[Any], None],
        renew_s: float | None,
    ) -> None:
        self._open_channel = open_channel
        self._close = close
        self._renew_s = renew_s
        # A generation that nobody holds any more gives its channel back from wherever it is freed.
        self._turn = threading.RLock()
        self._opened: list[Opened] = []
        self._drained = False

    def take(self) -> Opened:
        """The channel for a call; to be given back at its end.

        Raises:
            CanceledError: it was drained.
        """
        with self._turn:
            if self._drained:
                raise CanceledError("The client is closed. Open another.")
            newest = self._opened[-1] if self._opened else None
            if newest is None or (
                self._renew_s is not None and time.monotonic() - newest.opened_s > self._renew_s
            ):
                newest = Opened(self._open_channel())
                self._opened.append(newest)
                self._retire()
            newest.calls += 1
            return newest

    def give_back(self, opened: Opened) -> None:
        """A call that took the channel has ended."""
        with self._turn:
            opened.calls -= 1
            self._retire()

    def drain(self) -> list[Any]:
        """All channels, for the caller to close; there are no others after that."""
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
