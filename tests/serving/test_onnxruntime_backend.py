"""Tests of the emulated ONNX Runtime backend on real servers: responses, refusals and failures."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

import onnxruntime_cases as cases
from raw_requests import Arrays, ask, ask_together
from triptych.serving.server import Server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnxruntime")
    for name, (config, graphs) in cases.MODELS.items():
        cases.write_model(folder / name, config, graphs)
    for name, (config, graphs, _) in cases.REFUSED.items():
        cases.write_model(folder / name, config, graphs)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository, models=list(cases.MODELS)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> InferenceServerClient:
    return InferenceServerClient(server.grpc_url)


def executions(client: InferenceServerClient, model: str, *, rows: int = 0) -> tuple[int, int]:
    """Return the numbers of rows and of dynamic batches that the model has served.

    The server updates its counters after it has sent the responses. This function therefore waits
    until batches of at least `rows` rows are counted.
    """
    deadline = time.monotonic() + 10
    while True:
        (stats,) = client.get_inference_statistics(model).model_stats
        counted = sum(one.batch_size * one.compute_infer.count for one in stats.batch_stats)
        if counted >= rows or time.monotonic() > deadline:
            return stats.inference_count, stats.execution_count
        time.sleep(0.02)


def int32(*rows: Sequence[int]) -> Any:
    return np.array(rows, np.int32)


def packed_request(lengths: Sequence[int], *, seed: int) -> Arrays:
    """Return rows of these lengths. Padding tokens at their end would change a wrong mean."""
    tokens = np.random.default_rng(seed).integers(0, 10, (len(lengths), max(lengths)))
    return {"tokens": tokens.astype(np.int32), "length": int32(*[[n] for n in lengths])}


def packed_plainly(request: Arrays, repository: Path) -> Arrays:
    """Return the outputs of ONNX Runtime itself for each row alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(repository / "packed/1/model.onnx")
    rows = [
        session.run(
            None,
            {
                "tokens": tokens,
                "length": length[None],
                "stride": np.array([tokens.size], np.int32),
            },
        )
        for tokens, length in zip(request["tokens"], request["length"], strict=True)
    ]
    return {
        "mean": np.concatenate([mean for mean, _ in rows]),
        "each": np.stack([each.reshape(-1, 4) for _, each in rows]),
    }


def test_batch_inputs_describe_the_requests_of_the_batch(client: InferenceServerClient) -> None:
    requests = [
        {"tokens": int32([10, 11, 12]), "tag": np.zeros((1, 1), np.float32)},
        {"tokens": int32([20, 21], [22, 23]), "tag": np.zeros((2, 1), np.float32)},
        {"tokens": int32([30, 31, 32, 33, 34]), "tag": np.zeros((1, 1), np.float32)},
    ]
    rows, batches = executions(client, "described")
    answers = ask_together(client, "described", requests)
    assert executions(client, "described", rows=rows + 4) == (rows + 4, batches + 1)

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


@pytest.mark.parametrize("model", ["packed", "packed_twice"])
def test_rows_are_right_whatever_shares_their_batch(
    model: str, client: InferenceServerClient, repository: Path
) -> None:
    shapes = [[1], [3], [5, 2, 4], [9], [2, 2], [7], [1, 1, 1, 1, 1, 1], [6], [20], [4]]
    asked = [packed_request(lengths, seed=i) for i, lengths in enumerate(shapes)]
    for answer, inputs in zip(ask_together(client, model, asked), asked, strict=True):
        assert isinstance(answer, dict)
        expected = packed_plainly(inputs, repository)
        assert answer["mean"].dtype == np.float32
        np.testing.assert_allclose(answer["mean"], expected["mean"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(answer["each"], expected["each"], rtol=0, atol=1e-6)


def test_warm_up_runs_ragged_rows_as_one_dynamic_batch(
    client: InferenceServerClient,
) -> None:
    assert executions(client, "warmed", rows=3) == (3, 1)


def test_a_row_without_tokens_is_answered(client: InferenceServerClient) -> None:
    inputs = {"tokens": np.zeros((1, 0), np.int32), "length": int32([0])}
    answer = ask(client, "packed", inputs)
    assert np.isnan(answer["mean"]).all()
    assert answer["each"].shape == (1, 0, 4)


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


def test_only_requested_outputs_come_back(client: InferenceServerClient) -> None:
    inputs = packed_request([4, 4], seed=0)
    both = ask(client, "packed", inputs)
    assert list(both) == ["each", "mean"]  # sorted by name, unlike in the config
    one = ask(client, "packed", inputs, outputs=["each"])
    assert list(one) == ["each"]
    np.testing.assert_allclose(one["each"], both["each"], atol=1e-6)


def test_every_data_type_passes_unchanged(client: InferenceServerClient) -> None:
    inputs: Arrays = {"STRING_in": np.array([["a", ""], ["zwölf", "日本"]], dtype=object)}
    for name in cases.ONNX_TYPES:
        if name != "STRING":
            inputs[f"{name}_in"] = np.array([[0, 1], [1, 0]]).astype(cases.NUMPY_TYPES[name])
    answer = ask(client, "typed", inputs)
    texts = [[item.decode() for item in row] for row in answer.pop("STRING_out")]
    assert texts == inputs["STRING_in"].tolist()
    for name, value in answer.items():
        expected = inputs[name.replace("_out", "_in")]
        assert value.dtype == expected.dtype
        assert value.tolist() == expected.tolist()


def test_text_ends_at_its_first_nul(client: InferenceServerClient) -> None:
    texts = np.array([[b"x\0y"], [b"\0"]], dtype=object)
    assert ask(client, "texts", {"x": texts})["y"].tolist() == [[b"x"], [b""]]


def test_text_that_is_not_utf8_fails_alone(client: InferenceServerClient) -> None:
    bad, good = ({"x": np.array([[text]], dtype=object)} for text in (b"\xff", b"x"))
    failure, answer = ask_together(client, "texts", [bad, good])
    assert_failed(failure, "INVALID_ARGUMENT", "input 'x' must be UTF-8 text")
    assert isinstance(answer, dict)
    assert answer["y"].tolist() == [[b"x"]]


def test_models_without_a_batch_dimension(client: InferenceServerClient) -> None:
    inputs = {"x": np.array([1, 2, 3], np.float32), "factor": np.array([2], np.float32)}
    answer = ask(client, "unbatched", inputs)
    assert answer["y"].tolist() == [2.5, 4.5, 6.5]
    assert answer["top"].tolist() == [6.5]
    answer = ask(client, "unbatched", {**inputs, "bias": np.array([-1], np.float32)})
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

    config = client.get_model_config("completed_unbatched", as_json=True)["config"]
    assert "max_batch_size" not in config
    assert [(t["name"], t["dims"]) for t in config["output"]] == [("top", ["1"]), ("y", ["-1"])]


@pytest.mark.parametrize("name", cases.REFUSED)
def test_what_the_native_backend_refuses_does_not_load(
    name: str, client: InferenceServerClient, server: Server
) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        client.load_model(name, headers=server.operator_headers)
    assert cases.REFUSED[name][2] in refusal.value.message()


def assert_failed(answer: Any, code: str, pattern: str) -> None:
    assert isinstance(answer, InferenceServerException)
    assert answer.status() == f"StatusCode.{code}"
    assert re.match(pattern, answer.message())


def faulty_request(tokens: Sequence[int], *lengths: int) -> Arrays:
    """Return a request to the model `faulty`, with the same tokens in each row."""
    return {"tokens": int32(*[tokens] * len(lengths)), "length": int32(*[[n] for n in lengths])}


def test_a_run_that_fails_fails_its_whole_batch(client: InferenceServerClient) -> None:
    requests = [faulty_request(tokens, 1) for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4])]
    answers = ask_together(client, "faulty", requests)
    assert len({answer.message() for answer in answers if not isinstance(answer, dict)}) == 1
    for answer in answers:
        assert_failed(answer, "INTERNAL", r"onnx runtime error \d: Non-zero status code returned")
    good = ask_together(client, "faulty", [requests[0]] * 3)
    assert all(isinstance(answer, dict) for answer in good)


def test_an_invalid_argument_of_the_run_is_an_internal_error(client: InferenceServerClient) -> None:
    request = packed_request([4, 2], seed=0)
    request["tokens"][1, 0] = 10
    (failure,) = ask_together(client, "packed", [request])
    assert_failed(failure, "INTERNAL", "onnx runtime error 2: ")


def test_requests_beyond_the_end_of_an_output_fail_alone(client: InferenceServerClient) -> None:
    requests = [faulty_request([1, 2], length) for length in (1, 0, 2)]
    answers = ask_together(client, "faulty", requests)
    # The requests may arrive in any order: the two kept rows are the first two requests' answers.
    kept = [answer["kept"].item() for answer in answers if isinstance(answer, dict)]
    assert sorted(kept) == [1, 2]
    (failure,) = (answer for answer in answers if not isinstance(answer, dict))
    assert_failed(
        failure,
        "UNIMPLEMENTED",
        r"\[request id: <id_unknown>\] failed to split the output tensor 'kept' in responses: "
        "expected batch size of at least 3 in model output, got 2",
    )
    with pytest.raises(InferenceServerException, match=r"\[request id: seven\] failed to split"):
        ask(client, "faulty", faulty_request([1, 2], 1, 1, 0), request_id="seven")


def test_a_scattered_output_that_is_too_small_fails_the_whole_batch(
    client: InferenceServerClient,
) -> None:
    for answer in ask_together(client, "short", [{"tokens": int32([1, 2])}] * 2):
        text = "failed to split the output tensor 'each' in responses: expected at least 4 elements"
        assert_failed(answer, "INTERNAL", text)


def test_only_the_first_target_of_a_batch_output_is_answered(client: InferenceServerClient) -> None:
    answer = ask(client, "two_targets", {"tokens": int32([1, 2], [3, 4])})
    assert list(answer) == ["each"]
    assert answer["each"].tolist() == [[1, 2], [3, 4]]


def test_the_rows_after_a_request_without_tokens_are_not_copied(
    client: InferenceServerClient,
) -> None:
    rows = [[], [], [10, 11], [20, 21, 22]]
    requests = [{"tokens": int32(row), "tag": np.zeros((1, 1), np.float32)} for row in rows]
    answers = ask_together(client, "described", requests)
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
