"""The tritonserver process: started so that it cannot outlive this one, and ended cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.container.supervisor import stack_limits
from triptych.serving import orphan_cleanup
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, remove_orphans

_LAUNCHER = Path(__file__).with_name("launch.py")
_GUARD = Path(orphan_cleanup.__file__)
_ISOLATED = (sys.executable, "-I")


class ServerProcess:
    """A running tritonserver with its guard.

    It runs in a session of its own, so Ctrl-C at the terminal does not reach it. Should this
    process die in any way, the kernel kills the server, and the guard its stubs.

    Args:
        command: the executable and its arguments.
        variables: the whole environment.
        mark: see `leftovers.new_process_tag`; the prefix of the server's shared-memory regions.
        log_file: its standard output and error are appended to it.
        own_paths: files and folders to remove with the server.
        orphan_paths: to remove only where this process dies before it could `end` the server.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        mark: str,
        log_file: Path,
        own_paths: Sequence[Path],
        orphan_paths: Sequence[Path] = (),
    ) -> None:
        self._mark = mark
        self._own_paths = tuple(own_paths)
        self._exited = threading.Event()
        self._ended = False
        started = threading.Event()
        errors: list[OSError] = []

        # The kernel reports the death of the *thread* that started a process: a server started by
        # a worker thread would be killed when that ends. So this one lives as long as the server.
        def keep() -> None:
            try:
                self._guard = self._start_guard([*own_paths, *orphan_paths])
                self._server = self._start_server(command, variables, log_file)
            except OSError as error:
                errors.append(error)
                return
            finally:
                started.set()
            self._server.wait()
            self._exited.set()
            self._guard.wait()

        self._keeper = threading.Thread(target=keep, name="tritonserver-keeper", daemon=True)
        self._keeper.start()
        started.wait()
        if errors:
            raise errors[0]

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server lives; its stubs may outlive it until `end`."""
        return not self._exited.is_set()

    @property
    def exit_status(self) -> str:
        """How the server ended: ``exit status 1`` or ``signal SIGKILL``."""
        code = self._server.returncode
        if code is None:
            return "still running"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the server has exited by itself; returns when it has, or after the timeout."""
        return self._exited.wait(timeout_s)

    def end(self, grace_s: float) -> None:
        """Asks the server to end, kills it after the grace, and removes what it leaves behind."""
        if self._ended:
            return
        try:
            if self.is_running:
                self._server.terminate()
                self._exited.wait(grace_s)
        finally:  # also where a second Ctrl-C cuts the wait short
            if self.is_running:
                self._server.kill()
            self._guard.kill()
            self._keeper.join()
            remove_orphans(self._mark, self._own_paths)
            self._ended = True

    def _start_guard(self, paths: Sequence[Path]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_ISOLATED, str(_GUARD), str(os.getpid()), self._mark, *map(str, paths)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_server(
        self, command: Sequence[str], variables: Mapping[str, str], log_file: Path
    ) -> subprocess.Popen[bytes]:
        stack_bytes, _ = stack_limits()
        with log_file.open("ab") as log:
            return subprocess.Popen(
                # Without site: it needs the standard library only, and starts in 20 ms.
                [*_ISOLATED, "-S", str(_LAUNCHER), str(os.getpid()), str(stack_bytes), *command],
                env={**variables, PROCESS_TAG_VARIABLE: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
