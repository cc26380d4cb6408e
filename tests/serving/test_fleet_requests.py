"""Requests that no server may get, and clients that never end, at a real Envoy before a server."""

import gzip
import http.client
import json
import socket
import struct
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from envoy_front import NAME, OTHER, SERVICE, STEP, TEXT, envoy, infer_request, send_http
from processes import eventually, repeated
from triptych.client import Client, InferenceError
from triptych.serving.fleet.proxy import Proxy

pytestmark = pytest.mark.server

LARGE_MIB = 4
INFER = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {{size}}\r\n\r\n"
UNFINISHED = INFER.format(size=LARGE_MIB << 20).encode()
LYING = {
    "string lengths beyond the data": struct.pack("<I", 500) + b"hello",
    "the largest string length": struct.pack("<I", 0xFFFFFFFF) + b"hello",
    "data behind the last string": TEXT + b"abc",
    "half of a length": b"\5\0",
    "two strings in place of one": TEXT + TEXT,
    "no string in place of one": b"",
}
COMPRESSED = "send it without compression"


@pytest.fixture(scope="module")
def proxy(minilm_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Envoy before the server, which forwards requests for one of its two pipelines."""
    with envoy(minilm_server, tmp_path_factory.mktemp("envoy"), NAME) as proxy:
        yield proxy


@pytest.fixture
def channel(proxy: Proxy) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(proxy.grpc_url) as channel:
        yield channel


@pytest.fixture(scope="module", autouse=True)
def no_request_fails_at_the_server(minilm_server: Any) -> Iterator[None]:
    """What Envoy rejects reaches no model, so that no batch can fail."""
    before = failures(minilm_server)
    yield
    assert failures(minilm_server) == before


def failures(server: Any) -> list[str]:
    """Return the counts of failures, without copies of late requests that Envoy canceled."""
    lines = samples(server.metrics_url, "nv_inference_request_failure")
    return sorted(line for line in lines if 'reason="CANCELED"' not in line)


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


def stream(channel: grpc.Channel, *requests: Any) -> list[str]:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    answers = stub.ModelStreamInfer(iter(requests), timeout=60)
    return [answer.error_message or "OK" for answer in answers]


def post(proxy: Proxy, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(proxy.http_url, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return send_http(connection, path, body, names)[:2]


def send_binary(proxy: Proxy, head: str, raw: bytes) -> tuple[int, str]:
    size = {"Inference_Header_Content_Length": str(len(head))}
    return post(proxy, f"/v2/models/{NAME}/infer", head.encode() + raw, **size)


def json_head(size: int, **changes: Any) -> str:
    parameters = {"binary_data_size": size}
    entry = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": parameters}
    return json.dumps({"inputs": [{**entry, **changes}]})


def test_a_step_cannot_be_addressed_or_hidden_in_a_message(channel: grpc.Channel) -> None:
    fine = infer_request().SerializeToString()
    step = pb.ModelInferRequest(model_name=STEP).SerializeToString()
    assert send(channel, fine) == "OK"
    other = infer_request(OTHER).SerializeToString()
    unknown = "NOT_FOUND: This proxy only forwards requests for pipelines."
    for message in (step, other, infer_request("nothing").SerializeToString(), fine + step):
        assert send(channel, message).startswith(unknown)
    assert f"unknown model: '{STEP}' is not found" in send(channel, step)
    for method in ("ModelConfig", "ModelMetadata", "ModelReady"):
        assert send(channel, pb.ModelReadyRequest(name=NAME).SerializeToString(), method) == "OK"
        message = pb.ModelReadyRequest(name=STEP).SerializeToString()
        assert send(channel, message, method).startswith(unknown)
    assert send(channel, b"", "ServerReady") == "OK"
    for message in (b"", pb.ModelReadyRequest(name=NAME).SerializeToString()):
        assert send(channel, message, "ModelStatistics").endswith("to the address of one server")
    every = pb.ModelInferRequest(model_name="*").SerializeToString()
    assert send(channel, every).startswith("NOT_FOUND")
    # Protobuf ignores the bits of a field number above 32, and takes the last of two names.
    hidden = {
        "a field number with a bit above 32": b"\x8a\x80\x80\x80\x10" + bytes([len(STEP)]),
        "a group": b"\x0b\x0a" + bytes([len(STEP)]),
        "a name that is longer than the message": b"\x0a\x7f",
        "a number without end": b"\xff" * 11,
    }
    for case, start in hidden.items():
        said = send(channel, fine + start + STEP.encode())
        assert said.startswith("INVALID_ARGUMENT: The request is malformed"), (case, said)
    overlong = b"\x8a\x00" + bytes([len(STEP)]) + STEP.encode()
    assert send(channel, fine + overlong).startswith("NOT_FOUND")
    two_contents = fine + pb.ModelInferRequest(raw_input_contents=[TEXT]).SerializeToString()
    assert "1 inputs and 2 raw_input_contents" in send(channel, two_contents)


def test_string_lengths_must_fit_their_data(channel: grpc.Channel, proxy: Proxy) -> None:
    for case, raw in LYING.items():
        said = send(channel, infer_request(raw=raw).SerializeToString())
        assert said.startswith("INVALID_ARGUMENT"), (case, said)
        assert "ensor text" in said, (case, said)
        status, text = send_binary(proxy, json_head(len(raw)), raw)
        assert status == 400, (case, text)
        assert "ensor text" in json.loads(text)["error"], case
    assert send_binary(proxy, json_head(len(TEXT)), TEXT)[0] == 200
    inline = infer_request()
    del inline.raw_input_contents[:]
    inline.inputs[0].contents.bytes_contents.append(b"hello")
    assert send(channel, inline.SerializeToString()) == "OK"


def test_lying_string_lengths_fail_no_request_of_other_clients(proxy: Proxy) -> None:
    """At the server itself each of them fails all requests of its batch."""
    fine = infer_request().SerializeToString()

    def attack(raw: bytes) -> set[str]:
        message = infer_request(raw=raw).SerializeToString()
        with grpc.insecure_channel(proxy.grpc_url) as channel:
            return {send(channel, message)[:16] for _ in range(100)}

    with (
        grpc.insecure_channel(proxy.grpc_url, [("grpc.enable_retries", 0)]) as channel,
        repeated(*[partial(send, channel, fine)] * 4) as answers,
        ThreadPoolExecutor(len(LYING)) as pool,
    ):
        said = list(pool.map(attack, LYING.values()))
        assert eventually(lambda: answers.total() >= 8)
    assert said == [{"INVALID_ARGUMENT"}] * len(LYING)
    assert answers.keys() == {"OK"}


def test_what_the_server_could_read_otherwise_is_rejected(proxy: Proxy) -> None:
    lying = LYING["string lengths beyond the data"]
    head = json_head(len(lying))
    heads = {
        "an escaped datatype": head.replace("BYTES", "BYTE\\u0053"),
        "an escaped key": head.replace("datatype", "datatyp\\u0065"),
        "a repeated key": head.replace('"datatype"', '"datatype": "FP32", "datatype"'),
        "a size beyond the body": json_head(1 << 40),
        "a negative size": json_head(-1),
        "no JSON": "[" * 40,
        "half of a JSON": head[:-5],
        "inputs that are no list": '{"inputs": 5}',
        "a datatype that is no text": json_head(len(lying), datatype=[]),
    }
    for case, text in heads.items():
        status, said = send_binary(proxy, text, lying)
        assert status == 400, (case, said)
        assert "malformed" in said, (case, said)
    for size in ("-1", "1e3", "99999999", "5,5"):
        status, said = post(
            proxy, f"/v2/models/{NAME}/infer", head.encode(), Inference_Header_Content_Length=size
        )
        assert status == 400, (size, said)


def test_only_pipelines_and_what_controls_nothing_is_open(
    channel: grpc.Channel, proxy: Proxy
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


def test_compressed_requests_are_refused(channel: grpc.Channel, proxy: Proxy) -> None:
    """One MB could become 1 GiB at the server."""
    message = infer_request().SerializeToString()
    for method in ("ModelInfer", "ModelReady", "ServerLive"):
        said = send(channel, message, method, compression=grpc.Compression.Gzip)
        assert said.startswith("UNIMPLEMENTED: The request is compressed (gzip)"), said
        assert COMPRESSED in said
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    with pytest.raises(grpc.RpcError, match=COMPRESSED):
        list(stub.ModelStreamInfer(iter([infer_request()]), compression=grpc.Compression.Gzip))
    bomb = gzip.compress(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 20
    for encoding in ("gzip", "deflate", "identity, gzip"):
        status, said = post(proxy, f"/v2/models/{NAME}/infer", bomb, Content_Encoding=encoding)
        assert status == 415
        assert COMPRESSED in json.loads(said)["error"]


def test_each_message_of_a_stream_is_checked(channel: grpc.Channel) -> None:
    """A stream goes on after a wrong message, as it does with Triton itself."""
    lying = infer_request(raw=LYING["string lengths beyond the data"])
    size = 2 << 20
    large = infer_request(raw=struct.pack("<I", size) + b"x" * size)
    requests = [infer_request(), infer_request(STEP), lying, large, large, infer_request()]
    texts = [
        "OK", f"unknown model: '{STEP}'", "A string length in tensor text", "is larger than",
        "is larger than", "OK",
    ]  # fmt: skip
    for _ in range(3):  # of several connections, one begins with a wrong message
        requests, texts = requests[1:] + requests[:1], texts[1:] + texts[:1]
        said = stream(channel, *requests)
        assert len(said) == len(texts)
        assert all(text in one for text, one in zip(texts, said, strict=True)), said


def test_the_pipelines_can_change_while_envoy_runs(
    channel: grpc.Channel, proxy: Proxy, minilm_server: Any
) -> None:
    other = infer_request(OTHER).SerializeToString()
    path = f"/v2/models/{OTHER}/config"
    assert send(channel, other).startswith("NOT_FOUND")
    proxy.route_to([minilm_server], [NAME, OTHER])
    try:
        assert eventually(lambda: send(channel, other) == "OK")
        assert eventually(lambda: post(proxy, path)[0] != 404)
    finally:
        proxy.route_to([minilm_server], [NAME])
    assert eventually(lambda: send(channel, other).startswith("NOT_FOUND"))
    assert eventually(lambda: post(proxy, path)[0] == 404)


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


def is_answered(proxy: Proxy) -> bool:
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
