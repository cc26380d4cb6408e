"""An Envoy owned by this process, and the endpoints it routes to."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import plain, yaml_of
from triptych.base.extras import install_command
from triptych.base.files import write_files
from triptych.container.entrypoint import server_variables
from triptych.serving.embedded import server_path
from triptych.serving.fleet.access import Access
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
    route_file,
)
from triptych.serving.orphan_cleanup import new_process_tag
from triptych.serving.process import ServerProcess
from triptych.serving.server import Server, new_shell_safe_dir

_LOOPBACK = "127.0.0.1"
_GRPC_FILE, _HTTP_FILE, _ADMIN_SOCKET = "grpc.json", "http.json", "admin.sock"
_POLL_S = 0.02
_START_S = 30.0
_END_S = 5.0
_ADMIN_S = 2.0
_VALIDATE_S = 60.0
_WORKERS = 2
"""Number of threads. With one, a slow client could delay all others on a loaded machine."""


class Proxy:
    """Envoy in front of servers on this machine.

    Args:
        settings: Settings of the proxy.
        listen: Host and free ports.
        log_file: File of Envoy's log.
        mirror: Receiver of copied requests; None without one.
        access: Certificate and keys; None for plain text without keys.
        gateway_socket: Socket of gRPC for the gateway of this machine; None for none.
        orphan_paths: Files and folders to remove if this process dies before it calls `stop`.
    """

    def __init__(
        self,
        settings: ProxySettings,
        listen: Listen,
        *,
        log_file: Path,
        mirror: Mirror | None = None,
        access: Access | None = None,
        gateway_socket: Path | None = None,
        collector: str | None = None,
        orphan_paths: Sequence[Path] = (),
    ) -> None:
        self._settings = settings
        self._listen = listen
        self._log_file = log_file
        self._mirror = mirror
        self._access = access or Access()
        self._gateway_socket = gateway_socket
        self._collector = collector
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
    def gateway_url(self) -> str:
        """Address of gRPC for the gateway, without TLS and keys."""
        path = self._gateway_socket
        return self.grpc_url if path is None else f"unix:{path}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._url(self._listen.metrics_port)}/metrics"

    @property
    def _files(self) -> EndpointFiles:
        return EndpointFiles(self._folder / _GRPC_FILE, self._folder / _HTTP_FILE)

    def start(self, servers: Iterable[Server], pipelines: Sequence[str]) -> None:
        """Start Envoy in front of `servers`, and wait until it accepts requests for `pipelines`.

        Raises:
            UserError: Envoy is not installed, or does not start.
        """
        self._folder = new_shell_safe_dir()
        try:
            files = self._files
            self.route_to(servers, pipelines)
            self._access.write(self._folder)
            config = self._folder / "envoy.yaml"
            data = bootstrap(
                self._settings,
                self._listen,
                files,
                pipelines,
                self._mirror,
                admin_socket=str(self._folder / _ADMIN_SOCKET),
                access=self._access.files(self._folder),
                gateway=self._gateway_socket,
                collector=self._collector,
            )
            write_files(self._folder, {config.name: yaml_of(data)})
            self._process = ServerProcess(
                [*envoy_command(find_envoy(), config), "--concurrency", str(_WORKERS)],
                server_variables(os.environ),
                tag=new_process_tag(),
                log_file=self._log_file,
                own_paths=[self._folder],
                orphan_paths=self._orphan_paths,
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        if not self._wait_for(lambda: self.find_fault() is None, _START_S):
            raise self.failure("does not start")

    def route_to(self, servers: Iterable[Server], pipelines: Sequence[str]) -> None:
        """Set the servers and the pipelines that get requests.

        Envoy applies it within milliseconds.
        """
        endpoints = list(servers)
        files = self._files
        content = {
            files.grpc: assignment(GRPC, [_address(server.grpc_url) for server in endpoints]),
            files.http: assignment(HTTP, [_address(server.http_url) for server in endpoints]),
        } | {
            files.routes(service): route_file(self._settings, service, pipelines, self._mirror)
            for service in (GRPC, HTTP)
        }
        write_files(
            self._folder, {file.name: json.dumps(plain(data)) for file, data in content.items()}
        )

    def renew_access(self) -> None:
        """Take over keys and certificates that have changed; no connection is closed.

        Raises:
            UserError: A file has a mistake, so that nothing changes.
        """
        if self._process is not None:
            self._access.renew(self._folder)

    def wait_drained(self, server: Server, timeout_s: float) -> bool:
        """Wait until Envoy sends no more requests to this server; return whether it succeeded."""
        gone = [(GRPC, _address(server.grpc_url)), (HTTP, _address(server.http_url))]
        return self._wait_for(
            lambda: not any(address in self._healthy(service) for service, address in gone),
            timeout_s,
        )

    def wait_healthy(self, servers: Sequence[Server], timeout_s: float) -> bool:
        """Wait until Envoy finds all of these servers healthy; return whether it succeeded."""
        wanted = {_address(server.grpc_url) for server in servers}
        return self._wait_for(lambda: wanted <= self._healthy(GRPC), timeout_s)

    def has_died(self) -> bool:
        """Return whether Envoy was started and has exited."""
        return self._process is not None and not self._process.is_running

    def failure(self, rule: str) -> UserError:
        """Return the error of an Envoy that does not run, with the last line of its log."""
        log = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(log) if line.strip()), "nothing")
        status = self._process.exit_status if self._process is not None else "not started"
        return UserError(
            "envoy",
            rule,
            given=f"{status}; log: {last}",
            remedy=f"See the log: {self._log_file}",
        )

    @property
    def pid(self) -> int:
        """Process id of Envoy, which was started."""
        assert self._process is not None
        return self._process.pid

    def find_fault(self) -> str | None:
        """Return why Envoy does not answer; None if it does."""
        try:
            self._read_admin("/ready")
        except (OSError, http.client.HTTPException) as error:
            return f"it does not answer ({error})"
        return None

    def stop(self, grace_s: float = _END_S) -> None:
        """Stop Envoy within `grace_s` seconds; it can be called at any time and repeatedly."""
        if self._process is not None:
            self._process.end(grace_s)
            self._process = None

    def _healthy(self, service: Service) -> set[tuple[str, int]]:
        """Return the addresses of healthy replicas; HTTP errors are raised."""
        page = json.loads(self._read_admin("/clusters?format=json"))
        found = set()
        for cluster in page["cluster_statuses"]:
            hosts = cluster.get("host_statuses", ()) if cluster["name"] == service.cluster else ()
            for status in hosts:
                if status["health_status"] == {"eds_health_status": "HEALTHY"}:
                    at = status["address"]["socket_address"]
                    found.add((at["address"], at["port_value"]))
        return found

    def _read_admin(self, path: str) -> bytes:
        """Return a page of Envoy's admin interface; errors of the socket and HTTP are raised."""
        connection = http.client.HTTPConnection(_LOOPBACK, timeout=_ADMIN_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(_ADMIN_S)
            connection.sock.connect(str(self._folder / _ADMIN_SOCKET))
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"HTTP {answer.status}")
            return answer.read()
        finally:
            connection.close()

    def _wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
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
    """Return the path of Envoy: from this Python's environment, or else from PATH.

    Raises:
        UserError: Envoy is not installed.
    """
    found = shutil.which("envoy", path=server_path())
    if found is None:
        raise UserError(
            "--replicas",
            "needs Envoy as load balancer",
            given="no `envoy` on PATH",
            remedy=f"Run `{install_command('fleet')}`",
        )
    return Path(found)


def envoy_command(program: Path, config: Path) -> list[str]:
    """Return Envoy's command line: several can run on a machine, and only warnings are logged."""
    return [str(program), "--config-path", str(config), "--disable-hot-restart", "-l", "warning"]


def validate(config: Path) -> str:
    """Return Envoy's error about a configuration; empty if it is valid.

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
