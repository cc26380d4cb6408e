"""Requests that no server may get, sent to a real Envoy before a real server."""

import gzip
import http.client
import json
import struct
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from processes import eventually
from triptych.serving.fleet.envoy import Listen, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports

pytestmark = pytest.mark.server

NAME, STEP = "minilm_packed", "minilm_packed_core"
MAX_MIB = 1
LOOPBACK = "127.0.0.1"
SERVICE = "/inference.GRPCInferenceService"
TEXT = b"\5\0\0\0hello"
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
    names = ("grpc_port", "http_port", "metrics_port")
    proxy = Proxy(
        proxy_settings(replicas=1, max_request_mib=MAX_MIB),
        Listen(LOOPBACK, **reserve_ports(LOOPBACK, dict.fromkeys(names, 0))),
        log_file=tmp_path_factory.mktemp("envoy") / "envoy.log",
    )
    try:
        proxy.start([minilm_server], [NAME])
        assert proxy.wait_healthy([minilm_server], 60)
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def channel(proxy: Proxy) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(proxy.grpc_url) as channel:
        yield channel


@pytest.fixture(autouse=True)
def no_request_fails_at_the_server(minilm_server: Any) -> Iterator[None]:
    """What Envoy rejects reaches no model, so that no batch can fail."""
    before = count_failures(minilm_server)
    yield
    assert count_failures(minilm_server) == before


def count_failures(server: Any) -> list[str]:
    with urllib.request.urlopen(server.metrics_url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sorted(line for line in lines if line.startswith("nv_inference_request_failure"))


def infer_request(model: str = NAME, raw: bytes = TEXT) -> Any:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    return request


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
    host, _, port = proxy.http_url.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, body, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def send_binary(proxy: Proxy, head: str, raw: bytes) -> tuple[int, str]:
    size = {"Inference_Header_Content_Length": str(len(head))}
    return post(proxy, f"/v2/models/{NAME}/infer", head.encode() + raw, **size)


def json_head(size: int, **changes: Any) -> str:
    parameters = {"binary_data_size": size}
    entry = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": parameters}
    return json.dumps({"inputs": [{**entry, **changes}]})


def test_a_step_cannot_be_addressed(channel: grpc.Channel) -> None:
    fine = infer_request().SerializeToString()
    step = pb.ModelInferRequest(model_name=STEP).SerializeToString()
    assert send(channel, fine) == "OK"
    other = infer_request("minilm_bucketed").SerializeToString()
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
    assert (
        send(channel, pb.ModelInferRequest(model_name="*").SerializeToString())[:9] == "NOT_FOUND"
    )


def test_a_step_cannot_be_hidden_in_a_message(channel: grpc.Channel) -> None:
    """Protobuf ignores the bits of a field number above 32, and takes the last of two names."""
    fine = infer_request().SerializeToString()
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
    over, answers = threading.Event(), Counter[str]()
    fine = infer_request().SerializeToString()

    def ask() -> None:
        with grpc.insecure_channel(proxy.grpc_url, [("grpc.enable_retries", 0)]) as channel:
            while not over.is_set():
                answers[send(channel, fine)] += 1

    def attack(raw: bytes) -> set[str]:
        message = infer_request(raw=raw).SerializeToString()
        with grpc.insecure_channel(proxy.grpc_url) as channel:
            return {send(channel, message)[:16] for _ in range(100)}

    with ThreadPoolExecutor(4 + len(LYING)) as pool:
        for _ in range(4):
            pool.submit(ask)
        said = list(pool.map(attack, LYING.values()))
        assert eventually(lambda: answers.total() >= 8)
        over.set()
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


def test_only_pipelines_have_a_path(proxy: Proxy) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    for path in (f"{NAME}/infer", f"{NAME}/versions/1/infer"):
        assert post(proxy, f"/v2/models/{path}", body)[0] == 200
    closed = (
        f"{STEP}/infer", f"{STEP.replace('_', '%5f')}/infer", f"{NAME}/../{STEP}/infer", "stats",
        f"{STEP}/generate_stream", f"{STEP}/config", f"{NAME}/stats", "minilm_bucketed/infer",
    )  # fmt: skip
    for path in closed:
        status, said = post(proxy, f"/v2/models/{path}", body)
        assert (status, said[:37]) == (404, "This proxy does not forward this requ"), path


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
    assert len(bomb) < MAX_MIB << 20
    for encoding in ("gzip", "deflate", "identity, gzip"):
        status, said = post(proxy, f"/v2/models/{NAME}/infer", bomb, Content_Encoding=encoding)
        assert status == 415
        assert COMPRESSED in json.loads(said)["error"]


def test_each_message_of_a_stream_is_checked(channel: grpc.Channel) -> None:
    """A stream goes on after a wrong message, as it does with Triton itself."""
    lying = infer_request(raw=LYING["string lengths beyond the data"])
    size = 2 * MAX_MIB << 20
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
    other = infer_request("minilm_bucketed").SerializeToString()
    path = "/v2/models/minilm_bucketed/config"
    assert send(channel, other).startswith("NOT_FOUND")
    proxy.route_to([minilm_server], [NAME, "minilm_bucketed"])
    try:
        assert eventually(lambda: send(channel, other) == "OK")
        assert eventually(lambda: post(proxy, path)[0] != 404)
    finally:
        proxy.route_to([minilm_server], [NAME])
    assert eventually(lambda: send(channel, other).startswith("NOT_FOUND"))
    assert eventually(lambda: post(proxy, path)[0] == 404)
