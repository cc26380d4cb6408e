"""Where a pipeline is served: a server of one's own while needed, or one that runs already.

Serving until somebody says stop (SIGTERM, SIGINT), starting anew what dies meanwhile.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from triptych.base.errors import UserError
from triptych.repository.config import CONFIG_FILE
from triptych.repository.store import recover
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server

_DEATH_S = 3.0
"""How long a server that stopped answering may take to be seen dead."""

UNSAMPLED = {FOLDER_VARIABLE: ""}
"""Environment of a server that no user asks: nothing is sampled, whatever this process has set."""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready: ``host:port``, the whole address of its metrics, its own process.

    `load_s` is how long it took from its start to ready, where it was started here.
    """

    grpc_url: str
    metrics_url: str | None = None
    pid: int | None = None
    load_s: float | None = None


def check_built(repository: Path, pipeline: str) -> None:
    """Raises a `UserError` where the repository does not hold the pipeline."""
    if not (repository / pipeline / CONFIG_FILE).is_file():
        raise UserError(
            str(repository),
            "must hold the pipeline",
            given=f"no model {pipeline}",
            remedy=f"Run `triptych build {pipeline}`, or name a server with --url",
        )


@contextmanager
def open_endpoint(
    repository: Path,
    pipeline: str,
    url: str | None,
    progress: Callable[[str, str], None],
    *,
    metrics_url: str | None = None,
) -> Iterator[Endpoint]:
    """The server at `url`; without it one on `repository` that lives as long as the context.

    Raises:
        UserError: the pipeline is not built, or its server does not start, or died meanwhile.
    """
    if url is not None:
        yield Endpoint(url, metrics_url)
        return
    check_built(repository, pipeline)
    recover(repository)
    progress("serve", f"tritonserver on {repository} ...")
    began = time.monotonic()
    with Server(repository, models=[pipeline], environment=UNSAMPLED) as server:
        load_s = time.monotonic() - began
        try:
            yield Endpoint(server.grpc_url, server.metrics_url, server.pid, load_s)
        except UserError as error:
            death = server.find_crash(_DEATH_S)
            if death is not None:
                raise death from error
            raise


MAX_PAUSE_S = 30.0
_STEADY_S = 60.0
_MEANWHILE_S = 0.3


class _SignalReceived(BaseException):
    """Raised in the main thread by the first signal, wherever it is."""


@dataclass
class RestartBackoff:
    """How long what died waits to be started again: not at all, then longer with each death.

    `next_s` is the pause after the next death, in seconds.
    """

    next_s: float = 0.0

    def take_s(self, lived_s: float) -> float:
        """The pause after a death; what lived for a minute before it counts as mended."""
        pause_s = 0.0 if lived_s > _STEADY_S else self.next_s
        self.next_s = min(max(2 * pause_s, 0.5), MAX_PAUSE_S)
        return pause_s


@contextmanager
def until_signal(stop: Callable[[], None]) -> Iterator[list[str]]:
    """The body runs until SIGTERM or SIGINT; then, or at its own end, `stop`, which none disturbs.

    Yields a list that holds the signal's name afterwards.
    """
    asked: list[str] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # Later signals change nothing: it is being stopped already.
        if not asked:
            asked.append(signal.Signals(number).name)
            raise _SignalReceived

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    except _SignalReceived:
        pass
    finally:
        asked.append("stopping")
        stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def serve_until_signal(
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
    with until_signal(server.stop) as asked:
        server.start()
        server.wait_ready(timeout_s, on_progress=on_progress)
        on_ready()
        pauses = RestartBackoff()
        while True:
            ready_at = time.monotonic()
            death: ServerError | None = _wait_dead(server, meanwhile)
            while death is not None:
                pause_s = pauses.take_s(time.monotonic() - ready_at)
                again = f"in {pause_s:g} s" if pause_s else "now"
                on_death(f"{death.message} It is started again {again}.")
                time.sleep(pause_s)
                try:
                    server.restart()
                    server.wait_ready(timeout_s)
                    death = None
                except ServerError as error:
                    death, ready_at = error, time.monotonic()
            on_ready()
    return asked[0]


def _wait_dead(server: Server, meanwhile: Callable[[], None]) -> ServerError:
    while True:
        death = server.find_crash(within_s=_MEANWHILE_S)
        if death is not None:
            return death
        meanwhile()
