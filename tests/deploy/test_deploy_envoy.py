"""The Envoy of manifests, as they configure, check and stop it: a real one in front of a server."""

import http.client
import http.server
import json
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_envoy import envoy_command
from tests.support.certificates import write_certificate
from tests.support.deploy_cases import (
    document,
    options,
    write_bench,
    write_built,
)
from tests.support.http_pages import comes_true, page
from triptych.base.explained import plain
from triptych.deploy.context import Manifests
from triptych.deploy.envoy import (
    ADMIN_SOCKET,
    EndpointNames,
    Listen,
    bootstrap,
    proxy_settings,
)
from triptych.deploy.kubernetes import DRAIN_PORT, PORTS
from triptych.deploy.targets import make_manifests
from triptych.serving.ports import reserve_ports


def test_a_collector_is_checked_with_the_authorities_of_envoys_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/opt/own/ca.pem")  # of this machine, no container's
    ports, replicas = Listen("0.0.0.0", 1, 2, 3), EndpointNames("replicas", 1, 2)
    settings = proxy_settings(replicas=2, max_request_mib=1)
    collector = "https://collector.example.com"
    made = bootstrap(settings, ports, replicas, ["p"], collector=collector)
    assert '"trusted_ca": {"filename": "/etc/ssl/certs/' in json.dumps(plain(made))


def manifests(folder: Path, **changes: Any) -> Manifests:
    """Of a pipeline with a usual bench and these options."""
    reports = write_bench(folder / "reports")
    return make_manifests(write_built(folder), "minilm", options(**changes), reports)


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


@contextmanager
def envoy(folder: Path, made: Manifests, server: int, *files: str) -> Iterator[dict[int, int]]:
    """Run Envoy with `files` of manifests in a folder; yield its ports by those of the files."""
    with reserve_ports("127.0.0.1", dict.fromkeys("abcd", 0)) as free:
        ports = dict(zip([*PORTS.values(), DRAIN_PORT], free.values(), strict=True))
        places = {"/etc/envoy-config": str(folder), "/run/triptych": str(folder)}
        places[ADMIN_SOCKET] = str(folder / "admin.sock")  # other Envoys run on this machine
        for file in ("envoy.yaml", *files):
            text = json.dumps(on_loopback(document(made, file), ports, server))
            for place, here in places.items():
                text = text.replace(place, here)
            (folder / file).write_text(text)
        command = envoy_command(folder / "envoy.yaml")
        running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            assert comes_true(lambda: page(ports[PORTS["metrics"]], "/ready")[0] == 200)
            yield ports
        finally:
            running.terminate()
            running.wait(60)


def test_envoy_counts_drains_and_says_so(tmp_path: Path) -> None:
    """The scripts and the metric as they stand in the manifests, on a real Envoy."""
    made = manifests(tmp_path)
    (container,) = document(made, "envoy-deployment.yaml")["spec"]["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    composed = plain(manifests(tmp_path / "compose", target="compose").files["compose.yaml"])
    healthy = composed["services"]["envoy"]["healthcheck"]["test"][1:]
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server,
        envoy(tmp_path, made, server.server_port) as ports,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api, metrics = (ports[PORTS[name]] for name in ("http", "metrics"))

        def run(words: list[str]) -> subprocess.Popen[bytes]:
            words = [word.replace(str(DRAIN_PORT), str(ports[DRAIN_PORT])) for word in words]
            words = [word.replace("$$", "$").replace("sleep 10", "sleep 0.2") for word in words]
            return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        assert page(metrics, "/stats")[0] == 404
        assert run(healthy).wait(60) == 0
        polls: list[int] = []

        def is_served() -> bool:
            polls.append(page(api, "/v2/health/ready")[0])
            return polls[-1] == 200

        assert comes_true(is_served)
        answers: list[int] = []
        infer = (api, "/v2/models/minilm/infer", "POST")
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
        trigger = document(made, "scaled-object.yaml")["spec"]["triggers"][0]
        (name,) = re.findall(r"rate\((\w+)", trigger["metadata"]["query"])
        counted = page(metrics, "/metrics")[1]
        asked = len(polls) + 1
        assert f'{name}{{envoy_http_conn_manager_prefix="http"}} {asked}\n' in counted
        assert f'{name}{{envoy_http_conn_manager_prefix="grpc"}} 0\n' in counted
        server.shutdown()


def swap(folder: Path, files: dict[str, Path]) -> None:
    """Replace the files of a mounted Secret as Kubernetes does: by one symbolic link."""
    fresh = Path(tempfile.mkdtemp(dir=folder, prefix=".."))
    for name, source in files.items():
        shutil.copy(source, fresh / name)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(fresh.name)
    (folder / "..new").replace(folder / "..data")


def test_mounted_secrets_are_read_again_without_a_restart(tmp_path: Path) -> None:
    """A certificate in a Secret, as cert-manager replaces it."""
    made = manifests(tmp_path, envoy_tls="tls", envoy_client_ca="ca")
    secrets = {name: tmp_path / name for name in ("tls", "client-ca")}
    for folder in secrets.values():
        folder.mkdir()
    own = tmp_path / "own"
    own.mkdir()
    write_certificate(own, "client", "client")

    def renew(name: str) -> None:
        write_certificate(own, name)
        swap(secrets["tls"], {"tls.crt": own / "server.pem", "tls.key": own / "server.key"})

    renew("first")
    swap(secrets["client-ca"], {"ca.crt": own / "ca.pem"})

    def ask(port: int) -> tuple[int, str]:
        """Return the status of a request for no pipeline, and the name of Envoy's certificate."""
        context = ssl.create_default_context(cafile=str(own / "ca.pem"))
        context.load_cert_chain(own / "client.pem", own / "client.key")
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        connection.request("GET", "/v2/logging")
        found: Any = connection.sock.getpeercert()
        status = connection.getresponse().status
        connection.close()
        return status, dict(found["subject"][0])["commonName"]

    with envoy(tmp_path, made, 1, "certificate.yaml", "clients.yaml") as ports:
        port = ports[PORTS["http"]]
        assert ask(port) == (404, "first")
        renew("second")
        assert comes_true(lambda: ask(port) == (404, "second"))
