"""The Envoy of manifests, as they configure, check and stop it: a real one in front of a server."""

import http.client
import http.server
import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

from deploy_cases import (
    document,
    options,
    write_bench,
    write_built,
)
from http_pages import comes_true, page
from triptych.base.explained import plain
from triptych.deploy.context import Manifests
from triptych.deploy.kubernetes import DRAIN_PORT, PORTS
from triptych.deploy.targets import make_manifests
from triptych.serving.fleet.envoy import ADMIN_SOCKET
from triptych.serving.fleet.proxy import envoy_command, find_envoy
from triptych.serving.ports import reserve_ports


def manifests(folder: Path, **changes: Any) -> Manifests:
    """Of a pipeline with a usual bench and these options."""
    reports = write_bench(folder / "reports")
    return make_manifests(write_built(folder), "minilm", options(**changes), reports)


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


class Slow(http.server.BaseHTTPRequestHandler):
    """A server of models that answers a request only once it may."""

    protocol_version = "HTTP/1.1"
    asked, may_answer = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/infer"):
            Slow.asked.set()
            Slow.may_answer.wait(60)
        body = b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


def on_loopback(node: Any, ports: dict[int, int], server: int) -> Any:
    """A configuration of manifests with free ports, and one server behind it."""
    if isinstance(node, list):
        return [on_loopback(each, ports, server) for each in node]
    if not isinstance(node, dict):
        return node
    if "port_value" in node:
        if node["address"] == "minilm-replicas":
            return {"address": "127.0.0.1", "port_value": server}
        return {"address": "127.0.0.1", "port_value": ports[node["port_value"]]}
    return {key: on_loopback(each, ports, server) for key, each in node.items()}


def test_envoy_counts_drains_and_says_so(tmp_path: Path) -> None:
    """The scripts and the metric as they stand in the manifests, on a real Envoy."""
    made = manifests(tmp_path)
    container = container_of(document(made, "envoy-deployment.yaml"))
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    composed = plain(manifests(tmp_path / "compose", target="compose").files["compose.yaml"])
    healthy = composed["services"]["envoy"]["healthcheck"]["test"][1:]
    names = [*PORTS.values(), DRAIN_PORT]
    ports = dict(
        zip(names, reserve_ports("127.0.0.1", dict.fromkeys("abcd", 0)).values(), strict=True)
    )

    def run(words: list[str]) -> subprocess.Popen[bytes]:
        words = [word.replace(str(DRAIN_PORT), str(ports[DRAIN_PORT])) for word in words]
        words = [word.replace("$$", "$").replace("sleep 10", "sleep 0.2") for word in words]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = tmp_path / "envoy.json"
        text = json.dumps(on_loopback(document(made, "envoy.yaml"), ports, server.server_port))
        # Other Envoys run on this machine.
        config.write_text(text.replace(ADMIN_SOCKET, str(tmp_path / "admin.sock")))
        running = subprocess.Popen(envoy_command(find_envoy(), config), stderr=subprocess.DEVNULL)
        try:
            metrics = ports[PORTS["metrics"]]
            assert comes_true(lambda: page(metrics, "/ready")[0] == 200)
            assert page(metrics, "/stats")[0] == 404
            assert run(healthy).wait(60) == 0
            polls: list[int] = []

            def is_served() -> bool:
                polls.append(page(ports[PORTS["http"]], "/v2/health/ready")[0])
                return polls[-1] == 200

            assert comes_true(is_served)
            answers: list[int] = []
            infer = (ports[PORTS["http"]], "/v2/models/minilm/infer", "POST")
            asker = threading.Thread(target=lambda: answers.append(page(*infer)[0]))
            asker.start()
            assert Slow.asked.wait(60)
            drain = run(command)
            assert comes_true(lambda: page(metrics, "/ready")[0] == 503)
            assert drain.poll() is None
            Slow.may_answer.set()
            assert drain.wait(60) == 0
            asker.join(60)
            assert answers == [200]
            assert run(healthy).wait(60) == 1
            series = document(made, "scaled-object.yaml")["spec"]["triggers"][0]["metadata"][
                "query"
            ]
            (name,) = re.findall(r"rate\((\w+)", series)
            counted = page(metrics, "/metrics")[1]
            asked = len(polls) + 1
            assert f'{name}{{envoy_http_conn_manager_prefix="http"}} {asked}\n' in counted
            assert f'{name}{{envoy_http_conn_manager_prefix="grpc"}} 0\n' in counted
        finally:
            running.terminate()
            running.wait(60)
            server.shutdown()
