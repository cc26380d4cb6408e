"""Copies of requests for a candidate, by a real Envoy in front of minimal HTTP servers."""

import http.client
import http.server
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy_cases import PROMISE, document, kustomized, options, taken, write_bench, write_built
from http_pages import comes_true, page
from triptych.base.errors import UserError
from triptych.base.explained import plain
from triptych.deploy.targets import make_manifests
from triptych.serving.fleet.envoy import (
    EndpointNames,
    Listen,
    Mirror,
    ProxySettings,
    bootstrap,
    proxy_settings,
)
from triptych.serving.fleet.mirror import MirrorOption, check_same_pipelines, parse_mirror
from triptych.serving.fleet.proxy import envoy_command, find_envoy
from triptych.serving.ports import reserve_ports

LOOPBACK = "127.0.0.1"
SHARE = 0.25
REQUESTS = 240
INFER = "/v2/models/minilm/infer"


class MinimalServer(http.server.ThreadingHTTPServer):
    """Answers as a server's HTTP port does, while it is free; remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), _Answer)
        self.asked: list[bytes] = []
        self.free = threading.Event()
        self.free.set()


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: MinimalServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == INFER:
            self.server.asked.append(body)
            self.server.free.wait()
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def minimal_server() -> Iterator[MinimalServer]:
    with MinimalServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def envoy(folder: Path, live: int, candidate: int) -> Iterator[Listen]:
    """The proxy of a fleet, in front of the HTTP ports of a replica and of a candidate."""
    names = ("grpc_port", "http_port", "metrics_port")
    listen = Listen(LOOPBACK, **reserve_ports(LOOPBACK, dict.fromkeys(names, 0)))
    made = bootstrap(
        settings(),
        listen,
        EndpointNames(LOOPBACK, 1, live),
        ["minilm"],
        Mirror(SHARE, EndpointNames(LOOPBACK, 1, candidate)),
        admin_socket=str(folder / "admin.sock"),
    )
    config = folder / "envoy.json"
    config.write_text(json.dumps(plain(made)))
    running = subprocess.Popen(envoy_command(find_envoy(), config), stderr=subprocess.DEVNULL)
    try:
        healthy = 'envoy_cluster_membership_healthy{envoy_cluster_name="candidate_http"} 1'
        ready = (listen.http_port, "/v2/health/ready")
        assert comes_true(lambda: page(*ready)[0] == 200)
        assert comes_true(lambda: healthy in page(listen.metrics_port, "/metrics")[1])
        yield listen
    finally:
        running.terminate()
        running.wait(60)


def is_answered(metrics_port: int) -> bool:
    """Whether the candidate has answered all copies that were made."""
    text = page(metrics_port, "/metrics")[1]
    gauges = [f"envoy_cluster_upstream_rq_{one}" for one in ("active", "pending_active")]
    return all(f'{one}{{envoy_cluster_name="candidate_http"}} 0' in text for one in gauges)


def settings() -> ProxySettings:
    return proxy_settings(replicas=1, max_request_mib=1)


def ask(port: int, count: int) -> None:
    """Send so many requests, one after the other, none of which may fail."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number in range(count):
        connection.request("POST", INFER, json.dumps({"number": number}))
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()


def test_a_share_is_mirrored_and_a_slow_or_dead_candidate_costs_nobody_an_answer(
    tmp_path: Path,
) -> None:
    with minimal_server() as live, minimal_server() as candidate:
        ports = live.server_port, candidate.server_port
        with envoy(tmp_path, *ports) as listen:
            ask(listen.http_port, REQUESTS)
            assert comes_true(lambda: is_answered(listen.metrics_port))
            # 240 draws at a quarter: five standard deviations.
            assert abs(len(candidate.asked) - SHARE * REQUESTS) < 5 * (REQUESTS * 0.1875) ** 0.5
            assert set(candidate.asked) <= set(live.asked)  # whole, and nothing else
            assert len(live.asked) == REQUESTS
            before = len(candidate.asked)
            candidate.free.clear()  # an answer that waited for it would never come
            ask(listen.http_port, REQUESTS)
            # What is under way fills up, and no more is mirrored.
            assert len(candidate.asked) - before <= settings().max_mirrored.value
            candidate.free.set()
            candidate.shutdown()
            candidate.server_close()
            ask(listen.http_port, REQUESTS)
            assert len(live.asked) == 3 * REQUESTS


def deployed(folder: Path, **changes: Any) -> Any:
    """Of a pipeline that samples, and another build of it."""
    sampling = {"slo": PROMISE, "sample": {"rate": 0.01}}
    repository = write_built(folder, serving=sampling)
    other = write_built(folder / "other", serving={**sampling, "sample": {"rate": 1.0}})
    chosen = options(mirrored=MirrorOption(other, 0.05), **changes)
    return make_manifests(repository, "minilm", chosen, write_bench(folder / "reports"))


def test_a_candidate_is_deployed_beside_the_replicas(tmp_path: Path) -> None:
    for name, changes in {"envoy": {}, "gateway": {"gateway": "public"}}.items():
        made = deployed(tmp_path / name, **changes)
        objects = taken(kustomized(tmp_path / name / "out", made))
        first, other = (
            objects[f"Deployment {one}"]["spec"] for one in ("minilm", "minilm-candidate")
        )
        assert other["replicas"] == 1
        claims, folders = [], []
        for each in (first, other):
            pod = each["template"]["spec"]
            (container,) = pod["containers"]
            volumes = {one["name"]: one for one in pod["volumes"]}
            claims.append(volumes["models"]["persistentVolumeClaim"]["claimName"])
            env = {one["name"]: one["value"] for one in container["env"]}
            folders.append(env["TRIPTYCH_SAMPLES"])
        assert claims[0] == f"minilm-{made.version}" != claims[1]
        assert folders == ["/samples", "/samples/.candidate"]
        labels = other["selector"]["matchLabels"]
        assert labels == objects["Service minilm-candidate"]["spec"]["selector"]
        # Nothing takes it for a replica.
        for kind in ("PodMonitor", "PodDisruptionBudget"):
            assert objects[f"{kind} minilm"]["spec"]["selector"]["matchLabels"] != labels
        if name == "gateway":
            (rule,) = objects["GRPCRoute minilm"]["spec"]["rules"]
            (mirror,) = (one["requestMirror"] for one in rule["filters"])
            assert mirror["backendRef"]["name"] == "minilm-candidate"
            assert mirror["fraction"] == {"numerator": 50_000, "denominator": 1_000_000}
        else:
            clusters = document(made, "envoy.yaml")["static_resources"]["clusters"]
            assert "minilm-candidate" in json.dumps(clusters)
            egress = objects["NetworkPolicy minilm-envoy"]["spec"]["egress"][0]["to"]
            assert {"podSelector": {"matchLabels": labels}} in egress


def test_what_cannot_be_mirrored_is_refused(tmp_path: Path) -> None:
    plain_build = write_built(tmp_path)
    sampling = write_built(
        tmp_path / "sampling", "other", serving={"slo": PROMISE, "sample": {"rate": 1.0}}
    )
    for text, said in (
        ("candidate", "above 0 and at most 1"),
        (f"{sampling}:0", "above 0 and at most 1"),
        (f"{sampling}:nan", "above 0 and at most 1"),
        (":0.5", "above 0 and at most 1"),
        (f"{tmp_path / 'none'}:0.5", "a repository with a pipeline"),
        (f"{plain_build}:0.5", "requires pipelines with serving.sample"),
    ):
        with pytest.raises(UserError, match=said):
            parse_mirror(text)
    assert parse_mirror(f"{sampling}:0.5") == MirrorOption(sampling, 0.5)
    with pytest.raises(UserError, match="must only have pipelines that are also served"):
        check_same_pipelines(plain_build, sampling)
    reports = write_bench(tmp_path / "reports")
    for build, changes, said in (
        (plain_build, {}, "a build that samples"),
        (plain_build, {"target": "compose"}, "only supported with --target kubernetes"),
    ):
        chosen = options(mirrored=MirrorOption(sampling, 0.5), **changes)
        with pytest.raises(UserError, match=said):
            make_manifests(build, "minilm", chosen, reports)
