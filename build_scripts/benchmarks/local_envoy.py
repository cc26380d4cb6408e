"""An Envoy on this machine with the configuration of `triptych deploy`, in front of servers here.

Its clusters read their endpoints from files in place of DNS, so that servers can come and go.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from triptych.base.explained import plain
from triptych.base.files import write_files
from triptych.container.manifests import largest_request_mib
from triptych.deploy.envoy import (
    GRPC,
    HTTP,
    EndpointNames,
    Listen,
    Mirror,
    ProxySettings,
    Service,
    assigned,
    bootstrap,
    proxy_settings,
)
from triptych.serving.ports import reserve_ports

LOOPBACK = "127.0.0.1"
HEALTHY_TIMEOUT_S = 60.0
_ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
_POLL_S, _START_S, _END_S, _ADMIN_S = 0.02, 30.0, 5.0, 2.0


class Addresses(Protocol):
    """A server, by its addresses ``HOST:PORT``."""

    @property
    def grpc_url(self) -> str: ...

    @property
    def http_url(self) -> str: ...


class LocalEnvoy:
    """Envoy that runs; `local_envoy` starts it.

    Attributes:
        grpc_url: Address of gRPC.
        http_url: Address of HTTP.
        metrics_url: Complete URL of the metrics page.
    """

    def __init__(self, listen: Listen, folder: Path) -> None:
        self._folder = folder
        self.grpc_url = f"{LOOPBACK}:{listen.grpc_port}"
        self.http_url = f"{LOOPBACK}:{listen.http_port}"
        self.metrics_url = f"http://{LOOPBACK}:{listen.metrics_port}/metrics"

    def route_to(self, servers: Iterable[Addresses]) -> None:
        """Set the servers that get requests; Envoy applies it within milliseconds."""
        content = {}
        urls = [(server.grpc_url, server.http_url) for server in servers]
        for number, service in enumerate((GRPC, HTTP)):
            addresses = [_address(pair[number]) for pair in urls]
            resource = {"@type": _ASSIGNMENT, **assigned(service.cluster, addresses)}
            content[f"{service.cluster}.json"] = json.dumps({"resources": [resource]})
        write_files(self._folder, content)

    def wait_healthy(self, servers: Sequence[Addresses]) -> None:
        """Wait until Envoy finds all of these servers healthy.

        Raises:
            TimeoutError: It does not within `HEALTHY_TIMEOUT_S`.
        """
        wanted = {_address(server.grpc_url) for server in servers}
        if not _comes_true(lambda: wanted <= self._healthy(GRPC), HEALTHY_TIMEOUT_S):
            raise TimeoutError("Envoy does not find its servers healthy.")

    def wait_drained(self, server: Addresses, timeout_s: float) -> bool:
        """Wait until Envoy sends no more requests to a server; return whether it succeeded."""
        gone = [(GRPC, _address(server.grpc_url)), (HTTP, _address(server.http_url))]
        return _comes_true(
            lambda: not any(address in self._healthy(service) for service, address in gone),
            timeout_s,
        )

    def read_admin(self, path: str) -> bytes:
        """Return a page of Envoy's admin interface; errors of the socket and HTTP are raised."""
        connection = http.client.HTTPConnection(LOOPBACK, timeout=_ADMIN_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(_ADMIN_S)
            connection.sock.connect(str(self._folder / "admin.sock"))
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"HTTP {answer.status}")
            return answer.read()
        finally:
            connection.close()

    def _healthy(self, service: Service) -> set[tuple[str, int]]:
        page = json.loads(self.read_admin("/clusters?format=json"))
        found = set()
        for cluster in page["cluster_statuses"]:
            hosts = cluster.get("host_statuses", ()) if cluster["name"] == service.cluster else ()
            for status in hosts:
                if status["health_status"] == {"eds_health_status": "HEALTHY"}:
                    at = status["address"]["socket_address"]
                    found.add((at["address"], at["port_value"]))
        return found


@contextmanager
def local_envoy(
    settings: ProxySettings,
    pipelines: Sequence[str],
    servers: Sequence[Addresses] = (),
    *,
    log_file: Path,
    mirror: Mirror | None = None,
    collector: str | None = None,
    ports: dict[str, int] | None = None,
) -> Iterator[LocalEnvoy]:
    """Run Envoy in front of servers while the block runs; it has found them healthy.

    Args:
        settings: Numbers of the configuration.
        pipelines: Names that requests over HTTP may address.
        servers: Servers that get requests, at first.
        log_file: File of Envoy's log.
        mirror: Receiver of copied requests; None without one.
        collector: URL of a collector of OpenTelemetry; None for none.
        ports: Free ports ``grpc_port``, ``http_port`` and ``metrics_port``; None for any.
    """
    wanted = {} if ports else dict.fromkeys(("grpc_port", "http_port", "metrics_port"), 0)
    # A short path, because that of a socket has at most 107 bytes.
    with (
        reserve_ports(LOOPBACK, wanted) as picked,
        tempfile.TemporaryDirectory(prefix="envoy-", dir="/tmp") as folder,
        log_file.open("w") as log,
    ):
        listen = Listen(LOOPBACK, **(ports or picked))
        envoy = LocalEnvoy(listen, Path(folder))
        envoy.route_to(servers)
        made = plain(
            bootstrap(
                settings,
                listen,
                EndpointNames("unused", 1, 1),
                pipelines,
                mirror,
                admin_socket=f"{folder}/admin.sock",
                collector=collector,
            )
        )
        _read_endpoints_from_files(made, folder)
        config = Path(folder) / "envoy.json"
        config.write_text(json.dumps(made), encoding="utf-8")
        command = [*envoy_command(config), "--concurrency", "2"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if not _comes_true(lambda: bool(envoy.read_admin("/ready")), _START_S):
                raise RuntimeError(f"Envoy does not start: {log_file.read_text()[-2000:]}")
            envoy.wait_healthy(servers)
            yield envoy
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def envoy_of_repository(server: Addresses, repository: Path, pipeline: str) -> Iterator[LocalEnvoy]:
    """Run Envoy in front of one server with a repository while the block runs."""
    settings = proxy_settings(replicas=1, max_request_mib=largest_request_mib(repository))
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder, "envoy.log")
        with local_envoy(settings, [pipeline], [server], log_file=log_file) as envoy:
            yield envoy


def envoy_command(config: Path) -> list[str]:
    """Return Envoy's command line: several can run on a machine, and only warnings are logged."""
    own = str(Path(sys.executable).parent)
    program = shutil.which("envoy", path=own) or shutil.which("envoy")
    if program is None:
        raise SystemExit("Envoy is not installed. Run `make setup`.")
    return [program, "--config-path", str(config), "--disable-hot-restart", "-l", "warning"]


def _read_endpoints_from_files(config: Any, folder: str) -> None:
    """Change a configuration, so that the clusters of servers have files in place of DNS names."""
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] in (GRPC.cluster, HTTP.cluster):
            del cluster["load_assignment"], cluster["dns_refresh_rate"]
            source = {"path_config_source": {"path": f"{folder}/{cluster['name']}.json"}}
            cluster |= {"type": "EDS", "eds_cluster_config": {"eds_config": source}}


def _comes_true(holds: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            if holds():
                return True
        time.sleep(_POLL_S)
    return False


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    return host, int(port)
