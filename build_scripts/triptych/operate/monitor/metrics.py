"""Prometheus metrics of a monitoring run: a text file for the node exporter, or a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from triptych.base.errors import UserError
from triptych.operate.monitor.results import MonitorRun

PATH = "/metrics"


class RunCollector(Collector):
    """Metrics of the last monitoring run; none before the first run.

    Attributes:
        run: Last run. It can be replaced at any time.
        port: TCP port of the page; 0 where the metrics have no page.
    """

    def __init__(self, run: MonitorRun | None = None) -> None:
        self.run = run
        self.port = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics."""
        if self.run is not None:
            yield from _make_families(self.run)


def metrics_text(run: MonitorRun) -> str:
    """Return a run's metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    return generate_latest(registry).decode()


@contextmanager
def metrics_page(host: str, port: int) -> Iterator[RunCollector]:
    """Serve the metrics of the last run over HTTP while the block runs; port 0 takes a free one.

    Raises:
        UserError: The port is in use, or the host is not an address of this machine.
    """
    collector, registry = RunCollector(), CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UserError(
            "--port",
            "must be a free port on an address of this machine",
            given=f"{host}:{port}: {error}",
            remedy="Choose another port, or 0 for any free one",
        ) from error
    collector.port = server.server_port
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _make_families(run: MonitorRun) -> Iterator[GaugeMetricFamily]:
    own = {"pipeline": run.pipeline}
    tests = [({**own, "test": test.name}, test) for test in run.tests]
    yield _make_gauge("last_run_timestamp_seconds", "Unix time of the last run", (own, run.at))
    yield _make_gauge("rows", "Sampled rows compared in the last run", (own, run.rows))
    yield _make_gauge("alarms", "Alarms of the last run", (own, len(run.alarms)))
    yield _make_gauge("drifts", "Drifts of the last run", (own, len(run.drifts)))
    yield _make_gauge(
        "mean_loss",
        "Mean loss of a test over all rows since the build",
        *((labels, test.mean) for labels, test in tests if test.mean is not None),
    )
    yield _make_gauge(
        "allowed_loss",
        "Maximum mean loss of a correct pipeline",
        *((labels, test.allowed) for labels, test in tests),
    )
    yield _make_gauge(
        "alarm_evidence_ratio",
        "Evidence of a test divided by the evidence of an alarm; 1 or more is an alarm",
        *((labels, test.evidence / test.needed) for labels, test in tests),
    )
    yield _make_gauge(
        "metric",
        "A metric of the rows of the last run",
        *(({**own, "metric": metric.metric}, metric.value) for metric in run.metrics),
    )


def _make_gauge(name: str, text: str, *samples: tuple[dict[str, str], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"triptych_monitor_{name}", text)
    for labels, value in samples:
        family.add_sample(family.name, labels, value)
    return family
