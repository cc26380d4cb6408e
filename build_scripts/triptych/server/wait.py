"""Serving until somebody says stop (SIGTERM, SIGINT), starting anew what dies meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from triptych.server.server import Server, ServerError

LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
_MEANWHILE_S = 0.3


class _Asked(BaseException):
    """Raised in the main thread by the first signal, wherever it is."""


def serve_until_asked(
    server: Server,
    *,
    timeout_s: float,
    on_progress: Callable[[str], None],
    on_ready: Callable[[], None],
    on_death: Callable[[str], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Start `server`, call `on_ready` once every model is, and stop it at the first signal.

    A signal counts from the start on, also while models load; requests in flight are answered. A
    server that dies after it was ready, or of which a step does, is started again on the same
    ports: at once, then after pauses that double with each death within a minute.
    `timeout_s` and `on_progress` are as in `Server.wait_ready`; `on_death` is told why and what
    follows, `on_ready` is called again. `meanwhile` is called about three times a second while the
    server is ready, and not while it runs itself.

    Returns:
        The signal's name.

    Raises:
        ServerError: a step did not load when the server was started first.
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
        pause_s = 0.0
        while True:
            ready_at = time.monotonic()
            death: ServerError | None = _wait_dead(server, meanwhile)
            while death is not None:
                if time.monotonic() - ready_at > _STEADY_S:
                    pause_s = 0.0
                again = f"in {pause_s:g} s" if pause_s else "now"
                on_death(f"{death.message} It is started again {again}.")
                time.sleep(pause_s)
                pause_s = min(max(2 * pause_s, 0.5), LONGEST_PAUSE_S)
                try:
                    server.restart()
                    server.wait_ready(timeout_s)
                    death = None
                except ServerError as error:
                    death = error
            on_ready()
    except _Asked:
        return asked[0]
    finally:
        asked.append("stopping")
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_dead(server: Server, meanwhile: Callable[[], None]) -> ServerError:
    while True:
        death = server.death(within_s=_MEANWHILE_S)
        if death is not None:
            return death
        meanwhile()
