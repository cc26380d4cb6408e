"""Real servers behind a real Envoy, scraped by a real Prometheus, that start and stop on request.

Envoy and its endpoint files are those of `triptych serve --replicas`.
"""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from benchmarks.prometheus_tools import running
from triptych.container.health import find_fault
from triptych.container.manifests import find_pipelines, largest_request_mib
from triptych.serving.fleet.envoy import Listen, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server

NAMESPACE = "default"
_LOOPBACK = "127.0.0.1"
_PORTS = ("grpc_port", "http_port", "metrics_port")
_HEALTHY_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 10.0
_QUERY_TIMEOUT_S = 5.0


@dataclass(eq=False)
class LiveReplica:
    """A replica from its request to its end, in seconds on the monotonic clock."""

    began_s: float
    ended_s: float = math.inf
    server: Server | None = None
    is_ready: bool = False
    started: Future[None] = field(default_factory=Future)


class LiveFleet:
    """Servers of one repository; `live_fleet` creates it.

    Args:
        servers: Servers that are not started, one for each possible replica.
        proxy: Envoy, started and without endpoints.
        prometheus: Base URL.
    """

    def __init__(self, servers: list[Server], proxy: Proxy, prometheus: str) -> None:
        self._free: SimpleQueue[Server] = SimpleQueue()
        for server in servers:
            self._free.put(server)
        self._proxy = proxy
        self._prometheus = prometheus
        self._wanted: list[LiveReplica] = []
        self._all: list[LiveReplica] = []
        self._routing = threading.Lock()
        self._pool = ThreadPoolExecutor(2 * len(servers), "live-fleet")
        self._ends: list[Future[None]] = []

    @property
    def url(self) -> str:
        """Address of Envoy for gRPC."""
        return self._proxy.grpc_url

    @property
    def wanted(self) -> int:
        """Number of replicas that are ready or starting."""
        return len(self._wanted)

    @property
    def ready(self) -> int:
        """Number of replicas that receive requests."""
        return len(self._list_ready())

    def scale(self, wanted: int) -> None:
        """Start or stop replicas without waiting for them; the newest ones stop first.

        Raises:
            UserError: A replica did not start.
            TimeoutError: A replica started and does not respond.
        """
        for replica in self._wanted:
            if replica.started.done():
                replica.started.result()
        while len(self._wanted) < wanted:
            replica = LiveReplica(time.monotonic())
            self._wanted.append(replica)
            self._all.append(replica)
            replica.started = self._pool.submit(self._start, replica)
        while len(self._wanted) > wanted:
            self._ends.append(self._pool.submit(self._end, self._wanted.pop()))

    def wait_ready(self) -> float:
        """Wait until Envoy uses all replicas; return the seconds since the newest was requested.

        Raises:
            UserError: A replica did not start.
            TimeoutError: A replica does not respond, or Envoy does not find it healthy.
        """
        for replica in self._wanted:
            replica.started.result()
        if not self._proxy.wait_healthy(self._list_ready(), _HEALTHY_TIMEOUT_S):
            raise TimeoutError("Envoy does not find its replicas healthy.")
        return time.monotonic() - max(replica.began_s for replica in self._wanted)

    def replica_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds of all replicas in a period, those that start and end included."""
        spans = (min(end_s, one.ended_s) - max(start_s, one.began_s) for one in self._all)
        return sum(max(0.0, span) for span in spans)

    def query(self, query: str) -> float:
        """Return the value of a PromQL query now; NaN where its result is empty."""
        words = urllib.parse.urlencode({"query": query})
        url = f"{self._prometheus}/api/v1/query?{words}"
        with urllib.request.urlopen(url, timeout=_QUERY_TIMEOUT_S) as response:
            result = json.loads(response.read())["data"]["result"]
        return float(result[0]["value"][1]) if result else math.nan

    def close(self) -> None:
        """Stop all servers."""
        self.scale(0)
        self._pool.shutdown()
        for end in self._ends:
            end.result()

    def _start(self, replica: LiveReplica) -> None:
        server = replica.server = self._free.get()
        server.start()
        server.wait_ready()
        _wait_healthy(server)
        with self._routing:
            replica.is_ready = replica in self._wanted
            self._proxy.route_to(self._list_ready())

    def _end(self, replica: LiveReplica) -> None:
        try:
            replica.started.result()
        finally:
            server = replica.server
            assert server is not None
            with self._routing:
                replica.is_ready = False
                self._proxy.route_to(self._list_ready())
            self._proxy.wait_drained(server, _DRAIN_TIMEOUT_S)
            server.stop()
            replica.ended_s = time.monotonic()
            self._free.put(server)

    def _list_ready(self) -> list[Server]:
        return [one.server for one in list(self._all) if one.is_ready and one.server is not None]


def _wait_healthy(server: Server) -> None:
    """Wait until the readiness probe of `triptych deploy` passes."""
    deadline = time.monotonic() + _HEALTHY_TIMEOUT_S
    while fault := find_fault(f"http://{server.http_url}", find_pipelines(server.repository)):
        if time.monotonic() > deadline:
            raise TimeoutError(fault)


@contextmanager
def live_fleet(
    repository: Path,
    folder: Path,
    *,
    pipeline: str,
    max_replicas: int,
    limit_ms: float,
    scrape_s: float,
) -> Iterator[LiveFleet]:
    """Yield a fleet without replicas; its servers, Envoy and Prometheus end with the block.

    Args:
        repository: Repository that each replica serves.
        folder: Folder to create for logs and the data of Prometheus.
        pipeline: Name of the pods in metrics, as in manifests of `triptych deploy`.
        limit_ms: Latency limit of the SLO.
        scrape_s: Scrape interval of Prometheus.
    """
    folder.mkdir()
    names = [f"{name}_{number}" for number in range(max_replicas) for name in _PORTS]
    ports = reserve_ports(
        _LOOPBACK, dict.fromkeys((*_PORTS, *names, "admin_port", "prometheus"), 0)
    )
    servers = [
        Server(
            repository,
            grpc_port=ports[f"grpc_port_{number}"],
            http_port=ports[f"http_port_{number}"],
            metrics_port=ports[f"metrics_port_{number}"],
        )
        for number in range(max_replicas)
    ]
    pods = {f"{pipeline}-{n}": ports[f"metrics_port_{n}"] for n in range(max_replicas)}
    pods[f"{pipeline}-envoy-0"] = ports["metrics_port"]
    (folder / "prometheus.json").write_text(json.dumps(_make_scrape_config(pods, scrape_s)))
    listen = Listen(_LOOPBACK, **{name: ports[name] for name in (*_PORTS, "admin_port")})
    settings = proxy_settings(
        replicas=max_replicas, max_request_mib=largest_request_mib(repository), limits_ms=[limit_ms]
    )
    address = f"{_LOOPBACK}:{ports['prometheus']}"
    flags = [
        f"--config.file={folder}/prometheus.json",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with ExitStack() as stack:
        proxy = Proxy(settings, listen, log_file=folder / "envoy.log")
        stack.callback(proxy.stop)
        proxy.start([])
        stack.enter_context(running(folder, "prometheus", *flags))
        fleet = LiveFleet(servers, proxy, f"http://{address}")
        stack.callback(fleet.close)
        yield fleet


def _make_scrape_config(pods: dict[str, int], scrape_s: float) -> dict[str, object]:
    """Return Prometheus' configuration for the pods, with the labels of a PodMonitor."""
    interval = f"{1e3 * scrape_s:.0f}ms"

    def make_job(pod: str, port: int) -> dict[str, object]:
        labels = {"namespace": NAMESPACE, "pod": pod}
        targets = [{"targets": [f"{_LOOPBACK}:{port}"], "labels": labels}]
        return {"job_name": pod, "static_configs": targets}

    return {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout"), interval),
        "scrape_configs": [make_job(pod, port) for pod, port in pods.items()],
    }
