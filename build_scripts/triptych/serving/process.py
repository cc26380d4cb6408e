"""Tritonserver processes of this machine: one that is stopped cleanly with this process, others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from triptych.container.shared_memory import SharedRegions
from triptych.container.supervisor import server_limits
from triptych.serving import orphan_cleanup
from triptych.serving.orphan_cleanup import (
    PROCESS_TAG_VARIABLE,
    SERVER,
    read_processes,
    remove_orphans,
)

_LAUNCHER = Path(__file__).with_name("launch.py")
_GUARD = Path(orphan_cleanup.__file__)
_ISOLATED = (sys.executable, "-I")


def launched(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and dies with this process.

    The thread that starts it must live as long as the process.
    """
    limits = [f"{limit.number}={soft}" for limit, (soft, _) in server_limits().items()]
    # Without site: only the standard library is needed, and the start takes 20 ms.
    return [*_ISOLATED, "-S", str(_LAUNCHER), str(os.getpid()), ",".join(limits), *command]


class ServerProcess:
    """A running tritonserver with its guard.

    It runs in its own session, so Ctrl-C at the terminal does not reach it. If this process dies,
    the kernel kills the server and the guard kills its stubs.

    Args:
        command: Executable and arguments.
        variables: Complete environment.
        tag: Process tag, the prefix of the server's shared-memory regions; see `new_process_tag`.
        log_file: File to which standard output and error are appended.
        own_paths: Files and folders to remove with the server.
        orphan_paths: Files and folders to remove if this process dies before it calls `end`.
        folder: Working directory; None for that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        tag: str,
        log_file: Path,
        own_paths: Sequence[Path],
        orphan_paths: Sequence[Path] = (),
        folder: Path | None = None,
    ) -> None:
        self._tag = tag
        self._regions = SharedRegions(tag)
        self._own_paths = tuple(own_paths)
        self._exited = threading.Event()
        self._ended = False
        started = threading.Event()
        errors: list[OSError] = []

        # The kernel reports the death of the *thread* that started a process. A server started by
        # a worker thread would be killed with it, so this thread lives as long as the server.
        def keep() -> None:
            try:
                self._guard = self._start_guard([*own_paths, *orphan_paths])
                self._server = self._start_server(command, variables, log_file, folder)
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
            self._regions.remove()
            raise errors[0]

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server runs. Its stubs may outlive it until `end`."""
        return not self._exited.is_set()

    @property
    def exit_status(self) -> str:
        """Exit status of the server: ``exit status 1`` or ``signal SIGKILL``."""
        code = self._server.returncode
        if code is None:
            return "still running"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the server to exit, at most `timeout_s`; return whether it has exited."""
        return self._exited.wait(timeout_s)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, kill the server after `grace_s` seconds, and remove its orphans."""
        if self._ended:
            return
        try:
            if self.is_running:
                self._server.terminate()
                self._exited.wait(grace_s)
        finally:  # also if a second Ctrl-C interrupts the wait
            if self.is_running:
                self._server.kill()
            self._guard.kill()
            self._keeper.join()
            remove_orphans(self._tag, self._own_paths)
            self._regions.remove()
            self._ended = True

    def _start_guard(self, paths: Sequence[Path]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_ISOLATED, str(_GUARD), str(os.getpid()), self._tag, *map(str, paths)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_server(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log_file: Path,
        folder: Path | None,
    ) -> subprocess.Popen[bytes]:
        with log_file.open("ab") as log:
            return subprocess.Popen(
                launched(command),
                env={**variables, PROCESS_TAG_VARIABLE: self._tag},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


_GRPC_PORT = 8001


def find_local_servers() -> Iterator[str]:
    """Yield the gRPC address of each server of this machine that the user may see."""
    for _, (name, words) in read_processes(lambda process: (process.name(), process.cmdline())):
        if name == SERVER and len(words) > 1:
            # A flag and its value are one word, with ``=`` between them, or two words.
            given = dict(pairwise(part for word in words[1:] for part in word.split("=", 1)))
            host = given.get("--grpc-address") or "127.0.0.1"
            host = "127.0.0.1" if host == "0.0.0.0" else host
            yield f"{host}:{given.get('--grpc-port') or _GRPC_PORT}"
