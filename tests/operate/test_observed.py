"""A served pipeline that slows and recovers, watched by a real Prometheus and Alertmanager.

Its answers are looked at by nobody here: the gauges of the watch are of made-up looks.
"""

import json
import math
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import pytest

from benchmarks.local_envoy import local_envoy
from benchmarks.prometheus_tools import running
from tests.support.http_pages import comes_true
from tests.support.monitor_cases import look
from tests.support.processes import serving_http
from tests.support.project import build_into, write_pipeline
from triptych.base.explained import plain, render_yaml
from triptych.client import Client, InferenceError
from triptych.deploy.context import read_context
from triptych.deploy.envoy import proxy_settings
from triptych.deploy.kubernetes import (
    TEMPLATES,
    render_alertmanager,
    render_panels,
    render_scaled_object,
    template_values,
)
from triptych.deploy.options import DeployOptions
from triptych.operate.monitor.metrics import RunCollector, metrics_page
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server

LOOPBACK = "127.0.0.1"
LIMIT_MS, SLOW_S = 300.0, 0.4
SCALE = 1 / 30
"""Of the rules' windows: five minutes are ten seconds."""
SCRAPE = "500ms"
LOGIC = (">", "<", ">=", "and", "or")
ELSEWHERE = ("kube_deployment_", "kube_pod_", "nv_gpu_")
"""Metrics that no CPU machine without Kubernetes has."""
HOOKS = f"""
import time


def before(rows):
    if any("slow" in row["text"] for row in rows):
        time.sleep({SLOW_S})
    return rows
"""
pytestmark = [pytest.mark.server, pytest.mark.long]


@dataclass
class Load:
    """Three clients that ask one after the other; `text` is what they ask."""

    text: str = "my delivery is late"
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, url: str) -> None:
        with Client("tiny", url) as client:
            while not self.is_over.wait(0.3):
                with suppress(InferenceError):  # refused for want of room, which counts as failed
                    client.embed([self.text])


@contextmanager
def loaded(url: str) -> Iterator[Load]:
    load = Load()
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(load.run, url) for _ in range(3)]
        try:
            yield load
        finally:
            load.is_over.set()
    for client in clients:
        client.result()


@contextmanager
def webhook(states: dict[str, str]) -> Iterator[str]:
    """A receiver of an Alertmanager: name of an alert to ``firing`` or ``resolved``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            states.update((a["labels"]["alertname"], a["status"]) for a in message["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as address:
        yield address


def get(url: str, data: Any = None) -> Any:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None


def operands(node: Any) -> Iterator[str]:
    """The parts of an expression that have a value also while what it asks for is not so."""
    if isinstance(node, promql_parser.ParenExpr):
        yield from operands(node.expr)
    elif isinstance(node, promql_parser.BinaryExpr) and str(node.op) in LOGIC:
        yield from operands(node.lhs)
        yield from operands(node.rhs)
    elif isinstance(node, promql_parser.Call) and node.func.name == "absent":
        yield from operands(node.args[0])
    elif isinstance(node, promql_parser.Call) and node.func.name == "absent_over_time":
        yield from operands(node.args[0].vector_selector)
    elif not isinstance(node, promql_parser.NumberLiteral):
        yield node.prettify()


def has_value(prometheus: str, expression: str) -> bool:
    found = get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    values = [float(one["value"][1]) for one in found["data"]["result"]]
    return any(map(math.isfinite, values))


class Deployed:
    """What `deploy` makes of a built pipeline, its windows shortened."""

    def __init__(self, repository: Path, folder: Path) -> None:
        options = DeployOptions(
            image="triptych-serve:24.10", name="tiny", triton="24.10",
            rps_per_replica=50.0, cpu_cores=1.0, memory_mib=2048, monitor_image="watch:1",
        )  # fmt: skip
        context = read_context(repository, "tiny", options, folder, time_scale=SCALE)
        template = TEMPLATES / "prometheus-rule.yaml.j2"
        rules = plain(render_yaml(template, **template_values(context)))
        scaled = plain(render_scaled_object(context))
        panels = render_panels(context)
        self.groups: list[dict[str, Any]] = rules["spec"]["groups"]
        self.queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
        self.queries += [rule["expr"] for group in self.groups for rule in group["rules"]]
        self.queries += [
            query for row in panels.values() for panel in row for query in panel["queries"].values()
        ]
        # What a deployment without an Envoy asks of Triton 24.10.
        bare = replace(context.metrics, envoy=None)
        self.queries += [bare.offered("1m"), bare.percentile_us("p99")]

    def parts(self) -> set[str]:
        """All that is asked, without comparisons."""
        return {part for each in self.queries for part in operands(promql_parser.parse(each))}


class Watched(NamedTuple):
    """Addresses of the pipeline's Envoy and of its watchers, and what they see."""

    url: str
    gauges: RunCollector
    prometheus: str
    alertmanager: str
    states: dict[str, str]  # last state of each alert that the Alertmanager sent


@contextmanager
def watched(server: Server, deployed: Deployed, folder: Path) -> Iterator[Watched]:
    """An Envoy in front of the server, a Prometheus that scrapes both, an Alertmanager."""
    states: dict[str, str] = {}
    wanted = dict.fromkeys(("prometheus", "alerts"), 0)
    with ExitStack() as stack:
        ports = stack.enter_context(reserve_ports(LOOPBACK, wanted))
        addresses = {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
        settings = proxy_settings(replicas=1, max_request_mib=1, limits_ms=[LIMIT_MS])
        log_file = folder / "envoy.log"
        proxy = stack.enter_context(local_envoy(settings, ["tiny"], [server], log_file=log_file))
        gauges = stack.enter_context(metrics_page(LOOPBACK, 0))
        gauges.run = replace(look(), pipeline="tiny", alarms=())
        pages = {
            pod: url.split("/")[2]
            for pod, url in (("tiny-1", server.metrics_url), ("tiny-envoy-1", proxy.metrics_url))
        } | {"tiny-watch-1": f"{LOOPBACK}:{gauges.port}"}
        hook = stack.enter_context(webhook(states))
        (routes,) = render_alertmanager(hook, hook, wait="1s", interval="1s").values()
        for name, content in (
            ("alertmanager.json", plain(routes)),
            ("rules.json", {"groups": deployed.groups}),
            ("prometheus.json", watching(pages, addresses["alerts"])),
        ):
            (folder / name).write_text(json.dumps(content))
        for program, port, *flags in (
            ("alertmanager", "alerts", f"--storage.path={folder}/a", "--cluster.listen-address="),
            ("prometheus", "prometheus", f"--storage.tsdb.path={folder}/p"),
        ):
            listen = f"--web.listen-address={addresses[port]}"
            config = f"--config.file={folder}/{program}.json"
            stack.enter_context(running(folder, program, config, listen, *flags))
        prometheus, alerts = (f"http://{addresses[name]}" for name in ("prometheus", "alerts"))
        yield Watched(proxy.grpc_url, gauges, prometheus, alerts, states)


def test_a_slowed_step_raises_the_alert_and_it_clears(tmp_path: Path, tiny_model: Path) -> None:
    folder = write_pipeline(
        tmp_path / "tiny",
        model={"source": str(tiny_model)},
        serving={"slo": {"p99_ms": LIMIT_MS}, "sample": {"rate": 1.0, "window_s": 0.5}},
    )
    (folder / "hooks.py").write_text(HOOKS)
    repository = tmp_path / "repository"
    build_into(folder, repository)
    deployed = Deployed(repository, tmp_path)
    parts = deployed.parts()
    missing = {part for part in parts if any(name in part for name in ELSEWHERE)}
    assert len(missing) == 4  # replicas wanted, ready and not available, and restarts
    alert, wrong = "TinySlowP99Burn1h", "TinyAccuracyDegraded"
    with (
        Server(repository, environment={FOLDER_VARIABLE: str(tmp_path / "samples")}) as server,
        watched(server, deployed, tmp_path) as watch,
        loaded(watch.url) as load,
    ):
        assert not without_value(watch.prometheus, parts - missing)
        # A busy machine may have raised it for a while already.
        assert comes_true(lambda: watch.states.get(alert) != "firing"), watch.states
        usual = (Load.text, watch.gauges.run)
        broken = ("a slow one", replace(look(), pipeline="tiny"))
        for (load.text, watch.gauges.run), state in ((broken, "firing"), (usual, "resolved")):
            for name in (alert, wrong):
                assert comes_true(lambda: watch.states.get(name) == state), watch.states  # noqa: B023
        assert_inhibited(watch.alertmanager)


def without_value(prometheus: str, parts: set[str]) -> set[str]:
    """The expressions that have no value, even after a while."""
    left = set(parts)

    def are_gone() -> bool:
        left.difference_update([part for part in left if has_value(prometheus, part)])
        return not left

    comes_true(are_gone)
    return left


def watching(pages: dict[str, str], alertmanager: str) -> dict[str, Any]:
    """A Prometheus's configuration: pods' pages, each with the labels that a PodMonitor gives."""
    times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    targets = {
        pod: {"targets": [target], "labels": {"namespace": "default", "pod": pod}}
        for pod, target in pages.items()
    }
    return {
        "global": dict.fromkeys(times, SCRAPE),
        "rule_files": ["rules.json"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [{"job_name": pod, "static_configs": [targets[pod]]} for pod in pages],
    }


def assert_inhibited(alerts: str) -> None:
    """A missing replica mutes slow steps of its own pipeline, and no failures."""
    same = {"pipeline": "other", "namespace": "default", "severity": "page"}
    kinds = ("replicas", "latency", "failures")
    sent = [{"labels": {"alertname": kind, "kind": kind, **same}} for kind in kinds]
    get(f"{alerts}/api/v2/alerts", sent)
    wanted = {"replicas": "active", "latency": "suppressed", "failures": "active"}
    states: dict[str, str] = {}

    def are_judged() -> bool:
        # Alertmanager judges what it was sent a little later; until then an alert is "unprocessed".
        found = get(f"{alerts}/api/v2/alerts?filter=pipeline%3Dother")
        states.update({one["labels"]["kind"]: one["status"]["state"] for one in found})
        return states == wanted

    assert comes_true(are_judged), states
