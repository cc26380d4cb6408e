"""Contract of the emulated backends on one real server: responses, refusals and failures.

TensorRT and the GPU are fakes.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

import backend_models
import served_engines
from conftest import LAYOUTS, build_into, traffic_texts, write_pipeline
from fake_cuda import LOG_VARIABLE
from processes import eventually
from raw_requests import Arrays, ask, ask_together
from triptych.client import Client
from triptych.container.processor import find_instruction_sets
from triptych.serving.server import Server

pytestmark = [pytest.mark.server, pytest.mark.replacement]
both = pytest.mark.parametrize("backend", backend_models.BACKENDS)
every = pytest.mark.parametrize("backend", backend_models.ALL_BACKENDS)


class Served(NamedTuple):
    """A server, its repository, and the log files of its fake GPU and of itself."""

    client: InferenceServerClient
    url: str
    repository: Path
    log: Path
    text: Path
    operator_headers: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    """Serves TensorRT pipelines in both layouts, and the small models of `backend_models`."""
    base = tmp_path_factory.mktemp("backends")
    for layout in LAYOUTS:
        core = {"backend": "tensorrt", "device": "gpu", "layout": layout, "max_batch_size": 8}
        folder = write_pipeline(
            base / f"tiny_{layout}", model={"source": str(tiny_model)}, core=core
        )
        build_into(folder, base / "built")
    repository = base / "repository"
    served_engines.with_fake_engines(base / "built", repository)
    folder = write_pipeline(
        base / "tiny_openvino",
        model={"source": str(tiny_model)},
        core={"backend": "openvino", "precision": "bf16"},
        serving={"instances": {"core": 2}},
    )
    build_into(folder, repository)
    models = [
        "tiny_openvino",
        *(f"tiny_{layout}" for layout in LAYOUTS),
        *backend_models.write_models(repository),
    ]
    log, text = base / "gpu.jsonl", base / "server.log"
    with Server(
        repository,
        models=models,
        environment={LOG_VARIABLE: str(log)},
        backend_directory=served_engines.write_fakes(base / "backends"),
        log_file=text,
    ) as server:
        client = InferenceServerClient(server.grpc_url)
        yield Served(client, server.grpc_url, repository, log, text, server.operator_headers)


@pytest.fixture(scope="module")
def client(served: Served) -> InferenceServerClient:
    return served.client


def batch_sizes(client: InferenceServerClient, model: str) -> dict[int, int]:
    """Number of rows of a dynamic batch -> how many such batches the model has served."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return {one.batch_size: one.compute_infer.count for one in stats.batch_stats}


def int32(*rows: Sequence[int]) -> Any:
    return np.array(rows, np.int32)


def described_request(*rows: Sequence[int]) -> Arrays:
    return {"tokens": int32(*rows), "tag": np.zeros((len(rows), 1), np.float32)}


def packed_request(*lengths: int, seed: int = 0) -> Arrays:
    """Return rows of these lengths. Padding tokens at their end would change a wrong mean."""
    tokens = np.random.default_rng(seed).integers(0, 10, (len(lengths), max(lengths)))
    return {"tokens": tokens.astype(np.int32), "length": int32(*[[n] for n in lengths])}


def packed_plainly(request: Arrays, repository: Path) -> Arrays:
    """Return the outputs of ONNX Runtime itself for each row alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(repository / "packed_onnxruntime/1/model.onnx")
    rows = []
    for tokens, length in zip(request["tokens"], request["length"], strict=True):
        feed = {
            "tokens": tokens,
            "length": length[None],
            "stride": np.array([tokens.size], np.int32),
        }
        rows.append(session.run(["mean", "each"], feed))
    return {
        "mean": np.concatenate([mean for mean, _ in rows]),
        "each": np.stack([each for _, each in rows]),
    }


def assert_failed(answer: Any, code: str, pattern: str) -> None:
    assert isinstance(answer, InferenceServerException)
    assert answer.status() == f"StatusCode.{code}"
    assert re.match(pattern, answer.message()), answer.message()


@both
def test_batch_inputs_describe_the_requests_of_the_batch(
    client: InferenceServerClient, backend: str
) -> None:
    model = f"described_{backend}"
    requests = [
        described_request([10, 11, 12]),
        described_request([20, 21], [22, 23]),
        described_request([30, 31, 32, 33, 34]),
    ]
    before = batch_sizes(client, model).get(4, 0)
    answers = ask_together(client, model, requests)
    # The server updates its counters after it has sent the responses.
    assert eventually(lambda: batch_sizes(client, model).get(4, 0) == before + 1)

    seen = [answer["seen"][0].tolist() for answer in answers if isinstance(answer, dict)]
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    # The requests may arrive in any order; the tokens show it.
    order = sorted(range(3), key=lambda i: seen[0].index(requests[i]["tokens"].flat[0]))
    tokens = [requests[i]["tokens"] for i in order]
    assert seen[0] == np.concatenate([t.reshape(-1) for t in tokens]).tolist()
    sizes = [t.size for t in tokens]
    strides = [t.shape[1] for t in tokens for _ in t]
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, dict)
        row_count, stride = request["tokens"].shape
        assert answer["counts_out"].tolist() == [sizes] * row_count
        assert answer["sums_out"].tolist() == [np.cumsum(sizes).tolist()] * row_count
        assert answer["bounds_out"].tolist() == [[0, *np.cumsum(sizes)]] * row_count
        assert answer["longest_out"].tolist() == [[max(sizes)]] * row_count
        assert answer["shapes_out"].tolist() == [[stride]] * row_count
        assert answer["strides_out"].tolist() == [strides] * row_count
        assert answer["sums_out"].dtype == np.float32
        assert answer["bounds_out"].dtype == np.int32


@both
def test_warm_up_runs_ragged_rows_as_one_dynamic_batch(
    client: InferenceServerClient, backend: str
) -> None:
    assert eventually(lambda: batch_sizes(client, f"described_{backend}").get(3) == 1)


@both
def test_rows_are_right_whatever_shares_their_batch(served: Served, backend: str) -> None:
    for shapes in ([[5, 2, 4], [9]], [[2, 2], [7], [6]], [[1], [3], [20], [4]], [[1, 1, 1, 1]]):
        asked = [packed_request(*lengths, seed=i) for i, lengths in enumerate(shapes)]
        answers = ask_together(served.client, f"packed_{backend}", asked)
        for answer, inputs in zip(answers, asked, strict=True):
            assert isinstance(answer, dict), answer
            expected = packed_plainly(inputs, served.repository)
            assert answer["mean"].dtype == np.float32
            np.testing.assert_allclose(answer["mean"], expected["mean"], rtol=1e-5)
            np.testing.assert_allclose(answer["each"], expected["each"], rtol=1e-5)


@both
def test_rows_without_tokens_are_answered(client: InferenceServerClient, backend: str) -> None:
    inputs = {"tokens": np.zeros((4, 0), np.int32), "length": int32(*[[0]] * 4)}
    answer = ask(client, f"packed_{backend}", inputs)
    assert np.isnan(answer["mean"]).all()
    assert answer["each"].shape == (4, 0, 4)


@both
def test_the_rows_after_a_request_without_tokens_are_not_copied(
    client: InferenceServerClient, backend: str
) -> None:
    rows = [[], [], [10, 11], [20, 21, 22]]
    answers = ask_together(client, f"described_{backend}", [described_request(r) for r in rows])
    seen, counts = (
        {tuple(answer[name][0].tolist()) for answer in answers if isinstance(answer, dict)}
        for name in ("seen", "counts_out")
    )
    (tokens,), (sizes,) = seen, counts  # equal in all answers: one batch
    assert sorted(sizes) == [0, 0, 2, 3]
    # The requests may arrive in any order: the sizes show it.
    arrived = [next(row for row in rows if len(row) == size) for size in sizes]
    copied = [token for row in arrived[: sizes.index(0)] for token in row]
    assert list(tokens) == copied + [0] * (5 - len(copied))


@both
def test_requested_outputs_and_first_targets_come_back(
    client: InferenceServerClient, backend: str
) -> None:
    model, inputs = f"packed_{backend}", packed_request(4, 4, 4, 4)
    answer = ask(client, model, inputs)
    # The native backend of ONNX Runtime sorts outputs by name. `negative` is a second target.
    expected = ["each", "mean"] if backend == "onnxruntime" else ["mean", "each"]
    assert list(answer) == expected
    one = ask(client, model, inputs, outputs=["each"])
    assert list(one) == ["each"]
    np.testing.assert_allclose(one["each"], answer["each"], atol=1e-6)


@every
def test_every_data_type_passes_unchanged(client: InferenceServerClient, backend: str) -> None:
    inputs: Arrays = {}
    for name in backend_models.TYPES[backend]:
        dtype = {"FP16": "float16", "FP32": "float32", "FP64": "float64"}.get(name, name.lower())
        inputs[f"{name}_in"] = (
            np.array([["a", ""], ["zwölf", "日本"]], dtype=object)
            if name == "STRING"
            else np.array([[0, 1], [1, 0]]).astype(dtype)
        )
    answer = ask(client, f"typed_{backend}", inputs)
    assert sorted(answer) == sorted(name.replace("_in", "_out") for name in inputs)
    if "STRING_out" in answer:
        texts = [[item.decode() for item in row] for row in answer.pop("STRING_out")]
        assert texts == inputs["STRING_in"].tolist()
    for name, value in answer.items():
        expected = inputs[name.replace("_out", "_in")]
        assert value.dtype == expected.dtype
        assert value.tolist() == expected.tolist()


@every
def test_a_model_without_batching_runs_each_request_by_itself(
    client: InferenceServerClient, backend: str
) -> None:
    value = np.arange(3, dtype=np.float32)
    answers = ask_together(client, f"unbatched_{backend}", [{"x": value}, {"x": value + 1}])
    assert [a["y"].tolist() for a in answers if isinstance(a, dict)] == [[0, 2, 4], [2, 4, 6]]


def test_openvino_runs_no_batch_that_other_requests_fill(client: InferenceServerClient) -> None:
    def request(rows: int) -> Arrays:
        return {"x": np.ones((rows, 1), np.float32), "v": np.ones((rows, 3), np.float32)}

    assert ask(client, "full_openvino", request(2))["y"].tolist() == [[2.0], [2.0]]
    for answer in ask_together(client, "full_openvino", [request(1), request(1)]):
        assert_failed(answer, "INTERNAL", "expected requests with batch size '2', got '1'")


TOO_LONG = packed_request(backend_models.MAX_TOKENS + 1)
OUT_OF_RANGE = {"tokens": int32([99]), "length": int32([1])}


@pytest.mark.parametrize(
    ("backend", "bad", "text"),
    [
        ("onnxruntime", OUT_OF_RANGE, "onnx runtime error 2: "),
        ("tensorrt", OUT_OF_RANGE, ".*unspecified launch failure"),
        ("tensorrt", TOO_LONG, "no optimization profile of the engine holds input"),
    ],
    ids=["onnxruntime", "launch", "shape"],
)
def test_a_run_that_fails_fails_its_whole_batch(
    client: InferenceServerClient, backend: str, bad: Arrays, text: str
) -> None:
    model = f"packed_{backend}"
    answers = ask_together(client, model, [packed_request(2), bad, packed_request(1, 1)])
    for answer in answers:
        assert_failed(answer, "INTERNAL", text)
    assert len({answer.message() for answer in answers if not isinstance(answer, dict)}) == 1
    good = ask_together(client, model, [packed_request(2), packed_request(1, 1, 1)])
    assert all(isinstance(answer, dict) for answer in good)


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, case[-1]) for name, case in backend_models.REFUSED_GRAPHS.items()]
    + [(name, case[-1]) for name, case in backend_models.REFUSED_BY_OPENVINO.items()]
    + [(name, case[-1]) for name, case in backend_models.REFUSED_ENGINES.items()],
    ids=[
        *backend_models.REFUSED_GRAPHS,
        *backend_models.REFUSED_BY_OPENVINO,
        *backend_models.REFUSED_ENGINES,
    ],
)
def test_what_the_native_backend_refuses_does_not_load(
    name: str, message: str, served: Served
) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        served.client.load_model(name, headers=served.operator_headers)
    assert message in refusal.value.message()


def test_rows_of_one_length_are_stacked(client: InferenceServerClient) -> None:
    rng = np.random.default_rng(0)
    asked: list[Arrays] = [
        {
            "tokens": rng.integers(0, 99, (rows, 3 + i % 2)).astype(np.int32),
            "scale": rng.random((rows, 1), np.float32),
        }
        for i, rows in enumerate([1, 2, 5, 1, 8, 3])
    ]
    for answer, inputs in zip(ask_together(client, "padded", asked), asked, strict=True):
        assert isinstance(answer, dict)
        scaled = inputs["tokens"].astype(np.float32) * inputs["scale"]
        np.testing.assert_allclose(answer["scaled"], scaled, rtol=1e-6)
        np.testing.assert_allclose(answer["total"], scaled.sum(1, keepdims=True), rtol=1e-6)


def test_text_ends_at_its_first_nul(client: InferenceServerClient) -> None:
    texts = np.array([[b"x\0y"], [b"\0"]], dtype=object)
    assert ask(client, "texts", {"x": texts})["y"].tolist() == [[b"x"], [b""]]


def test_text_that_is_not_utf8_fails_alone(client: InferenceServerClient) -> None:
    bad, good = ({"x": np.array([[text]], dtype=object)} for text in (b"\xff", b"x"))
    failure, answer = ask_together(client, "texts", [bad, good])
    assert_failed(failure, "INVALID_ARGUMENT", "input 'x' must be UTF-8 text")
    assert isinstance(answer, dict)
    assert answer["y"].tolist() == [[b"x"]]


def test_scalars_and_an_input_with_a_default_value(client: InferenceServerClient) -> None:
    inputs = {"x": np.array([1, 2, 3], np.float32), "factor": np.array([2], np.float32)}
    answer = ask(client, "scalars", inputs)
    assert answer["y"].tolist() == [2.5, 4.5, 6.5]
    assert answer["top"].tolist() == [6.5]
    answer = ask(client, "scalars", {**inputs, "bias": np.array([-1], np.float32)})
    assert answer["y"].tolist() == [1.0, 3.0, 5.0]


def test_reshape_file_name_and_versions(client: InferenceServerClient) -> None:
    inputs = {
        "x": np.array([[3], [5]], np.float32),
        "v": np.arange(6, dtype=np.float32).reshape(2, 3, 1),
    }
    for version, expected in (("1", [[6.0], [10.0]]), ("2", [[9.0], [25.0]])):
        answer = ask(client, "reshaped", inputs, version=version)
        assert answer["y"].tolist() == expected
        assert answer["w"].tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]


def test_a_config_without_tensors_is_completed(client: InferenceServerClient) -> None:
    config = client.get_model_config("completed", as_json=True)["config"]
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config
    assert [(t["name"], t["dims"]) for t in config["input"]] == [("v", ["3"]), ("x", ["1"])]
    assert config["input"][1]["reshape"] == {}
    inputs = {"x": np.array([[3], [5]], np.float32), "v": np.ones((2, 3), np.float32)}
    assert ask(client, "completed", inputs)["y"].tolist() == [[6.0], [10.0]]


def faulty_request(*lengths: int) -> Arrays:
    """Return a request to the model `faulty`, whose rows of length 0 have no output."""
    return {"tokens": int32(*[[1]] * len(lengths)), "length": int32(*[[n] for n in lengths])}


def test_requests_beyond_the_end_of_an_output_fail_alone(client: InferenceServerClient) -> None:
    answers = ask_together(client, "faulty", [faulty_request(length) for length in (1, 0, 2, 3)])
    # The requests may arrive in any order: the kept rows are the first three requests' answers.
    kept = [answer["kept"].item() for answer in answers if isinstance(answer, dict)]
    assert sorted(kept) == [1, 2, 3]
    (failure,) = (answer for answer in answers if not isinstance(answer, dict))
    assert_failed(
        failure,
        "UNIMPLEMENTED",
        r"\[request id: <id_unknown>\] failed to split the output tensor 'kept' in responses: "
        "expected batch size of at least 4 in model output, got 3",
    )
    with pytest.raises(InferenceServerException, match=r"\[request id: seven\] failed to split"):
        ask(client, "faulty", faulty_request(1, 1, 1, 0), request_id="seven")


def embed(url: str, pipeline: str, texts: Sequence[str]) -> Any:
    """Embeddings of texts that many clients send at the same time, one each."""
    with Client(pipeline, url) as client, ThreadPoolExecutor(16) as pool:
        return np.concatenate(list(pool.map(lambda text: client.embed([text]), texts)))


@pytest.fixture(scope="module")
def by_torch(tiny_model: Path) -> Any:
    """Embeddings of the first 64 texts: the mean of the model's vectors."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(tiny_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    encoded = tokenizer(traffic_texts()[:64], padding=True, truncation=True, return_tensors="pt")
    mask = encoded["attention_mask"][:, :, None]
    with torch.inference_mode():
        return (model(**encoded).last_hidden_state * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_of_tensorrt_answers_as_torch_and_batches(
    layout: str, served: Served, by_torch: Any
) -> None:
    texts = traffic_texts()[:64]
    before = len(served_engines.engine_runs(served.log))
    answers = embed(served.url, f"tiny_{layout}", texts)
    np.testing.assert_allclose(answers, by_torch.numpy(), atol=1e-5)
    runs = served_engines.engine_runs(served.log)[before:]
    rows = [shapes["row_length"][0] for _, shapes in runs]
    assert max(rows) > 1
    assert len(runs) < len(texts)


def test_a_pipeline_of_openvino_answers_as_torch(served: Served, by_torch: Any) -> None:
    answers = embed(served.url, "tiny_openvino", traffic_texts()[:64])
    np.testing.assert_allclose(answers, by_torch.numpy(), atol=0.05)
    log = served.text.read_text(encoding="utf-8")
    precision = "bf16" if "avx512_bf16" in find_instruction_sets() else "f32"
    assert f"emulated OpenVINO backend, computes in {precision}" in log
    with Client("tiny_openvino", served.url) as one:
        together = one.embed(traffic_texts()[:20])
    np.testing.assert_allclose(together, answers[:20], atol=0.05)


def test_buckets_run_in_their_profile_and_as_cuda_graphs(served: Served) -> None:
    captured = served_engines.count_events(served.log, "graph")
    assert captured > 0
    assert f"{captured} of {captured} CUDA graphs" in served.text.read_text(encoding="utf-8")
    launched = served_engines.count_events(served.log, "launch")
    before = len(served_engines.engine_runs(served.log))
    # One after the other: what waits together may share a bucket.
    for text in ("short", "a text of a few more words " * 20):
        embed(served.url, "tiny_bucketed", [text])
    runs = served_engines.engine_runs(served.log)[before:]
    assert served_engines.count_events(served.log, "launch") - launched == len(runs) == 2
    assert len({place for place, _ in runs}) == 2
