"""A real server whose core is busy or in an endless loop, behind a full queue of Triton."""

import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.processes import eventually, running
from triptych.client import Client, InferenceError
from triptych.container import progress
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.serving.server import Server

pytestmark = pytest.mark.server

NAME = "minilm_packed"
INSTANCES, CALLS = 2, 8
CONFIG = """
backend: "python"
max_batch_size: 32
input {{ name: "input_ids" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true }}
input {{ name: "row_length" data_type: TYPE_INT32 dims: [1] }}
input {{ name: "row_offset" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "sentence_embedding" data_type: TYPE_FP32 dims: [384] }}
dynamic_batching {{ default_queue_policy {{ max_queue_size: 1 }} }}
instance_group {{ count: {instances} kind: KIND_CPU }}
"""
CORE = """
import os

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        while os.path.exists({loop!r}):
            pass
        rows = [pb.get_input_tensor_by_name(r, "row_length").as_numpy() for r in requests]
        values = [np.ones((len(each), 384), np.float32) for each in rows]
        return [pb.InferenceResponse([pb.Tensor("sentence_embedding", v)]) for v in values]
"""


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A file; the core is in a loop while it exists."""
    return tmp_path / "loop"


@pytest.fixture
def server(minilm_repository: Path, loop: Path, tmp_path: Path) -> Iterator[Server]:
    """A pipeline with ``flow_control: triton``, two instances of the core and a queue of one."""
    repository, core = tmp_path / "models", tmp_path / f"models/{NAME}_core"
    for part in ("", "_preprocess", "_postprocess"):
        shutil.copytree(minilm_repository / f"{NAME}{part}", repository / f"{NAME}{part}")
    for step, base in (("preprocess", "Admitting"), ("postprocess", "Marked")):
        file = repository / f"{NAME}_{step}/1/model.py"
        file.write_text(file.read_text(encoding="utf-8").replace(f"({base}, ", "("))
    (core / "1").mkdir(parents=True)
    (core / "config.pbtxt").write_text(CONFIG.format(instances=INSTANCES))
    (core / "1/model.py").write_text(CORE.format(loop=str(loop)))
    with running(Server(repository)) as server:
        try:
            yield server
        finally:
            loop.unlink(missing_ok=True)


def test_a_full_queue_is_healthy_and_an_endless_loop_behind_it_is_found(
    server: Server, loop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(progress, "time", clock)
    check = HealthCheck(find_pipelines(server.repository), server.metrics_url)

    def fault_after(seconds: float) -> str:
        clock.now += seconds
        return check.find_fault(f"http://{server.http_url}") or ""

    with (
        Client(NAME, server.grpc_url, retry=None, timeout_s=120) as client,
        ThreadPoolExecutor(CALLS) as pool,
    ):

        def call() -> str:
            try:
                return str(client.embed(["where is it"]).shape)
            except InferenceError as error:
                return str(error)

        def fill() -> list[Future[str]]:
            """Send more than the instances and the queue hold, until one is refused."""
            loop.touch()
            calls = [pool.submit(call) for _ in range(CALLS)]
            assert eventually(lambda: any(call.done() for call in calls))
            return calls

        assert eventually(lambda: fault_after(0.0) == "")  # it answers
        for seconds in (1.0, 50.0, 50.0, 50.0):  # batches end between two checks
            calls = fill()
            assert fault_after(seconds) == ""
            loop.unlink()
            said = [call.result() for call in calls]
            assert "(1, 384)" in said
            assert all("Exceeds maximum queue size" in text for text in {*said} - {"(1, 384)"})
        fill()
        assert fault_after(1.0) == ""
        assert eventually(lambda: "Exceeds maximum queue size" in fault_after(50.0))
        assert f"{NAME}_core has computed nothing for" in fault_after(0.0)
        loop.unlink()


PINGS = {"keepalive_time_ms": 1000, "http2.max_pings_without_data": 0}


def test_pings_like_those_of_envoy_do_not_end_a_request_that_takes_long(
    server: Server, loop: Path
) -> None:
    """Triton closes a connection after three of them, if its flags do not allow them."""
    request = service_pb2.ModelInferRequest(model_name=NAME)
    request.inputs.add(name="text", datatype="BYTES").shape.extend((1, 1))
    request.raw_input_contents.append(struct.pack("<I", 2) + b"hi")
    options = [(f"grpc.{name}", value) for name, value in PINGS.items()]
    with grpc.insecure_channel(server.grpc_url, options) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        infer(request, timeout=120)
        loop.touch()
        call = infer.future(request, timeout=120)
        time.sleep(6)
        loop.unlink()
        assert call.result().model_name == NAME
