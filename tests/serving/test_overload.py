"""More work than a server can do, neighbors that lie, steps that die: the others do not pay."""

import asyncio
import http.client
import shutil
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.fuzz import fuzz
from tests.support.processes import eventually, mark_of, repeated, running
from tests.support.project import set_setting
from triptych.client import Client, InferenceError, InvalidRequestError
from triptych.client.wire import infer_request
from triptych.runtime.in_flight import InFlight
from triptych.runtime.row_types import PAYLOAD, TICKET, write_ticket
from triptych.serving.server import Server

pytestmark = pytest.mark.server
LARGE_BYTES = 40 * 10**6
ANSWERS_WITHIN_S = 120.0
SETTLES_S = 4.0
"""Not counted: whatever the server does, it has an answer in time for the first ones."""

TEXT = "my parcel has not arrived, and nobody has answered me since last week " * 3


def test_a_forged_ticket_counts_nothing_and_no_damaged_payload_passes(minilm_server: Any) -> None:
    counts = counts_of(minilm_server, "minilm_packed")
    core = triton.InferInput("sentence_embedding", [1, 384], "FP32")
    core.set_data_from_numpy(np.ones((1, 384), np.float32))
    ticket = triton.InferInput(TICKET, [1, 2], "INT64")
    payload = triton.InferInput(PAYLOAD, [1, 1], "BYTES")
    with triton.InferenceServerClient(minilm_server.grpc_url) as client:
        before = counts.answered()
        for place, number in ((0, 1), (2**62, 2**62), (-1, -1)):
            ticket.set_data_from_numpy(write_ticket((place, number), b"", 1)[TICKET])
            answer = client.infer("minilm_packed_postprocess", [ticket, core])
            assert answer.as_numpy("embedding").shape == (1, 384)
        assert counts.answered() == before
        for damaged in (b"abc", b"\1\0\0\0\xff"):
            payload.set_data_from_numpy(np.array([[damaged]], np.object_))
            with pytest.raises(InferenceServerException, match="must be a payload of") as e:
                client.infer("minilm_packed_postprocess", [ticket, payload, core])
            assert e.value.status() == "StatusCode.INVALID_ARGUMENT"


def counts_of(server: Any, model: str) -> InFlight:
    pipelines = InFlight.of_server(server.pid, mark_of(server.pid))
    (counts,) = (each for each in pipelines if each.path.name.endswith(f".{model}"))
    return counts


def test_steps_answer_direct_calls_as_often_as_they_are_sent(minilm_server: Any) -> None:
    """Without counting: more calls than the limit of requests in flight, and the whole chain."""
    counts = counts_of(minilm_server, "minilm_packed")
    before = counts.answered()
    text = triton.InferInput("text", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[TEXT.encode()]], np.object_))
    with triton.InferenceServerClient(minilm_server.grpc_url) as client:

        def ask(model: str, inputs: list[Any], names: list[str] | None) -> Any:
            outputs = names and [triton.InferRequestedOutput(name) for name in names]
            return client.infer(f"minilm_packed{model}", inputs, outputs=outputs)

        def pass_on(result: Any, *names: str) -> list[Any]:
            passed = []
            for name in names:
                values = result.as_numpy(name)
                datatype = np_to_triton_dtype(values.dtype)
                passed.append(triton.InferInput(name, list(values.shape), datatype))
                passed[-1].set_data_from_numpy(values)
            return passed

        rows = ("input_ids", "row_offset", "row_length")
        with ThreadPoolExecutor(16) as pool:
            for names in (None, list(rows)):  # all outputs, or some
                calls = [pool.submit(ask, "_preprocess", [text], names) for _ in range(600)]
                assert all(call.result().as_numpy("input_ids").shape[0] == 1 for call in calls)
        made = ask("_preprocess", [text], None)
        assert made.as_numpy(TICKET) is None
        computed = ask("_core", pass_on(made, *rows), None)
        vectors = pass_on(computed, "sentence_embedding")
        expected = ask("", [text], None).as_numpy("embedding")
        got = ask("_postprocess", vectors, None).as_numpy("embedding")
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert eventually(lambda: counts.requests() == 0)
    assert counts.answered().at > before.at


def lie(stub: Any) -> None:
    """One request whose text is shorter than it says."""
    request = service_pb2.ModelInferRequest(model_name="minilm_packed")
    request.inputs.add(name="text", datatype="BYTES").shape.extend((1, 1))
    request.raw_input_contents.append(struct.pack("<I", 1000) + b"abc")
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_length_that_lies_fails_no_neighbor_of_this_client(minilm_server: Any) -> None:
    """Triton fails the whole batch before a step sees it; the client sends its own part again."""
    url = minilm_server.grpc_url
    with (
        Client("minilm_packed", url, timeout_s=ANSWERS_WITHIN_S) as client,
        repeated(*[lambda: client.embed([TEXT]).shape] * 8) as results,
        grpc.insecure_channel(url) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(100):
            lie(stub)
        assert eventually(lambda: results.total() >= 8)
    assert set(results) == {"(1, 384)"}


def test_large_requests_leave_little_behind(minilm_server: Any) -> None:
    """Eight at a time, each refused: without a flag Triton keeps 200 to 390 MB of them."""
    request = service_pb2.ModelInferRequest(model_name="minilm_packed")
    request.inputs.add(name="text", datatype="BYTES").shape.extend((1, 1))
    request.raw_input_contents.append(struct.pack("<I", LARGE_BYTES) + b"a" * LARGE_BYTES)
    server = psutil.Process(minilm_server.pid)

    def own_bytes() -> int:  # what steps share with it is not its own
        memory = server.memory_info()
        return int(memory.rss - memory.shared)

    before = own_bytes()
    unbounded = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(minilm_server.grpc_url, options=unbounded) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        refused = [stub.ModelInfer.future(request, timeout=60) for _ in range(8)]
        assert {call.code() for call in refused} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert eventually(lambda: own_bytes() - before < 160e6)


def test_deep_json_does_not_end_the_server(minilm_server: Any) -> None:
    connection = http.client.HTTPConnection(minilm_server.http_url, timeout=60)
    connection.request("POST", "/v2/models/minilm_packed/infer", "[" * 1_000_000)
    assert connection.getresponse().status >= 400
    connection.close()
    with Client("minilm_packed", minilm_server.grpc_url) as client:
        assert answers(client)


def answers(client: Client, within_s: float = 60.0) -> bool:
    try:
        return client.embed([TEXT], timeout_s=within_s).shape == (1, 384)
    except InferenceError:
        return False


def goodput(url: str, clients: int, give_up_s: float, seconds: float) -> Counter[str]:
    """How requests of clients end that give up, and ask on, after half a second if refused."""
    ended: Counter[str] = Counter()

    async def ask(stub: Any, end: float) -> None:
        request = infer_request("minilm_packed", {"text": [TEXT.encode()]}, [0], {}, {})
        while time.monotonic() < end:
            try:
                await stub.ModelInfer(request, timeout=give_up_s)
                ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code().name] += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(0.5)

    async def run() -> None:
        async with grpc.aio.insecure_channel(url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            end = time.monotonic() + SETTLES_S + seconds
            asking = asyncio.gather(*(ask(stub, end) for _ in range(clients)))
            await asyncio.sleep(SETTLES_S)
            ended.clear()
            await asking

    asyncio.run(run())
    return ended


SLOW = """
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from triptych.serving.backends.onnxruntime.model import TritonPythonModel as Emulated


class TritonPythonModel(Emulated):
    def execute(self, requests):
        while os.path.exists(os.environ["CLOSED"]):
            time.sleep(0.01)
        if os.path.exists(os.environ["SLOW"]):
            time.sleep(0.5)
        return super().execute(requests)
"""
"""The emulated ONNX Runtime backend: no answer while one file exists, slow ones while another does.

Neither exists while the server warms up."""


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """The file during whose existence the cores of `slow` give no answer."""
    return tmp_path / "closed"


@pytest.fixture
def slow(minilm_repository: Path, tmp_path: Path, closed: Path) -> Iterator[Server]:
    """A server of pipelines with slow cores; packed requests wait for 200 ms at most."""
    repository, backends = tmp_path / "repository", tmp_path / "backends"
    shutil.copytree(minilm_repository, repository)
    set_setting(repository, "minilm_packed_preprocess", "max_wait_ms", 200)
    (backends / "onnxruntime").mkdir(parents=True)
    (backends / "onnxruntime/model.py").write_text(SLOW)
    files = {"CLOSED": str(closed), "SLOW": str(tmp_path / "slow")}
    with running(Server(repository, backend_directory=backends, environment=files)) as server:
        (tmp_path / "slow").touch()
        yield server


def flood(url: str, model: str) -> list[Any]:
    """400 calls under way that carry no deadline."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(url))
    request = infer_request(model, {"text": [TEXT.encode()]}, [0], {}, {})
    return [stub.ModelInfer.future(request) for _ in range(400)]


def computed_rows(url: str, model: str) -> int:
    with triton.InferenceServerClient(url) as client:
        (core,) = client.get_inference_statistics(f"{model}_core").model_stats
    return int(core.inference_count)


def abandon(server: Server, closed: Path) -> tuple[int, int]:
    """Abandon a burst; return how many calls were canceled, and the rows computed afterwards.

    A request that comes then is answered, with no attempt after a rejection.
    """
    model = "minilm_bucketed"
    counts = counts_of(server, model)
    calls = flood(server.grpc_url, model)
    assert eventually(lambda: any(call.done() for call in calls))
    closed.touch()
    canceled = sum(call.cancel() for call in calls)
    before = computed_rows(server.grpc_url, model)
    with (
        Client(model, server.grpc_url, retry=None, timeout_s=ANSWERS_WITHIN_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        lone = pool.submit(client.embed, [TEXT])
        closed.unlink()
        assert lone.result().shape == (1, 384)
        computed = computed_rows(server.grpc_url, model) - before

        def is_forgotten() -> bool:
            assert client.embed([TEXT]).shape == (1, 384)
            return counts.requests() == 0

        assert eventually(is_forgotten)
    return canceled, computed


def test_the_limit_of_the_wait_holds_while_the_core_is_silent(slow: Server, closed: Path) -> None:
    closed.touch()
    calls = flood(slow.grpc_url, "minilm_packed")
    # Of 400 the core gets two batches and a few probes.
    assert eventually(lambda: sum(call.done() for call in calls) > 300)
    closed.unlink()
    ended = Counter(call.code().name for call in calls)
    assert set(ended) == {"OK", "UNAVAILABLE"}
    said = [call.details() for call in calls if call.code() is grpc.StatusCode.UNAVAILABLE]
    assert all("[overloaded retry_after_ms=" in details for details in said)
    assert all("raise serving.queue.max_backlog_ms" in details for details in said)


def test_a_request_after_an_abandoned_burst_is_answered(slow: Server, closed: Path) -> None:
    # Canceled rows are not computed, except those that the core already holds. Several attempts,
    # because a machine that stands still may lose one.
    rounds = (abandon(slow, closed) for _ in range(5))
    assert any(left > 200 and computed < 0.6 * left for left, computed in rounds)
    # A stop right after such a burst does not wait for it until its grace ends.
    counts = counts_of(slow, "minilm_bucketed")
    closed.touch()
    calls = flood(slow.grpc_url, "minilm_bucketed")
    assert eventually(lambda: counts.requests() > 300)
    assert sum(call.cancel() for call in calls) > 300
    closed.unlink()
    slow.stop(grace_s=ANSWERS_WITHIN_S)
    assert counts.requests() == 0


@pytest.mark.long
def test_overload_keeps_its_goodput(minilm_repository: Path) -> None:
    """Clients whose deadline the server does not know, four times as many as it can answer."""
    with running(Server(minilm_repository)) as server:
        shares = []
        for _ in range(3):
            peak_per_s = max(goodput(server.grpc_url, 32, 60.0, 2.0)["OK"] / 2.0, 1.0)
            give_up_s = min(400 / peak_per_s / 4, 8.0)
            ended = goodput(server.grpc_url, round(4 * peak_per_s * give_up_s), give_up_s, 8.0)
            shares.append(ended["OK"] / 8.0 / peak_per_s)
        assert server.find_crash(0.0) is None
        with Client("minilm_packed", server.grpc_url) as client:
            assert any(answers(client) for _ in range(5))
    # In the order of arrival, nearly all requests are answered after their clients have left. One
    # turn will do: a busy machine needs longer.
    assert max(shares) > 0.4, shares


def send_storm(server: Server) -> Counter[str]:
    """Cancel thousands of requests of 8 connections after 5 ms; return how those of 4 others ended.

    It ends early if the server does.
    """
    request = infer_request("minilm_packed", {"text": [TEXT.encode()]}, [0], {}, {})
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]

    def cancel(stub: Any) -> str:
        call = stub.ModelInfer.future(request)
        time.sleep(0.005)
        return "canceled" if call.cancel() else "late"

    def ask(stub: Any) -> str:
        try:
            stub.ModelInfer(request, timeout=ANSWERS_WITHIN_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    def is_over() -> bool:
        told = ended.total() - ended["canceled"] - ended["late"]
        return (ended["canceled"] > 2000 and told > 100) or server.find_crash(0.0) is not None

    with ExitStack() as opened:
        channels = (grpc.insecure_channel(server.grpc_url, own) for _ in range(12))
        stubs = [
            service_pb2_grpc.GRPCInferenceServiceStub(opened.enter_context(channel))
            for channel in channels
        ]
        calls = [partial(cancel if n < 8 else ask, stub) for n, stub in enumerate(stubs)]
        with repeated(*calls) as ended:
            assert eventually(is_over, 240), ended
    del ended["canceled"], ended["late"]
    return ended


@pytest.mark.long
def test_in_a_storm_of_cancellations_others_get_answers_or_a_time_to_retry(
    minilm_repository: Path,
) -> None:
    for _ in range(5):
        with running(Server(minilm_repository)) as server:
            ended = send_storm(server)
            crash = server.find_crash(1.0)
            if crash is None:
                with Client("minilm_packed", server.grpc_url) as client:
                    assert any(answers(client) for _ in range(5))
                break
        # Triton 24.10 may abort when clients cancel within milliseconds (docker/README.md).
        assert "prior > 0" in crash.message or "SIGSEGV" in crash.message
    assert crash is None
    del ended["OK"]  # few: nothing tells the server that the others were canceled
    others = [text for text in ended if "[overloaded retry_after_ms=" not in text]
    assert not others, others


@pytest.mark.long
@pytest.mark.parametrize("envoy", [False, True])
def test_broken_requests_lose_nothing(minilm_repository: Path, envoy: bool) -> None:
    ended, passed = fuzz(minilm_repository, "minilm_packed", 4000, seed=1, envoy=envoy)
    assert passed, ended
    assert ended["probe: right"] > 0
    assert ended["plain client: answered"] > 0


def test_steps_that_preserve_the_order_of_responses_answer_all_and_rightly(
    minilm_repository: Path, tmp_path: Path
) -> None:
    """Held requests and refusals, which are answered at once, wait for nobody behind them."""
    for part in minilm_repository.glob("minilm_packed*"):
        shutil.copytree(part, tmp_path / part.name)
    for step in ("preprocess", "core", "postprocess"):
        file = tmp_path / f"minilm_packed_{step}/config.pbtxt"
        before, batching, after = file.read_text().partition("dynamic_batching {")
        assert batching
        file.write_text(f"{before}{batching} preserve_ordering: true{after}")
    texts = ["word " * (1 + 4 * number) for number in range(32)]
    with (
        running(Server(tmp_path)) as server,
        Client("minilm_packed", server.grpc_url, timeout_s=300) as client,
    ):
        expected = client.embed(texts)

        def answer(number: int) -> bool:
            if number % 3:
                found = client.embed([texts[number % 32]])
                return np.allclose(found[0], expected[number % 32], atol=1e-5)
            with pytest.raises(InvalidRequestError, match="must be valid UTF-8"):
                client.embed([b"\xff"])
            return True

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(answer, range(192)))
