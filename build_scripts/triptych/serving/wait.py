"""Serving until somebody says stop: SIGTERM, SIGINT, or the server's own death."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from triptych.serving.server import Server


class _Asked(BaseException):
    """Raised in the main thread by the first signal, wherever it is."""


@contextlib.contextmanager
def wait_for_end(server: Server) -> Iterator[Callable[[], str]]:
    """Stop `server` on the way out, however it comes; a signal during start-up counts, too.

    Yields:
        A function that blocks until a signal came or the server died, and says which.

    Raises:
        ServerError: the server died by itself.
    """
    asked: list[str] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # Later signals are heeded by nobody: the server is being stopped already.
        if not asked:
            asked.append(signal.Signals(number).name)
            raise _Asked

    def ended() -> str:
        try:
            server.wait_dead()
        except _Asked:
            return asked[0]
        return "the server ended"

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    except _Asked:
        pass
    finally:
        asked.append("stopping")
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
