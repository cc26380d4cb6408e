"""A server that a verb runs until it is interrupted, and what it tells on the way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from triptych.interface.cli.options import progress, status

if TYPE_CHECKING:
    from triptych.serving.server import Server


def run(
    server: Server, announce: Callable[[], None], *, timeout_s: float, meanwhile: Callable[[], None]
) -> None:
    """Serve until interrupted.

    Args:
        server: not started yet.
        announce: called whenever the server is ready.
        timeout_s: that the models may take to load.
        meanwhile: called now and then while it serves.

    Raises:
        UserError: the server does not become ready.
    """
    from triptych.serving.wait import serve_until_asked

    asked = serve_until_asked(
        server,
        timeout_s=timeout_s,
        on_progress=lambda line: progress("load", line),
        on_ready=announce,
        on_death=lambda line: status.print(f"error: {line}", style="red", markup=False),
        meanwhile=meanwhile,
    )
    status.print(f"stopped ({asked})", markup=False)


def warn(line: str) -> None:
    """Tell what did not go well and ended nothing."""
    status.print(f"warning: {line}", style="yellow", markup=False)


@contextmanager
def stoppable() -> Iterator[None]:
    """A SIGTERM ends the verb as Ctrl-C does: servers stopped, nothing left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
