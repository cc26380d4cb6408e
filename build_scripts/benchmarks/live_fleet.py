"""Real servers behind a real Envoy, watched by a real Prometheus; they come and go when told to.

Envoy and its endpoint files are those of `triptych serve --replicas`; who decides how many there
are is another matter (`live_scaling.py`).
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
from triptych.container.locks import find_pipelines
from triptych.container.sizes import largest_request_mib
from triptych.serving.fleet.envoy import Listen, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server

NAMESPACE = "default"
_LOOPBACK = "127.0.0.1"
_OWN = ("grpc_port", "http_port", "metrics_port")
_FOUND_S = 30.0
_TAKEN_OUT_S = 10.0
_ASKED_S = 5.0


@dataclass(eq=False)
class _Replica:
    """From the wish for it to its end, in seconds on the monotonic clock."""

    began_s: float
    ended_s: float = math.inf
    server: Server | None = None
    is_ready: bool = False
    started: Future[None] = field(default_factory=Future)


class LiveFleet:
    """Servers on one repository; `live_fleet` makes one.

    Args:
        servers: not started; so many replicas there may be at once.
        proxy: started, in front of none.
        prometheus: its address.
    """

    def __init__(self, servers: list[Server], proxy: Proxy, prometheus: str) -> None:
        self._free: SimpleQueue[Server] = SimpleQueue()
        for server in servers:
            self._free.put(server)
        self._proxy = proxy
        self._prometheus = prometheus
        self._wanted: list[_Replica] = []
        self._all: list[_Replica] = []
        self._routing = threading.Lock()
        self._pool = ThreadPoolExecutor(2 * len(servers), "live-fleet")
        self._ends: list[Future[None]] = []

    @property
    def url(self) -> str:
        """Where Envoy is asked over gRPC."""
        return self._proxy.grpc_url

    @property
    def wanted(self) -> int:
        """Replicas that there should be: ready, or being started."""
        return len(self._wanted)

    @property
    def ready(self) -> int:
        """Replicas that get requests."""
        return len(self._ready())

    def scale(self, wanted: int) -> None:
        """Have so many replicas; returns at once, the newest go first.

        Raises:
            UserError: one did not start.
            TimeoutError: one started and did not answer.
        """
        for replica in self._wanted:
            if replica.started.done():
                replica.started.result()
        while len(self._wanted) < wanted:
            replica = _Replica(time.monotonic())
            self._wanted.append(replica)
            self._all.append(replica)
            replica.started = self._pool.submit(self._start, replica)
        while len(self._wanted) > wanted:
            self._ends.append(self._pool.submit(self._end, self._wanted.pop()))

    def wait_ready(self) -> float:
        """Wait until Envoy gives requests to all; seconds since the newest was wished for.

        Raises:
            UserError: one did not start.
            TimeoutError: one does not answer, or Envoy does not find it healthy.
        """
        for replica in self._wanted:
            replica.started.result()
        if not self._proxy.wait_healthy(self._ready(), _FOUND_S):
            raise TimeoutError("Envoy does not find its replicas healthy")
        return time.monotonic() - max(replica.began_s for replica in self._wanted)

    def replica_s(self, start_s: float, end_s: float) -> float:
        """Seconds of all replicas in between, those that start and end included."""
        spans = (min(end_s, one.ended_s) - max(start_s, one.began_s) for one in self._all)
        return sum(max(0.0, span) for span in spans)

    def ask(self, query: str) -> float:
        """What Prometheus makes of a query now; NaN where it finds nothing."""
        words = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(
            f"{self._prometheus}/api/v1/query?{words}", timeout=_ASKED_S
        ) as response:
            found = json.loads(response.read())["data"]["result"]
        return float(found[0]["value"][1]) if found else math.nan

    def close(self) -> None:
        """End all servers."""
        self.scale(0)
        self._pool.shutdown()
        for end in self._ends:
            end.result()

    def _start(self, replica: _Replica) -> None:
        server = replica.server = self._free.get()
        server.start()
        server.wait_ready()
        _wait_answered(server)
        with self._routing:
            replica.is_ready = replica in self._wanted
            self._proxy.route_to(self._ready())

    def _end(self, replica: _Replica) -> None:
        try:
            replica.started.result()
        finally:
            server = replica.server
            assert server is not None
            with self._routing:
                replica.is_ready = False
                self._proxy.route_to(self._ready())
            self._proxy.wait_drained(server, _TAKEN_OUT_S)
            server.stop()
            replica.ended_s = time.monotonic()
            self._free.put(server)

    def _ready(self) -> list[Server]:
        return [one.server for one in list(self._all) if one.is_ready and one.server is not None]


def _wait_answered(server: Server) -> None:
    """Wait until a server answers a question, as the readiness probe of `triptych deploy` does."""
    deadline = time.monotonic() + _FOUND_S
    while fault := find_fault(f"http://{server.http_url}", find_pipelines(server.repository)):
        if time.monotonic() > deadline:
            raise TimeoutError(fault)


@contextmanager
def live_fleet(
    repository: Path, folder: Path, *, pipeline: str, most: int, limit_ms: float, scrape_s: float
) -> Iterator[LiveFleet]:
    """A fleet without replicas, with room for so many; all of it ends with the context.

    Args:
        repository: what each replica serves.
        folder: new, for logs and Prometheus' data.
        pipeline: names the pods in metrics, as `triptych deploy` would.
        most: replicas at once.
        limit_ms: the promise.
        scrape_s: Prometheus looks so often.
    """
    folder.mkdir()
    names = [f"{name}_{number}" for number in range(most) for name in _OWN]
    wanted = dict.fromkeys((*_OWN, *names, "admin_port", "prometheus"), 0)
    ports = reserve_ports(_LOOPBACK, wanted)
    servers = [
        Server(
            repository,
            grpc_port=ports[f"grpc_port_{number}"],
            http_port=ports[f"http_port_{number}"],
            metrics_port=ports[f"metrics_port_{number}"],
        )
        for number in range(most)
    ]
    pages = {f"{pipeline}-{n}": ports[f"metrics_port_{n}"] for n in range(most)}
    pages[f"{pipeline}-envoy-0"] = ports["metrics_port"]
    (folder / "prometheus.json").write_text(json.dumps(_scraping(pages, scrape_s)))
    listen = Listen(_LOOPBACK, **{name: ports[name] for name in (*_OWN, "admin_port")})
    settings = proxy_settings(
        replicas=most, max_request_mib=largest_request_mib(repository), limits_ms=[limit_ms]
    )
    address = f"{_LOOPBACK}:{ports['prometheus']}"
    with ExitStack() as stack:
        proxy = Proxy(settings, listen, log_file=folder / "envoy.log")
        stack.callback(proxy.stop)
        proxy.start([])
        stack.enter_context(
            running(
                folder,
                "prometheus",
                f"--config.file={folder}/prometheus.json",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            )
        )
        fleet = LiveFleet(servers, proxy, f"http://{address}")
        stack.callback(fleet.close)
        yield fleet


def _scraping(pages: dict[str, int], scrape_s: float) -> dict[str, object]:
    """A Prometheus's configuration: pods and their ports, with the labels of a PodMonitor."""
    every = f"{1e3 * scrape_s:.0f}ms"
    return {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout"), every),
        "scrape_configs": [
            {
                "job_name": pod,
                "static_configs": [
                    {
                        "targets": [f"{_LOOPBACK}:{port}"],
                        "labels": {"namespace": NAMESPACE, "pod": pod},
                    }
                ],
            }
            for pod, port in pages.items()
        ],
    }
