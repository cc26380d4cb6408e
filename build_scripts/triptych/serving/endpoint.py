"""Open a server for a pipeline, or serve until a signal and restart what crashed or is stuck."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from triptych.base.errors import UserError
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.container.periodic import HEALTH_INTERVAL_S, REPLACED_AFTER, PeriodicCheck
from triptych.repository.config import CONFIG_FILE
from triptych.repository.store import recover
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server

_CRASH_WAIT_S = 3.0
"""How long to wait, in seconds, for the exit of a server that stopped responding."""

UNSAMPLED = {FOLDER_VARIABLE: ""}
"""Environment of a server without user traffic: sampling is off, whatever this process has set."""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready."""

    grpc_url: str  # gRPC address, ``host:port``
    metrics_url: str | None = None  # Complete URL of the metrics page; None if unknown
    pid: int | None = None  # Process id of tritonserver; None if it was not started here
    # Time from start to ready, in seconds; None if it was not started here.
    load_s: float | None = None


def check_built(repository: Path, pipeline: str) -> None:
    """Check that the repository contains the pipeline; raise `UserError` otherwise."""
    if not (repository / pipeline / CONFIG_FILE).is_file():
        raise UserError(
            str(repository),
            "does not contain the pipeline",
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
    """Yield the server at `url`, or start a server on `repository` while the block runs.

    Raises:
        UserError: The pipeline is not built, or its server does not start or crashes.
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
            crash = server.find_crash(_CRASH_WAIT_S)
            if crash is not None:
                raise crash from error
            raise


MAX_PAUSE_S = 30.0
_STEADY_S = 60.0
_MEANWHILE_S = 0.3


class _SignalReceived(BaseException):
    """Exception that the first signal raises in the main thread."""


@dataclass
class RestartBackoff:
    """Restart backoff: 0 s after the first crash, then 0.5 s, doubling up to `MAX_PAUSE_S`."""

    next_s: float = 0.0  # Pause after the next crash, in seconds

    def take_s(self, lived_s: float) -> float:
        """Return the pause after a crash, in seconds; an uptime above 60 s resets the backoff."""
        pause_s = 0.0 if lived_s > _STEADY_S else self.next_s
        self.next_s = min(max(2 * pause_s, 0.5), MAX_PAUSE_S)
        return pause_s


@contextmanager
def _until_signal(before_stop: Callable[[], None], stop: Callable[[], None]) -> Iterator[list[str]]:
    """Run the block until it ends or SIGTERM or SIGINT arrives, then call both undisturbed.

    Yields:
        A list that contains the signal's name after the block.
    """
    signals: list[str] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # Later signals are ignored, because the server is already stopping.
        if not signals:
            signals.append(signal.Signals(number).name)
            raise _SignalReceived

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    except _SignalReceived:
        pass
    finally:
        signals.append("stopping")
        try:
            before_stop()
        finally:
            stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def serve_until_signal(
    server: Server,
    *,
    timeout_s: float,
    on_progress: Callable[[str], None],
    on_ready: Callable[[], None],
    on_crash: Callable[[str], None],
    meanwhile: Callable[[], object] = lambda: None,
    before_stop: Callable[[], None] = lambda: None,
) -> str:
    """Start `server`, call `on_ready` once every model is, and stop it at the first signal.

    Signals are handled from the start on, also while models load; requests in flight are answered.
    If the server or a step crashes after it was ready, or its health check fails
    `REPLACED_AFTER` times in a row, the server is restarted on the same ports, with
    `RestartBackoff`.

    Args:
        server: Server, not started.
        timeout_s: Timeout of `Server.wait_ready`.
        on_progress: Progress callback of `Server.wait_ready`.
        on_ready: Called after each start, when every model is ready.
        on_crash: Called with a message after each crash.
        meanwhile: Called about three times per second while the server is ready; returns whether
            it has loaded another build.
        before_stop: Called before the server stops.

    Returns:
        The signal's name.

    Raises:
        ServerError: A step did not load at the first start, or a pipeline did not answer its own
            request.
    """
    with _until_signal(before_stop, server.stop) as signals:
        deadline = time.monotonic() + timeout_s
        server.start()
        server.wait_ready(timeout_s, on_progress=on_progress)
        wait_answers(server, _new_health(server), deadline, on_progress=on_progress)
        on_ready()
        pauses = RestartBackoff()
        while True:
            ready_at = time.monotonic()
            crash: ServerError | None = _wait_for_crash(server, meanwhile)
            while crash is not None:
                pause_s = pauses.take_s(time.monotonic() - ready_at)
                again = f"in {pause_s:g} s" if pause_s else "now"
                on_crash(f"{crash.message} The server restarts {again}.")
                time.sleep(pause_s)
                try:
                    server.restart()
                    server.wait_ready(timeout_s)
                    crash = None
                except ServerError as error:
                    crash, ready_at = error, time.monotonic()
            on_ready()
    return signals[0]


def _wait_for_crash(server: Server, meanwhile: Callable[[], object]) -> ServerError:
    """Return why a server that is ready has to be restarted."""
    pool = ThreadPoolExecutor(1, "health")
    try:
        check = _new_check(server, pool)
        while True:
            crash = server.find_crash(within_s=_MEANWHILE_S)
            if crash is not None:
                return crash
            if check.has_result() and check.failures >= REPLACED_AFTER:
                reason = f"{check.fault}, {check.failures} times in a row"
                return server.failure("fails its health check", reason)
            if meanwhile():
                check = _new_check(server, pool)
    finally:
        pool.shutdown(wait=False)  # a check of a frozen server takes seconds


def _new_check(server: Server, pool: ThreadPoolExecutor) -> PeriodicCheck:
    """Return the health check of a server, with the questions of the builds on the disk now."""
    return PeriodicCheck(pool, _new_health(server), HEALTH_INTERVAL_S)


def _new_health(server: Server) -> Callable[[], str | None]:
    """Return a function that returns the fault of a server."""
    pipelines = [p for p in find_pipelines(server.repository) if p.name in server.served_models]
    health = HealthCheck(pipelines, server.metrics_url)
    return lambda: health.find_fault(f"http://{server.http_url}")


def wait_answers(
    server: Server,
    find_fault: Callable[[], str | None],
    deadline: float,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Wait until a server whose models are loaded passes its health check.

    Args:
        server: Server that is ready.
        find_fault: Health check, which returns a fault.
        deadline: Time at which to give up, on the clock of `time.monotonic`.
        on_progress: Called with each fault that differs from the one before.

    Raises:
        ServerError: A pipeline does not answer its own request, or the server crashed.
    """
    told = ""
    while fault := find_fault():
        if fault != told:
            on_progress(fault)
            told = fault
        crash = server.find_crash(_MEANWHILE_S)
        if crash is not None:
            raise crash
        if time.monotonic() > deadline:
            error = server.failure("loaded its models but failed the health-check request", fault)
            server.stop(grace_s=0.0)  # the requests that it took are never answered
            raise error
