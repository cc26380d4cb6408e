"""Serving until somebody says stop: SIGTERM, SIGINT, or the server's own death."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from triptych.server.server import Server


class _Asked(BaseException):
    """Raised in the main thread by the first signal, wherever it is."""


def serve_until_asked(
    server: Server,
    *,
    timeout_s: float,
    on_progress: Callable[[str], None],
    on_ready: Callable[[], None],
) -> str:
    """Start `server`, call `on_ready` once every model is, and stop it at the first signal.

    A signal counts from the start on, also while models load; requests in flight are answered.
    `timeout_s` and `on_progress` are as in `Server.wait_ready`.

    Returns:
        The signal's name.

    Raises:
        ServerError: a step did not load, or the server died by itself.
    """
    asked: list[str] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # Later signals change nothing: the server is being stopped already.
        if not asked:
            asked.append(signal.Signals(number).name)
            raise _Asked

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.start()
        server.wait_ready(timeout_s, on_progress=on_progress)
        on_ready()
        server.wait_dead()
    except _Asked:
        return asked[0]
    finally:
        asked.append("stopping")
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
