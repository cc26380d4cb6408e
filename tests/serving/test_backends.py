"""Contract of the emulated backends on one real server: responses, refusals and failures.

TensorRT and the GPU are fakes.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support import backend_models, served_engines
from tests.support.fake_cuda import LOG_VARIABLE
from tests.support.processes import eventually, running
from tests.support.project import build_into, traffic_texts, write_pipeline
from triptych.client import Client
from triptych.container.processor import find_instruction_sets
from triptych.serving.server import Server

pytestmark = [pytest.mark.server, pytest.mark.replacement]
both = pytest.mark.parametrize("backend", backend_models.BACKENDS)
every = pytest.mark.parametrize("backend", backend_models.ALL_BACKENDS)
Arrays = dict[str, Any]


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
    """Serves pipelines of TensorRT and OpenVINO, and the small models of `backend_models`."""
    base = tmp_path_factory.mktemp("backends")
    repository, source = base / "repository", {"source": str(tiny_model)}
    core = {"backend": "tensorrt", "device": "gpu", "layout": "bucketed", "max_batch_size": 8}
    build_into(write_pipeline(base / "tiny_tensorrt", model=source, core=core), base / "built")
    served_engines.with_fake_engines(base / "built", repository)
    folder = write_pipeline(
        base / "tiny_openvino",
        model=source,
        core={"backend": "openvino", "precision": "bf16"},
        serving={"instances": {"core": 2}},
    )
    build_into(folder, repository)
    models = ["tiny_tensorrt", "tiny_openvino", *backend_models.write_models(repository)]
    log, text = base / "gpu.jsonl", base / "server.log"
    server = Server(
        repository,
        models=models,
        environment={LOG_VARIABLE: str(log)},
        backend_directory=served_engines.write_fakes(base / "backends"),
        log_file=text,
    )
    with running(server), InferenceServerClient(server.grpc_url) as client:
        yield Served(client, server.grpc_url, repository, log, text, server.operator_headers)


@pytest.fixture(scope="module")
def client(served: Served) -> InferenceServerClient:
    return served.client


def ask(
    client: InferenceServerClient,
    model: str,
    inputs: Arrays,
    *,
    outputs: Sequence[str] = (),
    **options: str,
) -> Arrays:
    """Return the outputs of one request by name; all of them unless `outputs` names some."""
    tensors = [
        InferInput(name, value.shape, np_to_triton_dtype(value.dtype)).set_data_from_numpy(value)
        for name, value in inputs.items()
    ]
    wanted = [InferRequestedOutput(name) for name in outputs] or None
    result = client.infer(model, tensors, outputs=wanted, client_timeout=60, **options)
    return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


def ask_together(
    client: InferenceServerClient, model: str, requests: Sequence[Arrays]
) -> list[Arrays | InferenceServerException]:
    """Answers to requests that are sent at the same time, in their order."""
    gate = threading.Barrier(len(requests))

    def send(inputs: Arrays) -> Arrays | InferenceServerException:
        gate.wait()
        try:
            return ask(client, model, inputs)
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def batch_sizes(client: InferenceServerClient, model: str) -> dict[int, int]:
    """Number of rows of a dynamic batch -> how many such batches the model has served."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return {one.batch_size: one.compute_infer.count for one in stats.batch_stats}


def int32(*rows: Sequence[int]) -> Any:
    return np.array(rows, np.int32)


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
def test_rows_are_right_whatever_shares_their_batch(served: Served, backend: str) -> None:
    model = f"packed_{backend}"
    # The warm-up runs ragged rows as one dynamic batch. The server updates its counters after it
    # has sent the responses.
    assert eventually(lambda: batch_sizes(served.client, model).get(3) == 1)
    before = Counter(batch_sizes(served.client, model))
    for shapes in ([[5, 2, 4], [9]], [[2, 2], [7], [6]], [[1], [3], [20], [4]], [[1, 1, 1, 1]]):
        asked = [packed_request(*lengths, seed=i) for i, lengths in enumerate(shapes)]
        answers = ask_together(served.client, model, asked)
        for answer, inputs in zip(answers, asked, strict=True):
            assert isinstance(answer, dict), answer
            expected = packed_plainly(inputs, served.repository)
            assert answer["mean"].dtype == np.float32
            np.testing.assert_allclose(answer["mean"], expected["mean"], rtol=1e-5)
            np.testing.assert_allclose(answer["each"], expected["each"], rtol=1e-5)
    after = before + Counter({4: 4})
    assert eventually(lambda: Counter(batch_sizes(served.client, model)) >= after)


@both
def test_only_requested_outputs_and_first_targets_come_back(
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
    # Rows without tokens are answered, too.
    empty = {"tokens": np.zeros((4, 0), np.int32), "length": int32(*[[0]] * 4)}
    answer = ask(client, model, empty)
    assert np.isnan(answer["mean"]).all()
    assert answer["each"].shape == (4, 0, 4)


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


def test_what_the_native_backend_refuses_does_not_load(served: Served) -> None:
    for name, (*_, message) in backend_models.REFUSED.items():
        with pytest.raises(InferenceServerException) as refusal:
            served.client.load_model(name, headers=served.operator_headers)
        assert message in refusal.value.message(), name


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


def test_text_ends_at_its_first_nul_and_fails_alone_unless_it_is_utf8(
    client: InferenceServerClient,
) -> None:
    texts = np.array([[b"x\0y"], [b"\0"]], dtype=object)
    assert ask(client, "texts", {"x": texts})["y"].tolist() == [[b"x"], [b""]]
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
        answer = ask(client, "reshaped", inputs, model_version=version)
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


def test_a_pipeline_of_tensorrt_answers_as_torch_in_batches_and_cuda_graphs(
    served: Served, by_torch: Any
) -> None:
    texts = traffic_texts()[:64]
    captured = served_engines.count_events(served.log, "graph")
    assert captured > 0
    assert f"{captured} of {captured} CUDA graphs" in served.text.read_text(encoding="utf-8")
    before = len(served_engines.engine_runs(served.log))
    with Client("tiny_tensorrt", served.url) as client:
        answers = client.embed(texts)
        np.testing.assert_allclose(answers, by_torch.numpy(), atol=1e-5)
        runs = served_engines.engine_runs(served.log)[before:]
        assert max(shapes["row_length"][0] for _, shapes in runs) > 1
        assert len(runs) < len(texts)
        # One after the other: texts that wait together may share a bucket.
        launched = served_engines.count_events(served.log, "launch")
        for text in ("short", "a text of a few more words " * 20):
            client.embed([text])
    runs = served_engines.engine_runs(served.log)[before + len(runs) :]
    assert served_engines.count_events(served.log, "launch") - launched == len(runs) == 2
    assert len({place for place, _ in runs}) == 2


def test_a_pipeline_of_openvino_answers_as_torch(served: Served, by_torch: Any) -> None:
    texts = traffic_texts()[:64]
    with Client("tiny_openvino", served.url) as client:
        answers = client.embed(texts)
        alone = np.concatenate([client.embed([text]) for text in texts[:20]])
    np.testing.assert_allclose(answers, by_torch.numpy(), atol=0.05)
    np.testing.assert_allclose(alone, answers[:20], atol=0.05)
    log = served.text.read_text(encoding="utf-8")
    precision = "bf16" if "avx512_bf16" in find_instruction_sets() else "f32"
    assert f"emulated OpenVINO backend, computes in {precision}" in log
