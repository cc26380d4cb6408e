"""Options as input tensors on a real server with a response cache, from each documented client."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from numpy.typing import NDArray
from pytriton.client import ModelClient
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from tests.support import task_models
from tests.support.processes import eventually
from tests.support.project import ROOT, build_into, traffic_texts, write_pipeline
from triptych.client import Client
from triptych.container.flags import cache_flags
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.serving.server import Server, ServerProfile

pytestmark = pytest.mark.server
DTYPES = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path, tiny_model: Path
) -> Iterator[Server]:
    """A server with a pipeline that has a response cache, and one without."""
    base = tmp_path_factory.mktemp("cached")
    topics = task_models.text_classifier(base / "model", minilm_folder, traffic_texts())
    cached = {"response_cache": True, "versions": [7, 6]}
    for name, task, model, serving in (
        ("topics", "text-classification", topics, {"class_scores": True}),
        ("vectors", "text-embedding", tiny_model, cached),
    ):
        spec = {"task": task, "model": {"source": str(model)}, "serving": serving}
        build_into(write_pipeline(base / "pipelines" / name, **spec), base / "repository")
    repository = base / "repository"
    shared = ServerProfile(client_shm=True)
    with Server(repository, extra_args=cache_flags(repository), profile=shared) as server:
        yield server


@pytest.fixture(scope="module")
def raw(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_url) as client:
        yield client


Lookups = Callable[..., None]


def read_lookups(raw: Any) -> tuple[int, int]:
    """Return the hits and the misses of the cache."""
    found = [each.inference_stats for each in raw.get_inference_statistics("vectors").model_stats]
    return sum(s.cache_hit.count for s in found), sum(s.cache_miss.count for s in found)


@pytest.fixture
def lookups(raw: Any) -> Lookups:
    """Checks the hits and misses of the cache since the last call."""
    before = read_lookups(raw)

    def check(hits: int, misses: int, *, of: str = "") -> None:
        nonlocal before
        wanted = before[0] + hits, before[1] + misses
        # The server may count a request after its answer.
        assert eventually(lambda: sum(read_lookups(raw)) >= sum(wanted)), of
        assert read_lookups(raw) == wanted, of
        before = wanted

    return check


def tensor(name: str, dtype: str, values: Any, module: Any = triton) -> Any:
    data = np.array(values, DTYPES[dtype])
    made = module.InferInput(name, list(data.shape), dtype)
    made.set_data_from_numpy(data)
    return made


def text(*rows: str, module: Any = triton) -> Any:
    return tensor("text", "BYTES", [[row.encode()] for row in rows], module)


def top_k(*rows: int) -> Any:
    return tensor("top_k", "INT32", [[row] for row in rows])


def dimensions(size: int, module: Any = triton) -> Any:
    return tensor("dimensions", "INT32", [[size]], module)


def vectors(answer: Any) -> NDArray[Any]:
    found: NDArray[Any] = answer.as_numpy("embedding")
    return found


def test_a_client_may_ask_for_a_version_of_the_pipeline(
    server: Server, raw: Any, lookups: Lookups
) -> None:
    row = text("a request of each version")
    for version, answered in (("", "7"), ("7", "7"), ("6", "6"), ("6", "6")):
        answer = raw.infer("vectors", [row], model_version=version)
        assert answer.get_response().model_version == answered
    lookups(2, 2)  # a version has answers of its own in the cache
    with pytest.raises(InferenceServerException, match="version 1"):
        raw.infer("vectors", [row], model_version="1")
    config = (server.repository / "vectors/config.pbtxt").read_text()
    assert "# serving.versions.\nversion_policy { specific { versions: [6, 7] } }" in config


def test_a_cached_answer_is_that_of_the_same_options(server: Server, lookups: Lookups) -> None:
    row = ["my parcel is late"]
    # The default has a key of its own.
    asked: list[dict[str, Any]] = [{"dimensions": 8}, {"dimensions": 16}, {}]
    with Client("vectors", server.grpc_url) as client:
        first = [client.embed(row, **options) for options in asked]
        assert [each.shape for each in first] == [(1, 8), (1, 16), (1, 32)]
        lookups(0, 3)
        for options, found in zip(asked, first, strict=True):
            assert np.array_equal(client.embed(row, **options), found)
        lookups(3, 0)


OPTIONS: list[tuple[str, str, Any]] = [
    ("", "", None),
    ("dimensions", "INT32", 8),
    ("normalize_embeddings", "BOOL", True),
    ("encoding", "BYTES", b"float"),
]


def test_a_cached_answer_has_all_outputs_whatever_another_client_requested(
    server: Server, raw: Any, lookups: Lookups
) -> None:
    """Triton's key lacks the names of requested outputs, and no step of an ensemble sees them."""
    (only,) = [output.name for output in raw.get_model_metadata("vectors").outputs]
    assert only == "embedding"
    requests: list[list[str]] = [[], [only]]
    for number, (name, dtype, value) in enumerate(OPTIONS):
        for order in (requests, requests[::-1]):
            inputs = [text(f"{number} {order}")]
            inputs += [tensor(name, dtype, [[value]])] if name else []
            outputs = [[triton.InferRequestedOutput(each) for each in some] for some in order]
            first, second = (raw.infer("vectors", inputs, outputs=some) for some in outputs)
            assert vectors(first).size, name
            assert np.array_equal(vectors(first), vectors(second)), name
            lookups(1, 1, of=name)
    # Another output, and an option that would ask for another one, fail their own request.
    row, wanted = [text("int8")], [triton.InferRequestedOutput("embedding_int8")]
    refused: dict[str, dict[str, Any]] = {
        "unexpected inference output 'embedding_int8'": {"inputs": row, "outputs": wanted},
        "`input encoding` must be one of float": {
            "inputs": [*row, tensor("encoding", "BYTES", [[b"int8"]])]
        },
        "Send it as the input tensor encoding": {"inputs": row, "parameters": {"encoding": "int8"}},
    }
    for cause, request in refused.items():
        with pytest.raises(InferenceServerException, match=cause) as caught:
            raw.infer("vectors", **request)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert vectors(raw.infer("vectors", row)).shape == (1, 32)


def test_the_classification_extension_gives_the_best_labels(server: Server, raw: Any) -> None:
    """Of a client that requests it, with the labels that the pipeline itself returns."""
    found = raw.get_model_metadata("topics").outputs
    assert [(each.name, each.datatype) for each in found][-1] == ("scores", "FP32")
    whole = raw.infer("topics", [text("a parcel", "a refund"), top_k(3, 3)])
    scores = whole.as_numpy("scores")
    assert scores.shape[0] == 2
    assert np.array_equal(-np.sort(-scores, axis=1)[:, :3], whole.as_numpy("score"))
    expected = whole.as_numpy("label")
    for module, url in ((triton, server.grpc_url), (triton_http, server.http_url)):
        with module.InferenceServerClient(url) as client:
            wanted = [module.InferRequestedOutput("scores", class_count=3)]
            inputs = [text("a parcel", "a refund", module=module)]
            answer = client.infer("topics", inputs, outputs=wanted).as_numpy("scores")
        values = [[one.decode().split(":", 2) for one in row] for row in answer.tolist()]
        assert [[one[2].encode() for one in row] for row in values] == expected.tolist()
        for number, row in enumerate(values):
            assert [float(one[0]) for one in row] == pytest.approx(
                scores[number, [int(one[1]) for one in row]], abs=1e-5
            )


def test_the_health_check_is_not_answered_from_the_cache(server: Server, lookups: Lookups) -> None:
    pipelines = find_pipelines(server.repository)
    for _ in range(2):
        assert HealthCheck(pipelines).find_fault(f"http://{server.http_url}") is None
        lookups(0, 1)


def test_options_that_differ_share_a_batch_and_a_bad_one_fails_alone(raw: Any) -> None:
    with ThreadPoolExecutor(4) as pool:  # together, so that they meet in a batch
        others = [
            pool.submit(raw.infer, "topics", [text(f"beside {n}"), *options])
            for n, options in enumerate(([top_k(2)], [top_k(3)], []))
        ]
        bad = pool.submit(raw.infer, "topics", [text("a", "b"), top_k(2, 3)])
        message = r"row=1\] `input top_k` must have the same value"
        with pytest.raises(InferenceServerException, match=message) as caught:
            bad.result()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    shapes = [other.result().as_numpy("label").shape for other in others]
    assert shapes == [(1, 2), (1, 3), (1, 1)]


def over_tritonclient(module: Any, url: str) -> NDArray[Any]:
    with module.InferenceServerClient(url) as client:
        inputs = [text("client", module=module), dimensions(8, module=module)]
        return vectors(client.infer("vectors", inputs))


def is_unregistered(client: Any, name: str, headers: dict[str, str]) -> bool:
    try:
        client.unregister_system_shared_memory(name, headers=headers)
    except InferenceServerException as error:
        if "currently in use" in str(error):
            return False
        raise
    return True


def over_shared_memory(server: Server) -> NDArray[Any]:
    """Both inputs in one region of system shared memory."""
    values = [serialize_byte_tensor(np.array([[b"client"]], np.object_)), np.array([[8]], np.int32)]
    text_bytes = 4 + len(b"client")
    name = f"options-{os.getpid()}"
    with triton.InferenceServerClient(server.grpc_url) as client:
        headers = server.operator_headers
        region = shared_memory.create_shared_memory_region(name, f"/{name}", text_bytes + 4)
        try:
            shared_memory.set_shared_memory_region(region, values[:1])
            shared_memory.set_shared_memory_region(region, values[1:], offset=text_bytes)
            client.register_system_shared_memory(name, f"/{name}", text_bytes + 4, headers=headers)
            inputs = [
                triton.InferInput("text", [1, 1], "BYTES"),
                triton.InferInput("dimensions", [1, 1], "INT32"),
            ]
            inputs[0].set_shared_memory(name, text_bytes)
            inputs[1].set_shared_memory(name, 4, text_bytes)
            answer = vectors(client.infer("vectors", inputs))
            # A request that has its answer keeps the region until Triton has released it.
            assert eventually(lambda: is_unregistered(client, name, headers))
        finally:
            shared_memory.destroy_shared_memory_region(region)
    return answer


def over_pytriton(server: Server) -> NDArray[Any]:
    with ModelClient(f"grpc://{server.grpc_url}", "vectors") as client:
        size = np.array([[8]], np.int32)
        answer = client.infer_batch(text=np.array([[b"client"]]), dimensions=size)
    found: NDArray[Any] = answer["embedding"]
    return found


def over_triptych(server: Server) -> NDArray[Any]:
    with Client("vectors", server.grpc_url) as client:
        answer = client.infer({"text": ["client"]}, parameters={"dimensions": 8})
    found: NDArray[Any] = answer["embedding"]
    return found


JSON = (
    b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1,1],"data":["client"]},'
    b'{"name":"dimensions","datatype":"INT32","shape":[1,1],"data":[8]}]}'
)
MLSERVER = (
    b'{"inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES","parameters":{"content_type":"str"},'
    b'"data":["client"]},{"name":"dimensions","shape":[1,1],"datatype":"INT32","parameters":'
    b'{"content_type":"np"},"data":[8]}]}',
    b'{"parameters":{"content_type":"str","dimensions":2},"inputs":[{"name":"text","shape":[1,1],'
    b'"datatype":"BYTES","parameters":{"content_type":"str"},"data":["client"]}]}',
)
"""Request bodies with `dimensions` as input and as parameter, as mlserver 1.7.1 writes them."""
KSERVE = (
    b'{"id":"1","model_name":"vectors","inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES",'
    b'"parameters":{"binary_data_size":10}},{"name":"dimensions","shape":[1,1],"datatype":"INT32",'
    b'"parameters":{"binary_data_size":4}}]}\x06\x00\x00\x00client\x08\x00\x00\x00',
    b'{"id":"1","model_name":"vectors","inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES",'
    b'"data":["client"]}],"parameters":{"dimensions":2}}',
)
"""Those of `InferRequest.to_rest` of kserve 0.21.0; the first has binary data after 221 bytes."""
LITELLM = b'{"inputs":[{"name":"input_text","shape":[1],"datatype":"BYTES","data":["client"]}]}'
"""Request body of `litellm.embedding(model="triton/...")`, litellm 1.110.2."""


def post(server: Server, body: bytes, json_bytes: int | None = None) -> NDArray[Any]:
    headers = {} if json_bytes is None else {"Inference-Header-Content-Length": str(json_bytes)}
    url = f"http://{server.http_url}/v2/models/vectors/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        (found,) = json.load(response)["outputs"]
    return np.array([found["data"]], np.float32)


CLIENTS: dict[str, Callable[[Server], NDArray[Any]]] = {
    "`triptych.client`, `triptych infer`": over_triptych,
    "`tritonclient.grpc`": lambda server: over_tritonclient(triton, server.grpc_url),
    "`tritonclient.http`": lambda server: over_tritonclient(triton_http, server.http_url),
    "JSON over HTTP (`curl`)": lambda server: post(server, JSON),
    "`tritonclient` with shared memory": over_shared_memory,
    "`pytriton.client`": over_pytriton,
    "MLServer, Seldon (`mlserver.types`)": lambda server: post(server, MLSERVER[0]),
    "KServe (`kserve.InferRequest`)": lambda server: post(server, KSERVE[0], 221),
}


def test_parameters_of_documented_clients_reach_the_steps(server: Server, raw: Any) -> None:
    """A pipeline with a response cache refuses them by name."""
    refused = "Send it as the input tensor dimensions"
    with pytest.raises(InferenceServerException, match=refused):
        raw.infer("vectors", [text("parameter")], parameters={"dimensions": 8})
    # LiteLLM has another input.
    for body, message in ((MLSERVER[1], refused), (KSERVE[1], refused), (LITELLM, "input_text")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, body)
        with caught.value as answer:
            assert answer.code == 400
            assert message in answer.read().decode()
    documented = (ROOT / "build_scripts/documentation/guides/clients.md").read_text(
        encoding="utf-8"
    )
    assert "LiteLLM's `triton/` embeddings cannot be used" in documented


@pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout")
def test_every_documented_client_sends_options(server: Server, raw: Any, lookups: Lookups) -> None:
    expected = vectors(raw.infer("vectors", [text("client"), dimensions(8)]))
    assert expected.shape == (1, 8)
    lookups(0, 1)
    for name, ask in CLIENTS.items():
        assert np.array_equal(ask(server), expected), name
        lookups(1, 0, of=name)  # the bytes of the tensors are equal, too
    documented = (ROOT / "build_scripts/documentation/guides/clients.md").read_text(
        encoding="utf-8"
    )
    section = documented.partition("### Options as inputs")[2].partition("###")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()]
    assert [row for row in rows if row in {*CLIENTS, *ANALYZERS}] == [*CLIENTS, *ANALYZERS]


ANALYZERS = {
    "`perf_analyzer`": (
        "-m vectors -u {url} -i grpc --input-data={data} --request-count=40 --concurrency-range=1"
    ),
    "Model Analyzer (`perf_analyzer_flags`)": (
        "-m vectors -b 1 -u {url} -i grpc -f {data}.csv --verbose-csv --concurrency-range=1 "
        "--input-data={data} --measurement-mode=count_windows --stability-percentage=999"
    ),
}
"""Options of perf_analyzer; the second ones are those of `PerfAnalyzerConfig.to_cli_string` of
triton-model-analyzer 1.58.0, with one of `perf_analyzer_flags` so that every speed is stable."""


def test_perf_analyzer_sends_options(server: Server, raw: Any, tmp_path: Path) -> None:
    analyzer = find_perf_analyzer()
    for client, words in ANALYZERS.items():
        data = tmp_path / "data.json"
        rows = [{"text": [client], "dimensions": [size]} for size in (8, 16)]
        data.write_text(json.dumps({"data": rows}))
        before = read_lookups(raw)
        done = subprocess.run(
            [analyzer.binary.resolve(), *words.format(url=server.grpc_url, data=data).split()],
            env={**analyzer.environment(), "no_grpc_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert eventually(lambda: read_lookups(raw)[0] >= before[0] + 38), client  # noqa: B023
        assert read_lookups(raw)[1] == before[1] + 2, client
