"""Requests at a real Envoy with the configuration of `deploy`: what it forwards and copies."""

import gzip
import http.client
import http.server
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from benchmarks.local_envoy import LOOPBACK, LocalEnvoy
from tests.support.deploy_cases import PROMISE, options, write_bench, write_built
from tests.support.envoy_front import NAME, OTHER, SERVICE, STEP, envoy, infer_request, send_http
from tests.support.processes import eventually
from triptych.base.errors import UserError
from triptych.client import Client, InferenceError
from triptych.deploy.envoy import (
    EndpointNames,
    Mirror,
    MirrorOption,
    parse_mirror,
    proxy_settings,
)
from triptych.deploy.targets import make_manifests

LARGE_MIB = 4
INFER = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {{size}}\r\n\r\n"
UNFINISHED = INFER.format(size=LARGE_MIB << 20).encode()
SHARE = 0.25
REQUESTS = 240
NUMBERS = count()
"""Numbers in the bodies of requests, each of which is sent once."""
INFER = "/v2/models/tickets/infer"
COMPRESSED = "send it without compression"


@pytest.fixture(scope="module")
def proxy(minilm_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEnvoy]:
    """Envoy before the server, for one of its two pipelines."""
    with envoy(minilm_server, tmp_path_factory.mktemp("envoy"), NAME) as proxy:
        yield proxy


@pytest.fixture
def channel(proxy: LocalEnvoy) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(proxy.grpc_url) as channel:
        yield channel


def samples(url: str, name: str) -> list[str]:
    """Return the lines of a page of metrics that begin with a name."""
    with urllib.request.urlopen(url, timeout=60) as page:
        return [line for line in page.read().decode().splitlines() if line.startswith(name)]


def send(channel: grpc.Channel, message: bytes, method: str = "ModelInfer", **options: Any) -> str:
    """Send a serialized message; return the code and text of its error, or ``OK``."""
    try:
        channel.unary_unary(f"{SERVICE}/{method}")(message, timeout=60, **options)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


def post(proxy: LocalEnvoy, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(proxy.http_url, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return send_http(connection, path, body, names)[:2]


@pytest.mark.server
def test_only_pipelines_and_what_controls_nothing_is_open(
    channel: grpc.Channel, proxy: LocalEnvoy
) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    for path in (f"{NAME}/infer", f"{NAME}/versions/1/infer"):
        assert post(proxy, f"/v2/models/{path}", body)[0] == 200
    models = (
        f"{STEP}/infer", f"{STEP.replace('_', '%5f')}/infer", f"{NAME}/../{STEP}/infer", "stats",
        f"{STEP}/generate_stream", f"{STEP}/config", f"{NAME}/stats", f"{OTHER}/infer",
        f"{NAME}/trace/setting",
    )  # fmt: skip
    others = (
        *("repository/index", "logging", "trace/setting"),
        *(f"repository/models/{NAME}/{verb}load" for verb in ("", "un")),
        f"health/../repository/models/{NAME}/unload",
        *(f"{kind}sharedmemory/status" for kind in ("system", "cuda")),
        *(f"{kind}sharedmemory/region/a/register" for kind in ("system", "cuda")),
        "systemsharedmemory/region/a/unregister",
    )
    for path in (*(f"models/{path}" for path in models), *others):
        for sent in (body, b""):
            status, said = post(proxy, f"/v2/{path}", sent)
            assert (status, said[:37]) == (404, "This proxy does not forward this requ"), path
    for method, message in (
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=NAME)),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=NAME)),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="a", key="/a")),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a")),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
        ("LogSettings", pb.LogSettingsRequest()),
    ):
        code, _, text = send(channel, message.SerializeToString(), method).partition(": ")
        assert code in ("NOT_FOUND", "UNIMPLEMENTED"), method
        assert "does not forward" in text, method


@pytest.mark.server
def test_compressed_requests_are_refused(channel: grpc.Channel, proxy: LocalEnvoy) -> None:
    """One MB could become 1 GiB at the server."""
    message = infer_request().SerializeToString()
    for method in ("ModelInfer", "ModelReady", "ServerLive"):
        said = send(channel, message, method, compression=grpc.Compression.Gzip)
        assert said.startswith("UNIMPLEMENTED"), said
        assert COMPRESSED in said
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    with pytest.raises(grpc.RpcError, match=COMPRESSED):
        list(stub.ModelStreamInfer(iter([infer_request()]), compression=grpc.Compression.Gzip))
    bomb = gzip.compress(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 20
    for encoding in ("gzip", "deflate", "identity, gzip"):
        status, said = post(proxy, f"/v2/models/{NAME}/infer", bomb, Content_Encoding=encoding)
        assert (status, COMPRESSED in said) == (415, True), (status, said)
    assert post(proxy, "/v2", b"", Content_Encoding="identity")[0] == 200


def connect(url: str, sent: bytes) -> socket.socket:
    host, _, port = url.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Return what the other side sends until it closes the connection, at most a minute later."""
    said = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            said += part
    return said


@pytest.mark.server
def test_unfinished_requests_are_ended_and_streams_may_wait_longer(
    minilm_server: Any, tmp_path: Path
) -> None:
    """A stream without a message for longer than a request may take is still answered."""
    limits = {"headers_timeout_s": 1, "request_timeout_s": 1, "idle_request_s": 1}
    with envoy(minilm_server, tmp_path, NAME, limits=limits) as proxy, ExitStack() as opened:
        channel = opened.enter_context(grpc.insecure_channel(proxy.grpc_url))
        requests: Queue[Any] = Queue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter(requests.get, None), timeout=120)
        halves = (UNFINISHED[:40], INFER.format(size=1 << 20).encode() + b"x" * 1000)
        for _ in range(2):
            connections = [
                opened.enter_context(connect(proxy.http_url, sent))
                for sent in halves
                for _ in range(20)
            ]
            assert eventually(lambda: is_answered(proxy))
            for connection in connections:
                assert read_all(connection).startswith(b"HTTP/1.1 408")
            requests.put(infer_request())
            assert next(answers).error_message == ""
        requests.put(None)
        assert list(answers) == []


def is_answered(proxy: LocalEnvoy) -> bool:
    with suppress(InferenceError), Client(NAME, proxy.grpc_url) as client:
        return len(client.embed(["hello"])) == 1
    return False


def hold_over_http(url: str, opened: ExitStack) -> None:
    """Send all of a request but its last byte."""
    connection = opened.enter_context(connect(url, UNFINISHED))
    with suppress(OSError):  # it was ended meanwhile
        connection.sendall(b"x" * ((LARGE_MIB << 20) - 1))


def hold_over_grpc(url: str, opened: ExitStack) -> None:
    """Send one message of a request that never ends."""
    options = [("grpc.max_send_message_length", -1)]
    channel = opened.enter_context(grpc.insecure_channel(url, options))
    messages: Queue[bytes | None] = Queue()
    messages.put(b"x" * ((LARGE_MIB << 20) - 100))
    opened.callback(messages.put, None)
    call = channel.stream_unary(f"{SERVICE}/ModelInfer")
    opened.callback(call.future(iter(messages.get, None), timeout=120).cancel)


@pytest.mark.server
def test_memory_and_connections_are_bounded_while_clients_hold_unfinished_requests(
    minilm_server: Any, tmp_path: Path
) -> None:
    """Those requests are ended, and other clients are answered."""
    heap_mib, connections = 64, 100
    limits = {"max_heap_mib": heap_mib, "min_idle_s": 1, "max_client_connections": connections}
    with envoy(minilm_server, tmp_path, NAME, max_mib=LARGE_MIB, limits=limits) as proxy:

        def count(name: str) -> int:
            return sum(int(line.split()[-1]) for line in samples(proxy.metrics_url, name))

        def is_bounded() -> bool:
            return count("envoy_server_memory_allocated") < heap_mib << 20

        def are_ended() -> bool:  # some may end as abandoned before others fill the heap
            for hold, url in ((hold_over_http, proxy.http_url), (hold_over_grpc, proxy.grpc_url)):
                with ExitStack() as opened:
                    for _ in range(60):
                        hold(url, opened)
                    assert eventually(lambda: is_answered(proxy)), hold
                    assert eventually(is_bounded), hold
            return count("envoy_envoy_overload_actions_reset_high_memory_stream_count") > 0

        assert eventually(are_ended, 240)

        def are_refused() -> bool:  # a connection without a request is closed after a while
            with ExitStack() as opened:
                for _ in range(connections + 1):
                    opened.enter_context(connect(proxy.http_url, b""))
                return count("envoy_listener_downstream_global_cx_overflow") > 0

        assert eventually(are_refused)  # and metrics remain


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
        message = pb.ModelInferRequest(model_name="tickets")
        infer(message.SerializeToString(), timeout=60, metadata=[*own.items()])
        connection = http.client.HTTPConnection(proxy.http_url, timeout=60)
        assert send_http(connection, INFER, b"{}", own)[0] == 200
    assert len(server.headers) >= 2  # Envoy sends a request again that is answered late
    for headers in server.headers:
        assert headers["x-request-id"]
        assert {name for name in headers if name.startswith("x-envoy")} <= BY_ENVOY


BY_ENVOY = {"x-envoy-expected-rq-timeout-ms"}
"""Headers that Envoy itself adds."""


def ask(proxy: LocalEnvoy) -> set[bytes]:
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
                page = proxy.read_admin("/stats/prometheus").decode()
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
    reports = write_bench(tmp_path / "reports")
    for build, changes, said in (
        (plain_build, {}, "a build that samples"),
        (plain_build, {"target": "compose"}, "only supported with --target kubernetes"),
    ):
        chosen = options(mirrored=MirrorOption(sampling, 0.5), **changes)
        with pytest.raises(UserError, match=said):
            make_manifests(build, "minilm", chosen, reports)
