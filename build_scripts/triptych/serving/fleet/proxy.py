"""An Envoy of this process's own, which never outlives it, and the replicas that it is told of."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import yaml_of
from triptych.base.files import write_files
from triptych.container.entrypoint import server_variables
from triptych.serving.embedded import server_path
from triptych.serving.fleet.envoy import (
    GRPC,
    HTTP,
    EndpointFiles,
    Listen,
    Mirror,
    ProxySettings,
    Service,
    assignment,
    bootstrap,
)
from triptych.serving.orphan_cleanup import new_process_tag
from triptych.serving.process import ServerProcess
from triptych.serving.readiness import responds_ok
from triptych.serving.server import Server, new_shell_safe_dir

INSTALL_FLEET = "pip install -e .[fleet]"
_LOOPBACK = "127.0.0.1"
_GRPC_FILE, _HTTP_FILE = "grpc.json", "http.json"
_POLL_S = 0.02
_START_S = 30.0
_END_S = 5.0
_ADMIN_S = 2.0
_VALIDATE_S = 60.0
_WORKERS = 2
"""Threads: with one, a slow client's connection would hold up all others on a loaded machine."""


class Proxy:
    """Envoy in front of servers on this machine.

    Args:
        settings: its numbers.
        listen: ports that are free.
        log_file: where its log goes.
        mirror: who gets copies of requests; None for nobody.
        orphan_paths: files and folders to remove where this process dies before it could `stop`.
    """

    def __init__(
        self,
        settings: ProxySettings,
        listen: Listen,
        *,
        log_file: Path,
        mirror: Mirror | None = None,
        orphan_paths: Sequence[Path] = (),
    ) -> None:
        self._settings = settings
        self._listen = listen
        self._log_file = log_file
        self._mirror = mirror
        self._orphan_paths = tuple(orphan_paths)
        self._folder = Path()
        self._process: ServerProcess | None = None

    @property
    def grpc_url(self) -> str:
        return self._url(self._listen.grpc_port)

    @property
    def http_url(self) -> str:
        return self._url(self._listen.http_port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self._url(self._listen.metrics_port)}/metrics"

    @property
    def admin_url(self) -> str:
        """``host:port`` of Envoy's own pages, on loopback."""
        return f"{_LOOPBACK}:{self._listen.admin_port}"

    def start(self, servers: Iterable[Server]) -> None:
        """Start it in front of `servers`, and return once it takes requests.

        Raises:
            UserError: Envoy is not installed, or does not start.
        """
        self._folder = new_shell_safe_dir()
        try:
            files = EndpointFiles(self._folder / _GRPC_FILE, self._folder / _HTTP_FILE)
            self.route_to(servers)
            config = self._folder / "envoy.yaml"
            data = bootstrap(self._settings, self._listen, files, self._mirror)
            write_files(self._folder, {config.name: yaml_of(data)})
            self._process = ServerProcess(
                [*envoy_command(find_envoy(), config), "--concurrency", str(_WORKERS)],
                server_variables(os.environ),
                mark=new_process_tag(),
                log_file=self._log_file,
                own_paths=[self._folder],
                orphan_paths=self._orphan_paths,
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        if not self._comes_true(lambda: responds_ok(self.admin_url, "/ready"), _START_S):
            raise self.failure("must start")

    def route_to(self, servers: Iterable[Server]) -> None:
        """Name the servers that get requests from now on; Envoy takes it in within milliseconds."""
        there = list(servers)
        by_grpc = assignment(GRPC, [_address(server.grpc_url) for server in there])
        by_http = assignment(HTTP, [_address(server.http_url) for server in there])
        write_files(
            self._folder, {_GRPC_FILE: json.dumps(by_grpc), _HTTP_FILE: json.dumps(by_http)}
        )

    def wait_drained(self, server: Server, timeout_s: float) -> bool:
        """Wait until Envoy gives this server nothing more; whether that is so."""
        gone = [(GRPC, _address(server.grpc_url)), (HTTP, _address(server.http_url))]
        return self._comes_true(
            lambda: not any(address in self._healthy(service) for service, address in gone),
            timeout_s,
        )

    def wait_healthy(self, servers: Sequence[Server], timeout_s: float) -> bool:
        """Wait until Envoy has found all of these servers healthy; whether that is so."""
        wanted = {_address(server.grpc_url) for server in servers}
        return self._comes_true(lambda: wanted <= self._healthy(GRPC), timeout_s)

    def has_died(self) -> bool:
        """Whether it was started and runs no more."""
        return self._process is not None and not self._process.is_running

    def failure(self, rule: str) -> UserError:
        """Why it does not run, by its last words."""
        log = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        said = next((line for line in reversed(log) if line.strip()), "nothing")
        status = self._process.exit_status if self._process is not None else "not started"
        return UserError("envoy", rule, given=f"{status}; it said: {said}")

    def stop(self) -> None:
        """End it; may be called at any time and more than once."""
        if self._process is not None:
            self._process.end(_END_S)
            self._process = None

    def _healthy(self, service: Service) -> set[tuple[str, int]]:
        """Addresses of the replicas that get requests; raises what HTTP does without an answer."""
        host, port = _address(self.admin_url)
        connection = http.client.HTTPConnection(host, port, timeout=_ADMIN_S)
        try:
            connection.request("GET", "/clusters?format=json")
            page = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        found = set()
        for cluster in page["cluster_statuses"]:
            hosts = cluster.get("host_statuses", ()) if cluster["name"] == service.cluster else ()
            for said in hosts:
                if said["health_status"] == {"eds_health_status": "HEALTHY"}:
                    at = said["address"]["socket_address"]
                    found.add((at["address"], at["port_value"]))
        return found

    def _comes_true(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(OSError, http.client.HTTPException):
                if holds():
                    return True
            if self._process is None or self.has_died() or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def _url(self, port: int) -> str:
        host = _LOOPBACK if self._listen.host == "0.0.0.0" else self._listen.host
        return f"{host}:{port}"


def find_envoy() -> Path:
    """The program: the first on PATH, that of this Python's environment before others.

    Raises:
        UserError: there is none.
    """
    found = shutil.which("envoy", path=server_path())
    if found is None:
        raise UserError(
            "--replicas",
            "needs Envoy, which balances over them",
            given="no `envoy` on PATH",
            remedy=f"Run `{INSTALL_FLEET}`",
        )
    return Path(found)


def envoy_command(program: Path, config: Path) -> list[str]:
    """How Envoy is run here: several may run on a machine, and it tells only what went wrong."""
    return [str(program), "--config-path", str(config), "--disable-hot-restart", "-l", "warning"]


def validate(config: Path) -> str:
    """What Envoy itself has against a configuration; empty where it takes it.

    Raises:
        UserError: Envoy is not installed.
    """
    done = subprocess.run(
        [*envoy_command(find_envoy(), config), "--mode", "validate"],
        capture_output=True,
        text=True,
        timeout=_VALIDATE_S,
    )
    return "" if done.returncode == 0 else done.stderr.strip()


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    return host, int(port)
