"""Requests that are sent slowly or never end, sent to a real Envoy before a real server."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from processes import eventually
from triptych.base.explained import ExplainedValue
from triptych.client import Client, InferenceError
from triptych.serving.fleet.envoy import Listen, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports

pytestmark = pytest.mark.server

NAME = "minilm_packed"
SERVICE = "/inference.GRPCInferenceService"
LOOPBACK = "127.0.0.1"
MAX_MIB = 4
INFER = (
    f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {MAX_MIB << 20}\r\n\r\n"
)


@contextmanager
def envoy(server: Any, folder: Path, **limits: float) -> Iterator[Proxy]:
    """Envoy before the server, with these limits in place of its own."""
    names = ("grpc_port", "http_port", "metrics_port")
    settings = proxy_settings(replicas=1, max_request_mib=MAX_MIB)
    changed = {name: ExplainedValue(value, "a test") for name, value in limits.items()}
    proxy = Proxy(
        replace(settings, **changed),
        Listen(LOOPBACK, **reserve_ports(LOOPBACK, dict.fromkeys(names, 0))),
        log_file=folder / "envoy.log",
    )
    try:
        proxy.start([server], [NAME])
        assert proxy.wait_healthy([server], 60)
        yield proxy
    finally:
        proxy.stop()


def connect(url: str, sent: bytes) -> socket.socket:
    host, _, port = url.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Return what the other side sends until it closes the connection, at most a minute later."""
    said = b""
    try:
        while part := connection.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return said


def counter(proxy: Proxy, name: str) -> int:
    with urllib.request.urlopen(proxy.metrics_url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith(name))


def test_unfinished_requests_are_ended(minilm_server: Any, tmp_path: Path) -> None:
    limits = {"headers_timeout_s": 1, "request_timeout_s": 2}
    with envoy(minilm_server, tmp_path, **limits) as proxy, ExitStack() as opened:
        half = INFER.encode()[:40], INFER.encode() + b"x" * 1000
        connections = [
            opened.enter_context(connect(proxy.http_url, sent)) for sent in half for _ in range(20)
        ]
        with Client(NAME, proxy.grpc_url, retry=None) as client:
            assert len(client.embed(["hello"])) == 1
        for connection in connections:
            assert read_all(connection).startswith(b"HTTP/1.1 408")


def hold_over_http(url: str, opened: ExitStack) -> None:
    """Send all of a request but its last byte."""
    connection = opened.enter_context(connect(url, INFER.encode()))
    with suppress(OSError):  # it was ended meanwhile
        connection.sendall(b"x" * ((MAX_MIB << 20) - 1))


def hold_over_grpc(url: str, opened: ExitStack) -> None:
    """Send one message of a request that never ends."""
    options = [("grpc.max_send_message_length", -1)]
    channel = opened.enter_context(grpc.insecure_channel(url, options))
    messages: Queue[bytes | None] = Queue()
    messages.put(b"x" * ((MAX_MIB << 20) - 100))
    opened.callback(messages.put, None)
    call = channel.stream_unary(f"{SERVICE}/ModelInfer")
    opened.callback(call.future(iter(messages.get, None), timeout=120).cancel)


def test_memory_is_bounded_while_clients_hold_unfinished_requests(
    minilm_server: Any, tmp_path: Path
) -> None:
    """Those requests are ended, and other clients are answered."""
    count = 60
    heap_mib = 64
    limits = {"max_heap_mib": heap_mib, "min_idle_s": 1}
    with envoy(minilm_server, tmp_path, **limits) as proxy:

        def is_answered() -> bool:
            with suppress(InferenceError), Client(NAME, proxy.grpc_url) as client:
                return len(client.embed(["hello"])) == 1
            return False

        for hold, url in ((hold_over_http, proxy.http_url), (hold_over_grpc, proxy.grpc_url)):
            with ExitStack() as opened:
                for _ in range(count):
                    hold(url, opened)
                assert eventually(is_answered), hold
                assert counter(proxy, "envoy_server_memory_allocated") < heap_mib << 20
        assert counter(proxy, "envoy_envoy_overload_actions_reset_high_memory_stream_count") > 0


def test_connections_are_limited_and_metrics_remain(minilm_server: Any, tmp_path: Path) -> None:
    with envoy(minilm_server, tmp_path, max_client_connections=5) as proxy, ExitStack() as opened:
        ready = b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n"
        for _ in range(5):
            connection = opened.enter_context(connect(proxy.http_url, ready))
            assert connection.recv(12) == b"HTTP/1.1 200"
        refused = opened.enter_context(connect(proxy.http_url, b""))
        assert read_all(refused) == b""
        assert counter(proxy, "envoy_listener_downstream_global_cx_overflow") > 0


def test_streams_may_wait_longer_than_requests(minilm_server: Any, tmp_path: Path) -> None:
    """A stream without a message for longer than a request may take is still answered."""
    limits = {"headers_timeout_s": 1, "request_timeout_s": 1, "idle_request_s": 1}
    with envoy(minilm_server, tmp_path, **limits) as proxy, ExitStack() as opened:
        channel = opened.enter_context(grpc.insecure_channel(proxy.grpc_url))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests: Queue[Any] = Queue()
        answers = stub.ModelStreamInfer(iter(requests.get, None), timeout=120)
        unfinished = opened.enter_context(connect(proxy.http_url, INFER.encode()))
        assert read_all(unfinished).startswith(b"HTTP/1.1 408")
        for _ in range(2):
            request = pb.ModelInferRequest(model_name=NAME, raw_input_contents=[b"\5\0\0\0hello"])
            request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
            requests.put(request)
            assert next(answers).error_message == ""
            again = opened.enter_context(connect(proxy.http_url, INFER.encode()))
            assert read_all(again).startswith(b"HTTP/1.1 408")
        requests.put(None)
        assert list(answers) == []
