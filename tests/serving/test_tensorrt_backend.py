"""Tests of the emulated TensorRT backend on real servers, with a fake TensorRT and a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

import served_engines
import tensorrt_cases as cases
from conftest import LAYOUTS, build_into, traffic_texts, write_pipeline
from fake_cuda import LOG_VARIABLE
from raw_requests import Arrays, ask, ask_together
from triptych.client import Client
from triptych.serving.server import Server

pytestmark = pytest.mark.server


class Served(NamedTuple):
    """A server, and the log files of its fake GPU and of itself."""

    client: InferenceServerClient
    url: str
    log: Path
    text: Path
    operator_headers: dict[str, str]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A repository of TensorRT pipelines as it ships, in both layouts, without engines."""
    base = tmp_path_factory.mktemp("tensorrt")
    for layout in LAYOUTS:
        core = {"backend": "tensorrt", "device": "gpu", "layout": layout, "max_batch_size": 8}
        folder = write_pipeline(
            base / f"tiny_{layout}", model={"source": str(tiny_model)}, core=core
        )
        build_into(folder, base / "repository")
    return base / "repository"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cores: Path) -> Iterator[Served]:
    """Serves the whole pipelines, and the small models of `cases`."""
    base = tmp_path_factory.mktemp("served")
    repository = base / "repository"
    served_engines.with_fake_engines(cores, repository)
    for name, (config, graph, profiles) in cases.MODELS.items():
        served_engines.write_model(repository / name, config, graph, profiles)
    for name, refused in cases.REFUSED.items():
        served_engines.write_model(repository / name, refused.config, *refused.engine)
    (repository / "no_plan/1/model.plan").rename(repository / "no_plan/1/other.plan")
    log, text = base / "gpu.jsonl", base / "server.log"
    models = [*(f"tiny_{layout}" for layout in LAYOUTS), *cases.MODELS]
    with Server(
        repository,
        models=models,
        environment={LOG_VARIABLE: str(log)},
        backend_directory=served_engines.write_fakes(base / "backends"),
        log_file=text,
    ) as server:
        client = InferenceServerClient(server.grpc_url)
        yield Served(client, server.grpc_url, log, text, server.operator_headers)


@pytest.fixture(scope="module")
def by_onnx_runtime(tmp_path_factory: pytest.TempPathFactory, cores: Path) -> Iterator[str]:
    """The same pipelines, their cores served by the emulated ONNX Runtime backend."""
    repository = tmp_path_factory.mktemp("onnx") / "repository"
    served_engines.with_onnx_cores(cores, repository)
    with Server(repository) as server:
        yield server.grpc_url


def embed(url: str, pipeline: str, texts: Sequence[str]) -> Any:
    """Embeddings of texts that many clients send at the same time, one each."""
    with Client(pipeline, url) as client, ThreadPoolExecutor(16) as pool:
        return np.concatenate(list(pool.map(lambda text: client.embed([text]), texts)))


def packed_request(*lengths: int) -> Arrays:
    """Return rows of these lengths. All tokens are ones, padding included."""
    ids = np.ones((len(lengths), max(lengths)), np.int32)
    return {"input_ids": ids, "row_length": np.array(lengths, np.int32)[:, None]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_answers_as_with_onnx_runtime_and_batches(
    layout: str, server: Served, by_onnx_runtime: str
) -> None:
    texts = traffic_texts()[:64]
    before = len(served_engines.engine_runs(server.log))
    answers = embed(server.url, f"tiny_{layout}", texts)
    np.testing.assert_allclose(answers, embed(by_onnx_runtime, f"tiny_{layout}", texts), atol=1e-5)
    runs = served_engines.engine_runs(server.log)[before:]
    rows = [shapes["row_length"][0] for _, shapes in runs]
    assert max(rows) > 1
    assert len(runs) < len(texts)


def test_buckets_run_in_their_profile_and_as_cuda_graphs(server: Served) -> None:
    captured = served_engines.count_events(server.log, "graph")
    assert captured > 0
    assert f"{captured} of {captured} CUDA graphs" in server.text.read_text(encoding="utf-8")
    launched = served_engines.count_events(server.log, "launch")
    before = len(served_engines.engine_runs(server.log))
    # One after the other: what waits together may share a bucket.
    for text in ("short", "a text of a few more words " * 20):
        embed(server.url, "tiny_bucketed", [text])
    runs = served_engines.engine_runs(server.log)[before:]
    assert served_engines.count_events(server.log, "launch") - launched == len(runs) == 2
    assert len({place for place, _ in runs}) == 2


def test_requests_that_wait_together_are_one_run(server: Served) -> None:
    before = len(served_engines.engine_runs(server.log))
    requests = [packed_request(2), packed_request(1, 3), packed_request(4)]
    answers = ask_together(server.client, "packed", requests)
    runs = served_engines.engine_runs(server.log)[before:]
    assert runs == [(0, {"input_ids": [12], "row_length": [4, 1], "row_stride": [4]})]
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, dict)
        width = request["input_ids"].shape[1]
        assert answer["stride"].tolist() == [[width]] * len(request["row_length"])
        assert answer["each"].shape == (*request["input_ids"].shape, 2)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            packed_request(cases.MAX_TOKENS + 1),
            "no optimization profile of the engine holds input",
        ),
        (
            {"input_ids": np.array([[99]], np.int32), "row_length": np.ones((1, 1), np.int32)},
            "unspecified launch failure",
        ),
    ],
    ids=["shape", "launch"],
)
def test_a_run_that_fails_fails_its_whole_batch(server: Served, bad: Arrays, text: str) -> None:
    requests = [packed_request(2), bad, packed_request(1, 1)]
    for answer in ask_together(server.client, "packed", requests):
        assert isinstance(answer, InferenceServerException)
        assert answer.status() == "StatusCode.INTERNAL"
        assert text in answer.message()
    good = ask_together(server.client, "packed", [packed_request(2), packed_request(1, 1, 1)])
    assert all(isinstance(answer, dict) for answer in good)


def test_only_the_first_target_of_a_batch_output_is_answered(server: Served) -> None:
    answer = ask(server.client, "two_targets", {"input_ids": np.ones((1, 3), np.int32)})
    assert list(answer) == ["each"]
    assert answer["each"].tolist() == [[1, 1, 1]]


def test_a_model_without_batching_runs_each_request_by_itself(server: Served) -> None:
    value = np.arange(3, dtype=np.float32)
    answers = ask_together(server.client, "unbatched", [{"x": value}, {"x": value + 1}])
    assert [a["y"].tolist() for a in answers if isinstance(a, dict)] == [[0, 2, 4], [2, 4, 6]]


def test_types_pass_as_they_are(server: Served) -> None:
    inputs: Arrays = {
        "half": np.array([[1.5]], np.float16),
        "byte": np.array([[200]], np.uint8),
        "long": np.array([[2**40]], np.int64),
        "flag": np.array([[True]]),
    }
    answers = ask(server.client, "typed", inputs)
    for name, value in inputs.items():
        assert answers[f"{name}_out"].dtype == value.dtype
        assert answers[f"{name}_out"].tolist() == value.tolist()


@pytest.mark.parametrize("name", cases.REFUSED)
def test_what_the_native_backend_refuses_does_not_load(name: str, server: Served) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        server.client.load_model(name, headers=server.operator_headers)
    assert cases.REFUSED[name].message in refusal.value.message()
