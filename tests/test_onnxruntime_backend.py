"""The local ONNX Runtime backend, on real servers: its answers, its refusals, its failures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

import onnxruntime_cases as cases
from raw_requests import Arrays, ask, ask_together
from triptych.server.backends.onnxruntime.ort_sessions import TOKEN_BUDGET_VARIABLE
from triptych.server.server import Server

pytestmark = pytest.mark.server

BUDGET = 8


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnxruntime")
    for name, (config, graphs) in cases.MODELS.items():
        cases.write_model(folder / name, config, graphs)
    for name, (config, graphs, _) in cases.REFUSED.items():
        cases.write_model(folder / name, config, graphs)
    return folder


@pytest.fixture(scope="module")
def whole_server(repository: Path) -> Iterator[Server]:
    """A server that runs every dynamic batch as one."""
    environment = {TOKEN_BUDGET_VARIABLE: "0"}
    models = [name for name in cases.MODELS if name != "slow"]
    with Server(repository, models=models, environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def whole(whole_server: Server) -> InferenceServerClient:
    return InferenceServerClient(whole_server.grpc_url)


@pytest.fixture(scope="module")
def split(repository: Path) -> Iterator[InferenceServerClient]:
    """A server with so small a budget that most dynamic batches run in several pieces."""
    environment = {TOKEN_BUDGET_VARIABLE: str(BUDGET)}
    models = ["packed", "packed_twice", "warmed", "padded", "typed", "slow", "faulty"]
    with Server(repository, models=models, environment=environment) as server:
        yield InferenceServerClient(server.grpc_url)


@pytest.fixture(params=["whole", "split"])
def client(request: pytest.FixtureRequest) -> InferenceServerClient:
    """Either server."""
    chosen: InferenceServerClient = request.getfixturevalue(request.param)
    return chosen


def executions(client: InferenceServerClient, model: str, *, rows: int = 0) -> tuple[int, int]:
    """How many rows the model has served, in how many dynamic batches.

    Counts follow the answers a moment later, and a batch's those of its requests: this waits until
    batches of at least `rows` are counted.
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
    """Rows of these lengths, padded on the right with tokens that change a wrong mean."""
    tokens = np.random.default_rng(seed).integers(0, 10, (len(lengths), max(lengths)))
    return {"tokens": tokens.astype(np.int32), "length": int32(*[[n] for n in lengths])}


def packed_plainly(request: Arrays, repository: Path) -> Arrays:
    """What ONNX Runtime itself says of each row alone."""
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


def test_batch_inputs_describe_the_requests_of_the_batch(whole: InferenceServerClient) -> None:
    requests = [
        {"tokens": int32([10, 11, 12]), "tag": np.zeros((1, 1), np.float32)},
        {"tokens": int32([20, 21], [22, 23]), "tag": np.zeros((2, 1), np.float32)},
        {"tokens": int32([30, 31, 32, 33, 34]), "tag": np.zeros((1, 1), np.float32)},
    ]
    rows, batches = executions(whole, "described")
    answers = ask_together(whole, "described", requests)
    assert executions(whole, "described", rows=rows + 4) == (rows + 4, batches + 1)

    seen = [answer["seen"][0].tolist() for answer in answers if isinstance(answer, dict)]
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    # Which request came first is the server's affair; the tokens tell.
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


def test_a_row_without_tokens_is_answered(whole: InferenceServerClient) -> None:
    inputs = {"tokens": np.zeros((1, 0), np.int32), "length": int32([0])}
    answer = ask(whole, "packed", inputs)
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


def test_only_requested_outputs_come_back(split: InferenceServerClient) -> None:
    # One row is returned by `execute`, several go by response senders.
    for lengths in ([4], [4, 4, 4, 4, 4]):
        inputs = packed_request(lengths, seed=0)
        both = ask(split, "packed", inputs)
        assert set(both) == {"mean", "each"}
        one = ask(split, "packed", inputs, outputs=["each"])
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


def test_text_that_is_not_utf8_fails_alone(client: InferenceServerClient) -> None:
    inputs: Arrays = {
        f"{name}_in": np.zeros((1, 2), cases.NUMPY_TYPES[name])
        for name in cases.ONNX_TYPES
        if name != "STRING"
    }
    good = {**inputs, "STRING_in": np.array([[b"x", b"y"]], dtype=object)}
    bad = {**inputs, "STRING_in": np.array([[b"x", b"\xff"]], dtype=object)}
    failure, answer = ask_together(client, "typed", [bad, good])
    assert isinstance(failure, InferenceServerException)
    assert failure.status() == "StatusCode.INVALID_ARGUMENT"
    assert "input 'STRING_in' must be UTF-8 text" in failure.message()
    assert isinstance(answer, dict)


def test_models_without_a_batch_dimension(whole: InferenceServerClient) -> None:
    inputs = {"x": np.array([1, 2, 3], np.float32), "factor": np.array([2], np.float32)}
    answer = ask(whole, "unbatched", inputs)
    assert answer["y"].tolist() == [2.5, 4.5, 6.5]
    assert answer["top"].tolist() == [6.5]
    answer = ask(whole, "unbatched", {**inputs, "bias": np.array([-1], np.float32)})
    assert answer["y"].tolist() == [1.0, 3.0, 5.0]


def test_reshape_file_name_and_versions(whole: InferenceServerClient) -> None:
    inputs = {
        "x": np.array([[3], [5]], np.float32),
        "v": np.arange(6, dtype=np.float32).reshape(2, 3, 1),
    }
    for version, expected in (("1", [[6.0], [10.0]]), ("2", [[9.0], [25.0]])):
        answer = ask(whole, "reshaped", inputs, version=version)
        assert answer["y"].tolist() == expected
        assert answer["w"].tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]


def test_a_config_without_tensors_is_completed(whole: InferenceServerClient) -> None:
    config = whole.get_model_config("completed", as_json=True)["config"]
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config
    assert [(t["name"], t["dims"]) for t in config["input"]] == [("x", ["1"]), ("v", ["3"])]
    assert config["input"][0]["reshape"] == {}
    inputs = {"x": np.array([[3], [5]], np.float32), "v": np.ones((2, 3), np.float32)}
    assert ask(whole, "completed", inputs)["y"].tolist() == [[6.0], [10.0]]

    config = whole.get_model_config("completed_unbatched", as_json=True)["config"]
    assert "max_batch_size" not in config
    assert [(t["name"], t["dims"]) for t in config["output"]] == [("y", ["-1"]), ("top", ["1"])]


@pytest.mark.parametrize("name", cases.REFUSED)
def test_what_the_native_backend_refuses_does_not_load(
    name: str, whole: InferenceServerClient, whole_server: Server
) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        whole.load_model(name, headers=whole_server.operator_headers)
    assert cases.REFUSED[name][2] in refusal.value.message()


def test_a_request_is_answered_before_the_slowest_of_its_batch(
    split: InferenceServerClient,
) -> None:
    # Each row fills the budget, so each runs by itself; the last takes seconds.
    rows, batches = executions(split, "slow")
    ends: dict[int, float] = {}

    def send(index: int, rounds: int) -> None:
        time.sleep(0.05 * index)  # in this order into the queue, which waits for all three
        tokens = int32([rounds] * BUDGET)
        ask(split, "slow", {"tokens": tokens, "length": int32([BUDGET])})
        ends[index] = time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(send, range(3), [10, 10, 6_000_000]))
    assert executions(split, "slow", rows=rows + 3) == (rows + 3, batches + 1)
    assert ends[2] - max(ends[0], ends[1]) > 0.2


def test_a_failing_row_fails_its_own_request_only(
    client: InferenceServerClient,
) -> None:
    for bad, code, text in (
        # A Reshape that does not fit is no fault of the input's that ONNX Runtime could name.
        ({"tokens": int32([1, 2, 3]), "length": int32([3])}, "INTERNAL", "Reshape"),
        (
            {"tokens": int32([1, 2]), "length": int32([0])},
            "INTERNAL",
            "failed to split the output tensor 'kept'",
        ),
    ):
        good = [{"tokens": int32([1, 2, 3, 4]), "length": int32([n])} for n in (1, 2)]
        rows, batches = executions(client, "faulty")
        first, failure, second = ask_together(client, "faulty", [good[0], bad, good[1]])
        assert executions(client, "faulty", rows=rows + 3) == (rows + 3, batches + 1)
        assert isinstance(failure, InferenceServerException)
        assert failure.status() == f"StatusCode.{code}"
        assert text in failure.message()
        assert isinstance(first, dict)
        assert isinstance(second, dict)
        assert (first["kept"].item(), second["kept"].item()) == (1, 2)


def test_a_token_out_of_range_is_the_callers_fault(
    client: InferenceServerClient, repository: Path
) -> None:
    asked = [packed_request([4, 2], seed=i) for i in range(4)]
    asked[2]["tokens"][1, 0] = 10
    answers = ask_together(client, "packed", asked)
    failure = answers.pop(2)
    assert isinstance(failure, InferenceServerException)
    assert failure.status() == "StatusCode.INVALID_ARGUMENT"
    for answer, inputs in zip(answers, asked[:2] + asked[3:], strict=True):
        assert isinstance(answer, dict)
        expected = packed_plainly(inputs, repository)["mean"]
        np.testing.assert_allclose(answer["mean"], expected, rtol=0, atol=1e-6)
