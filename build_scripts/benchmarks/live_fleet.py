"""Real servers behind a real Envoy, scraped by a real Prometheus, that start and stop on request.

Envoy has the configuration of `triptych deploy`.
"""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.local_envoy import LOOPBACK, LocalEnvoy, local_envoy
from benchmarks.model import PIPELINE
from benchmarks.prometheus_tools import running
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines, largest_request_mib
from triptych.deploy.envoy import proxy_settings
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server, ServerAddress

NAMESPACE = "default"
_PORTS = ("grpc_port", "http_port", "metrics_port")
_HEALTHY_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 10.0
_QUERY_TIMEOUT_S = 5.0


@dataclass
class _Span:
    """Time of a replica from its request to its end, in seconds on the monotonic clock."""

    began_s: float
    ended_s: float = math.inf


class LiveFleet:
    """Servers of one repository; `live_fleet` creates it.

    Args:
        servers: Servers that are not started, one for each possible replica.
        proxy: Envoy without endpoints.
        prometheus: Base URL.
    """

    def __init__(self, servers: Sequence[Server], proxy: LocalEnvoy, prometheus: str) -> None:
        self._servers, self._proxy, self._prometheus = servers, proxy, prometheus
        # The thread of a server ends a replica before it starts the next one.
        self._threads = [ThreadPoolExecutor(1, "replica") for _ in servers]
        self._work: list[Future[None]] = []
        self._spans: list[_Span] = []
        self._active: list[_Span] = []
        self._ready: list[Server] = []
        self._routing = threading.Lock()

    @property
    def url(self) -> str:
        """Address of Envoy for gRPC."""
        return self._proxy.grpc_url

    @property
    def wanted(self) -> int:
        """Number of replicas that are ready or starting."""
        return len(self._active)

    @property
    def ready(self) -> int:
        """Number of replicas that receive requests."""
        return len(self._ready)

    def scale(self, wanted: int) -> None:
        """Start or stop replicas without waiting for them; the newest ones stop first.

        Raises:
            UserError: A replica did not start.
            TimeoutError: A replica started and does not respond.
        """
        for work in self._work:
            if work.done():
                work.result()
        while self.wanted < wanted:
            self._active.append(_Span(time.monotonic()))
            self._spans.append(self._active[-1])
            self._work.append(self._threads[self.wanted - 1].submit(self._start, self.wanted - 1))
        while self.wanted > wanted:
            index, span = self.wanted - 1, self._active.pop()
            self._work.append(self._threads[index].submit(self._end, index, span))

    def wait_ready(self) -> float:
        """Wait until Envoy uses all replicas; return the seconds since the newest was requested.

        Raises:
            UserError: A replica did not start.
            TimeoutError: A replica does not respond, or Envoy does not find it healthy.
        """
        for work in self._work:
            work.result()
        self._proxy.wait_healthy(self._ready)
        return time.monotonic() - max(span.began_s for span in self._spans)

    def replica_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds of all replicas in a period, those that start and end included."""
        spans = (min(end_s, one.ended_s) - max(start_s, one.began_s) for one in self._spans)
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
        for thread in self._threads:
            thread.shutdown()
        for work in self._work:
            work.result()

    def _start(self, index: int) -> None:
        server = self._servers[index]
        server.start()
        server.wait_ready()
        _wait_healthy(server)
        with self._routing:
            self._ready.append(server)
            self._proxy.route_to(self._ready)

    def _end(self, index: int, span: _Span) -> None:
        server = self._servers[index]
        with self._routing:
            self._ready = [one for one in self._ready if one is not server]
            self._proxy.route_to(self._ready)
        self._proxy.wait_drained(server, _DRAIN_TIMEOUT_S)
        server.stop()
        span.ended_s = time.monotonic()


def _wait_healthy(server: Server) -> None:
    """Wait until the readiness probe of `triptych deploy` passes."""
    deadline = time.monotonic() + _HEALTHY_TIMEOUT_S
    health = HealthCheck(find_pipelines(server.repository))
    while fault := health.find_fault(f"http://{server.http_url}"):
        if time.monotonic() > deadline:
            raise TimeoutError(fault)


@contextmanager
def live_fleet(
    repository: Path, folder: Path, max_replicas: int, limit_s: float, scrape_s: float
) -> Iterator[LiveFleet]:
    """Yield a fleet without replicas; its servers, Envoy and Prometheus end with the block.

    Args:
        repository: Repository that each replica serves.
        folder: Folder to create for logs and the data of Prometheus.
        limit_s: Latency limit of the SLO.
        scrape_s: Scrape interval of Prometheus.
    """
    folder.mkdir()
    numbers = range(max_replicas)
    names = [f"{name}_{number}" for number in numbers for name in _PORTS]
    wanted = dict.fromkeys((*_PORTS, *names, "prometheus"), 0)
    with ExitStack() as stack:
        ports = stack.enter_context(reserve_ports(LOOPBACK, wanted))
        servers = [
            Server(
                repository,
                address=ServerAddress(
                    grpc_port=ports[f"grpc_port_{number}"],
                    http_port=ports[f"http_port_{number}"],
                    metrics_port=ports[f"metrics_port_{number}"],
                ),
            )
            for number in numbers
        ]
        pods = {f"{PIPELINE.name}-{n}": ports[f"metrics_port_{n}"] for n in numbers}
        pods[f"{PIPELINE.name}-envoy-0"] = ports["metrics_port"]
        (folder / "prometheus.json").write_text(json.dumps(_make_scrape_config(pods, scrape_s)))
        settings = proxy_settings(
            replicas=max_replicas,
            max_request_mib=largest_request_mib(repository),
            limits_ms=[1e3 * limit_s],
        )
        address = f"{LOOPBACK}:{ports['prometheus']}"
        flags = [
            f"--config.file={folder}/prometheus.json",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]
        proxy = stack.enter_context(
            local_envoy(
                settings,
                [PIPELINE.name],
                log_file=folder / "envoy.log",
                ports={name: ports[name] for name in _PORTS},
            )
        )
        stack.enter_context(running(folder, "prometheus", *flags))
        fleet = LiveFleet(servers, proxy, f"http://{address}")
        stack.callback(fleet.close)
        yield fleet


def _make_scrape_config(pods: dict[str, int], scrape_s: float) -> dict[str, object]:
    """Return Prometheus' configuration for the pods, with the labels of a PodMonitor."""
    interval = f"{1e3 * scrape_s:.0f}ms"

    def make_job(pod: str, port: int) -> dict[str, object]:
        labels = {"namespace": NAMESPACE, "pod": pod}
        targets = [{"targets": [f"{LOOPBACK}:{port}"], "labels": labels}]
        return {"job_name": pod, "static_configs": targets}

    return {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout"), interval),
        "scrape_configs": [make_job(pod, port) for pod, port in pods.items()],
    }
