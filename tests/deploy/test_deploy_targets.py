"""`triptych deploy` for other targets: proxies, gateways, rollouts, KServe and Compose."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy_cases import (
    ENGINE,
    compose_schema,
    document,
    kustomized,
    options,
    taken,
    write_bench,
    write_built,
)
from http_pages import comes_true, page
from triptych.base.errors import UserError
from triptych.base.explained import plain
from triptych.deploy.context import Manifests
from triptych.deploy.folder import write_manifests
from triptych.deploy.kubernetes import ADMIN_PORT, PORTS, labels
from triptych.deploy.targets import make_manifests
from triptych.serving.fleet.proxy import envoy_command, find_envoy, validate
from triptych.serving.ports import reserve_ports

TENSORRT: dict[str, Any] = {"core": {"backend": "tensorrt"}}


def manifests(folder: Path, engine: Any = None, fields: Any = None, **changes: Any) -> Manifests:
    """Of a pipeline of these fields with a usual bench and these options."""
    repository = write_built(folder, engine=engine, **(fields or {}))
    reports = write_bench(folder / "reports")
    return make_manifests(repository, "minilm", options(**changes), reports)


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_envoy_stands_in_front_and_tells_the_rate(tmp_path: Path) -> None:
    made = manifests(tmp_path)
    proxy = document(made, "envoy-deployment.yaml")
    assert proxy["spec"]["replicas"] == 2
    container = container_of(proxy)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    assert ADMIN_PORT not in ports.values()
    grace = proxy["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= 10 + 30 * 2
    services = {name: document(made, f"{name}.yaml")["spec"] for name in ("service", "replicas")}
    assert services["service"]["selector"]["app.kubernetes.io/name"] == "minilm-envoy"
    assert services["replicas"]["clusterIP"] == "None"
    config = document(made, "envoy.yaml")
    clusters = {one["name"]: one for one in config["static_resources"]["clusters"]}
    assert clusters["triton_grpc"]["type"] == "STRICT_DNS"
    assert "minilm-replicas" in json.dumps(clusters["triton_grpc"]["load_assignment"])
    assert 80.0 in config["stats_config"]["histogram_bucket_settings"][0]["buckets"]
    write_manifests(tmp_path / "out", made.files)
    assert validate(tmp_path / "out/base/envoy.yaml") == ""
    # Only the proxy reaches the servers, and what it counts is what scales them.
    policy = document(made, "network-policy.yaml")["spec"]["ingress"][0]["from"]
    assert policy == [{"podSelector": {"matchLabels": labels("minilm-envoy")}}]
    query = document(made, "scaled-object.yaml")["spec"]["triggers"][0]["metadata"]["query"]
    assert "envoy_http_downstream_rq_total" in query
    promql_parser.parse(query)


class Slow(http.server.BaseHTTPRequestHandler):
    """A server of models that answers a request only once it may."""

    protocol_version = "HTTP/1.1"
    asked, may_answer = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/infer"):
            Slow.asked.set()
            Slow.may_answer.wait(30)
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
    names = [*PORTS.values(), ADMIN_PORT]
    ports = dict(
        zip(names, reserve_ports("127.0.0.1", dict.fromkeys("abcd", 0)).values(), strict=True)
    )

    def run(words: list[str]) -> subprocess.Popen[bytes]:
        words = [word.replace(str(ADMIN_PORT), str(ports[ADMIN_PORT])) for word in words]
        words = [word.replace("$$", "$").replace("sleep 10", "sleep 0.2") for word in words]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = tmp_path / "envoy.json"
        config.write_text(
            json.dumps(on_loopback(document(made, "envoy.yaml"), ports, server.server_port))
        )
        running = subprocess.Popen(envoy_command(find_envoy(), config), stderr=subprocess.DEVNULL)
        try:
            metrics = ports[PORTS["metrics"]]
            assert comes_true(lambda: page(metrics, "/ready")[0] == 200)
            assert page(metrics, "/stats")[0] == 404
            assert run(healthy).wait(30) == 0
            polls: list[int] = []

            def is_served() -> bool:
                polls.append(page(ports[PORTS["http"]], "/v2/health/ready")[0])
                return polls[-1] == 200

            assert comes_true(is_served)
            answers: list[int] = []
            infer = (ports[PORTS["http"]], "/v2/models/minilm/infer", "POST")
            asker = threading.Thread(target=lambda: answers.append(page(*infer)[0]))
            asker.start()
            assert Slow.asked.wait(30)
            drain = run(command)
            assert comes_true(lambda: page(metrics, "/ready")[0] == 503)
            assert drain.poll() is None
            Slow.may_answer.set()
            assert drain.wait(60) == 0
            asker.join(30)
            assert answers == [200]
            assert run(healthy).wait(30) == 1
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
            running.wait(30)
            server.shutdown()


def test_a_gateway_takes_the_place_of_envoy(tmp_path: Path) -> None:
    made = manifests(tmp_path, gateway="edge/public")
    objects = taken(kustomized(tmp_path / "out", made))
    assert not [name for name in objects if "envoy" in name]
    route = objects["GRPCRoute minilm"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "edge"}]
    assert route["rules"] == [{"backendRefs": [{"name": "minilm", "port": 8001}]}]
    assert "clusterIP" not in objects["Service minilm"]["spec"]
    policy = objects["NetworkPolicy minilm"]["spec"]["ingress"][0]["from"]
    assert [next(iter(peer)) for peer in policy] == ["podSelector", "namespaceSelector"]
    query = objects["ScaledObject minilm"]["spec"]["triggers"][0]["metadata"]["query"]
    assert "nv_inference_request_success" in query


def test_a_rollout_goes_by_the_rules_of_the_alerts(tmp_path: Path) -> None:
    weights = {}
    for name, promise in {"tight": {"p99_ms": 80.0}, "wide": {"p90_ms": 100.0}}.items():
        repository = write_built(tmp_path / name, serving={"slo": promise, "triton": "26.08"})
        by_hand = options(
            gateway="public", rollout="argo", rps_per_replica=9.0, cpu_cores=1.0, memory_mib=2048
        )
        made = make_manifests(repository, "minilm", by_hand, tmp_path / "none")
        objects = taken(kustomized(tmp_path / name / "out", made))
        rollout = objects["Rollout minilm"]["spec"]
        assert rollout["workloadRef"]["name"] == "minilm"
        assert "replicas" not in rollout
        canary = rollout["strategy"]["canary"]
        route = objects["GRPCRoute minilm"]["spec"]["rules"][0]["backendRefs"]
        assert [(one["name"], one["weight"]) for one in route] == [
            (canary["stableService"], 100),
            (canary["canaryService"], 0),
        ]
        assert f"Service {canary['canaryService']}" in objects
        target = objects["ScaledObject minilm"]["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Rollout", "minilm")
        rules = objects["PrometheusRule minilm"]["spec"]["groups"]
        records = {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
        alerts = " ".join(str(rule["expr"]) for group in rules for rule in group["rules"])
        weights[name] = [step["setWeight"] for step in canary["steps"] if "setWeight" in step]
        metrics = objects["AnalysisTemplate minilm"]["spec"]["metrics"]
        assert len(metrics) == 2
        for metric in metrics:
            query = metric["provider"]["prometheus"]["query"]
            promql_parser.parse(query)
            assert query.partition("{")[0] in records
            (threshold,) = re.findall(r"<= ([\d.]+)$", metric["successCondition"])
            assert f"> {threshold}" in alerts
            assert weights[name][0] > 100 * float(threshold)
        assert "rollout_info" in alerts
    assert weights == {"tight": [10, 50], "wide": [60]}


def test_kserve_gets_what_its_own_runtime_lacks(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "standard": {},
        "knative": {"canary_percent": 20},
        "gpu": {"repository_image": "models"},
    }
    for name, changes in cases.items():
        engine, fields = (ENGINE, TENSORRT) if name == "gpu" else (None, None)
        made = manifests(tmp_path / name, engine, fields, target="kserve", **changes)
        assert made.start == f"overlays/{'knative' if name == 'knative' else 'standard'}"
        objects = taken(kustomized(tmp_path / name / "out", made))
        runtime = objects["ServingRuntime minilm"]["spec"]
        (container,) = runtime["containers"]
        assert container["name"] == "kserve-container"
        assert {"name": "TRIPTYCH_REPOSITORY", "value": "/mnt/models"} in container["env"]
        assert container["readinessProbe"]["exec"]["command"][-1] == "triptych.container.health"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert {volume["name"] for volume in runtime["volumes"]} == {"shm", "tmp"}
        assert container["securityContext"]["runAsNonRoot"] is True
        assert 'deployment=~"minilm-predictor.*"' in str(objects["PrometheusRule minilm"]["spec"])
        predictor = objects["InferenceService minilm"]["spec"]["predictor"]
        ports = [port["name"] for port in container["ports"]]
        uri = predictor["model"]["storageUri"]
        if name == "knative":
            assert ports == ["h2c"]
            assert predictor["canaryTrafficPercent"] == 20
            assert (predictor["scaleMetric"], predictor["timeout"]) == ("rps", 50)
            assert not {"lifecycle"} & set(container)
            assert not {"terminationGracePeriodSeconds", "topologySpreadConstraints"} & set(
                predictor
            )
            assert "ScaledObject minilm" not in objects
            assert objects["PodMonitor minilm"]["spec"]["podMetricsEndpoints"][0]["portNumber"]
        else:
            assert ports == ["http", "grpc", "metrics"]
            assert "canaryTrafficPercent" not in predictor
            assert predictor["terminationGracePeriodSeconds"] == 50
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]
            target = objects["ScaledObject minilm"]["spec"]["scaleTargetRef"]
            assert target == {"name": "minilm-predictor"}
        if name == "gpu":
            assert uri == f"oci+native://models:{made.version}"
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
            assert runtime["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
        else:
            assert uri == f"pvc://minilm-{made.version}"


def test_compose_takes_what_is_written(tmp_path: Path) -> None:
    made = {
        "cpu": manifests(tmp_path / "cpu", target="compose"),
        "more": manifests(
            tmp_path / "more", target="compose", replicas=5, repository_image="models"
        ),
        "gpu": manifests(tmp_path / "gpu", ENGINE, TENSORRT, target="compose"),
    }
    for name, one in made.items():
        write_manifests(tmp_path / name / "out", one.files)
        written = yaml.safe_load((tmp_path / name / "out/compose.yaml").read_text())
        compose_schema().validate(written)
        assert validate(tmp_path / name / "out/envoy.yaml") == ""
        assert one.command(Path("out")) == "docker compose --file out/compose.yaml up --detach"
        servers = {key: each for key, each in written["services"].items() if key != "envoy"}
        for server in servers.values():
            assert server["read_only"] is True
            assert server["user"] == "1000:1000"
            assert server["shm_size"] == "256m"
            assert server["deploy"]["resources"]["limits"]["memory"] == "1152M"
            assert server["stop_grace_period"] == "40s"
            assert server["healthcheck"]["test"][-1] == "triptych.container.health"
            assert server["volumes"][0]["target"] == "/models"
        if name == "gpu":
            assert list(servers) == ["triton-0", "triton-1"]
            ids = [
                server["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
                for server in servers.values()
            ]
            assert ids == [["0"], ["1"]]
            assert all(
                server["networks"]["default"]["aliases"] == ["triton"]
                for server in servers.values()
            )
        else:
            assert servers["triton"]["deploy"]["replicas"] == (5 if name == "more" else 2)
        assert [port.rpartition(":")[0][:10] for port in written["services"]["envoy"]["ports"]] == [
            "127.0.0.1:"
        ] * 3
    broken = plain(made["cpu"].files["compose.yaml"])
    broken["services"]["triton"]["healthchek"] = {}
    assert not compose_schema().is_valid(broken)
    # Two GPUs a replica: each has its own two.
    fields = {"core": {"backend": "tensorrt"}, "serving": {"slo": {"p99_ms": 80.0}, "gpus": [0, 1]}}
    two = manifests(tmp_path / "two", ENGINE, fields, target="compose")
    devices = plain(two.files["compose.yaml"])["services"]["triton-1"]["deploy"]["resources"]
    assert devices["reservations"]["devices"][0]["device_ids"] == ["2", "3"]


def test_options_that_a_target_does_not_know_are_refused(tmp_path: Path) -> None:
    repository, reports = write_built(tmp_path), write_bench(tmp_path / "reports")
    unbuilt = write_built(tmp_path / "unbuilt", **TENSORRT)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target": "compose", "gateway": "public"}, "only supported with --target kubernetes"),
        ({"target": "kserve", "replicas": 3}, "only supported with --target compose"),
        ({"canary_percent": 5}, "only supported with --target kserve"),
        ({"target": "kserve", "canary_percent": 101}, "a percentage"),
        ({"rollout": "argo"}, "needs --gateway"),
        ({"rollout": "flagger", "gateway": "public"}, "one of argo"),
        ({"gateway": "a/b/c"}, "NAMESPACE/NAME"),
        ({"envoy_image": "envoyproxy/envoy"}, "a tag that does not move"),
        ({"target": "compose", "replicas": 0}, "above 0"),
        ({"target": "compose", "max_grace_seconds": 30}, "0 + 30 + 5 s are 35 s"),
    ]
    for changes, said in cases:
        with pytest.raises(UserError) as error:
            make_manifests(repository, "minilm", options(**changes), reports)
        assert said in error.value.message, (changes, error.value.message)
    for target in ("kserve", "compose"):
        with pytest.raises(UserError, match="triptych engine minilm"):
            make_manifests(unbuilt, "minilm", options(target=target), reports)
