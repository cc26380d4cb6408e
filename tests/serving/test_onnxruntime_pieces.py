"""Tests of the emulated ONNX Runtime backend without a server: refusals, sessions and feeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxruntime_cases import PADDED, write_model
from triptych.serving.backends import contract as contracts
from triptych.serving.backends import feeds
from triptych.serving.backends.onnxruntime import ort_sessions

PACKED_INPUTS = [
    contracts.ModelTensor("input_ids", "TYPE_INT32", (-1,)),
    contracts.ModelTensor("row_length", "TYPE_INT32", (-1, 1)),
    contracts.ModelTensor("row_stride", "TYPE_INT32", (-1,)),
]
PACKED_OUTPUTS = [contracts.ModelTensor("embedding", "TYPE_FP32", (-1, 384))]


def entry(name: str, data_type: str, dims: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


RAGGED = entry("input_ids", "TYPE_INT32", [-1], allow_ragged_batch=True)
LENGTH = entry("row_length", "TYPE_INT32", [1])
STRIDE = {
    "kind": "BATCH_ITEM_SHAPE_FLATTEN",
    "target_name": ["row_stride"],
    "data_type": "TYPE_INT32",
    "source_input": ["input_ids"],
}


def packed_contract(**changes: Any) -> Any:
    return {
        "name": "core",
        "max_batch_size": 32,
        "input": [RAGGED, LENGTH],
        "output": [entry("embedding", "TYPE_FP32", [384])],
        "batch_input": [STRIDE],
        **changes,
    }


def with_dims(tensors: Sequence[Any], name: str, dims: tuple[int, ...]) -> list[Any]:
    return [
        contracts.ModelTensor(t.name, t.data_type, dims if t.name == name else t.dims)
        for t in tensors
    ]


@pytest.mark.parametrize(
    ("changes", "inputs", "outputs", "message"),
    [
        (
            {"batch_input": []},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "describes the inputs input_ids, row_length, the model has input_ids, row_length, row_",
        ),
        (
            {"batch_input": [{**STRIDE, "target_name": ["row_stride", "more"]}]},
            [*PACKED_INPUTS, contracts.ModelTensor("more", "TYPE_INT32", (-1,))],
            PACKED_OUTPUTS,
            "each batch input must have one target",
        ),
        (
            {},
            with_dims(PACKED_INPUTS, "input_ids", (-1, -1)),
            PACKED_OUTPUTS,
            "'input_ids' is TYPE_INT32 [-1] in the config and TYPE_INT32 [-1,-1] in the model",
        ),
        (
            {},
            with_dims(PACKED_INPUTS, "row_length", (8, 1)),
            PACKED_OUTPUTS,
            "'row_length' is TYPE_INT32 [-1,1] in the config and TYPE_INT32 [8,1] in the model",
        ),
        (
            {},
            PACKED_INPUTS,
            with_dims(PACKED_OUTPUTS, "embedding", (-1, -1)),
            "'embedding' is TYPE_FP32 [-1,384] in the config and TYPE_FP32 [-1,-1] in the model",
        ),
        (
            {"input": [RAGGED, entry("row_length", "TYPE_INT64", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "'row_length' is TYPE_INT64 [-1,1] in the config and TYPE_INT32 [-1,1] in the model",
        ),
        (
            {"input": [RAGGED, entry("row_length", "TYPE_BF16", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "'row_length' is TYPE_BF16",
        ),
        (
            {"output": [entry("embedding", "TYPE_FP16", [384])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "'embedding' is TYPE_FP16",
        ),
        (
            {"input": [RAGGED, entry("length", "TYPE_INT32", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "describes the inputs input_ids, length, row_stride, the model has input_ids,",
        ),
        (
            {"output": [entry("logits", "TYPE_FP32", [384])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "describes the outputs logits, the model has embedding",
        ),
        (
            {"batch_input": [{**STRIDE, "target_name": ["strides"]}]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "describes the inputs input_ids, row_length, strides, the model has",
        ),
        (
            {"batch_input": [{**STRIDE, "kind": "BATCH_ITEM_SHAPE"}]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "'row_stride' is TYPE_INT32 [-1,-1] in the config and TYPE_INT32 [-1] in the model",
        ),
        (
            {"input": [RAGGED, {**LENGTH, "optional": True}]},
            PACKED_INPUTS[:1] + PACKED_INPUTS[2:],
            PACKED_OUTPUTS,
            "input 'row_length' cannot be optional",
        ),
    ],
)
def test_contract_refuses(
    changes: dict[str, Any], inputs: list[Any], outputs: list[Any], message: str
) -> None:
    contracts.check_model(
        contracts.parse_contract(packed_contract(), backend="onnxruntime"),
        PACKED_INPUTS,
        PACKED_OUTPUTS,
    )
    contract = contracts.parse_contract(packed_contract(**changes), backend="onnxruntime")
    with pytest.raises(contracts.ContractError) as refusal:
        contracts.check_model(contract, inputs, outputs)
    assert message in str(refusal.value)


def test_a_graph_without_tensors_is_refused() -> None:
    node = SimpleNamespace(name="embedding", type="seq(tensor(float))", shape=None)
    with pytest.raises(contracts.ContractError, match="unsupported ONNX type seq"):
        ort_sessions.read_tensors([node])


def parsed(backend: str, **changes: Any) -> contracts.Contract:
    return contracts.parse_contract(packed_contract(**changes), backend=backend)


def packed_rows(*lengths: int) -> list[feeds.Arrays]:
    """Return requests of one row each; their tokens count from 1."""
    first = np.cumsum([1, *lengths])
    return [
        {
            "input_ids": np.arange(start, start + n, dtype=np.int32)[None],
            "row_length": np.array([[n]], np.int32),
        }
        for start, n in zip(first[:-1], lengths, strict=True)
    ]


def test_a_feed_joins_the_rows_of_all_requests() -> None:
    requests: list[feeds.Arrays] = [
        {"input_ids": np.arange(6, dtype=np.int32).reshape(3, 2), "row_length": np.ones((3, 1))},
        {"input_ids": np.arange(10, 14, dtype=np.int32)[None], "row_length": np.ones((1, 1))},
    ]
    feed = feeds.build_feed(parsed("onnxruntime"), requests)
    assert feed["input_ids"].tolist() == [*range(6), *range(10, 14)]
    assert feed["row_stride"].tolist() == [2, 2, 2, 4]
    assert feed["row_stride"].dtype == np.int32
    assert feed["row_length"].shape == (4, 1)


@pytest.mark.parametrize(
    ("lengths", "by_onnxruntime", "by_tensorrt"),
    [
        ([2, 1], [1, 2, 3], [1, 2, 3]),
        ([2, 1, 0], [1, 2, 3], [1, 2, 3]),
        ([0, 2, 1], [0, 0, 0], [0, 0, 0]),
        ([2, 0, 1], [1, 2, 0], [1, 2, 0]),
        ([0, 2, 0], [1, 2], [0, 0]),
        ([0], [], []),
    ],
)
def test_tokens_after_an_empty_request_are_not_copied(
    lengths: list[int], by_onnxruntime: list[int], by_tensorrt: list[int]
) -> None:
    for backend, tokens in (("onnxruntime", by_onnxruntime), ("tensorrt", by_tensorrt)):
        feed = feeds.build_feed(parsed(backend), packed_rows(*lengths))
        assert feed["input_ids"].tolist() == tokens
        assert feed["row_stride"].tolist() == lengths


@pytest.mark.parametrize(
    ("backend", "data_type", "content"),
    [
        ("onnxruntime", "TYPE_INT32", -(2**31)),
        ("onnxruntime", "TYPE_FP32", np.nan),
        ("tensorrt", "TYPE_INT32", 0),
        ("tensorrt", "TYPE_FP32", 0),
    ],
)
def test_a_longest_row_is_a_shape_without_contents(
    backend: str, data_type: str, content: float
) -> None:
    entries = [{**STRIDE, "kind": "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "data_type": data_type}]
    contract = parsed(backend, batch_input=entries)
    longest = feeds.build_feed(contract, packed_rows(2, 3, 1))["row_stride"]
    np.testing.assert_array_equal(longest, [content] * 3)


def test_an_output_with_too_few_rows_fails_the_requests_beyond_its_end() -> None:
    values = {"embedding": np.arange(2)[:, None]}
    answers = feeds.split_outputs(parsed("onnxruntime"), values, packed_rows(2, 3, 1, 4))
    first, second, third, fourth = answers
    assert not isinstance(first, feeds.SplitError)
    assert not isinstance(second, feeds.SplitError)
    assert (first["embedding"].item(), second["embedding"].item()) == (0, 1)
    assert str(third).endswith("expected batch size of at least 3 in model output, got 2")
    assert str(fourth).endswith("expected batch size of at least 4 in model output, got 2")


def scattered(dims: Sequence[int]) -> dict[str, Any]:
    """Return a change of the config: an output with these dims, scattered like the tokens."""
    return {
        "output": [entry("embedding", "TYPE_FP32", dims)],
        "batch_output": [
            {
                "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
                "target_name": ["embedding"],
                "source_input": ["input_ids"],
            }
        ],
    }


def test_a_scattered_output_has_no_more_variable_dimensions_than_its_source() -> None:
    parsed("onnxruntime", **scattered([-1, 2]))
    for backend in ("onnxruntime", "tensorrt"):
        with pytest.raises(contracts.ContractError, match="'embedding' has more variable dim"):
            parsed(backend, **scattered([-1, -1]))


def settings(**parameters: str) -> Any:
    return {
        "name": "core",
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (settings(), "GPU", "runs on the CPU only; use KIND_CPU or the native backend"),
        (
            {
                **settings(),
                "optimization": {
                    "execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}
                },
            },
            "CPU",
            "unknown Execution Accelerator 'openvino' is requested",
        ),
    ],
)
def test_settings_refuse(config: Any, kind: str, message: str) -> None:
    ort_sessions.check_settings(settings(), kind="CPU")
    with pytest.raises(contracts.ContractError) as refusal:
        ort_sessions.check_settings(config, kind=kind)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"inter_op_thread_count": "two"}, "failed to convert 'two' to integral number"),
        ({"intra_op_thread_count": "2147483648"}, "failed to convert '2147483648' to integral"),
        ({"enable_mem_arena": "2"}, "failed to convert '2' to boolean"),
        ({"execution_mode": "2"}, "Expected values for  execution_mode are 0 or 1 but got 2"),
    ],
)
def test_parameters_refuse(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(contracts.ContractError, match=message):
        open_padded(tmp_path, **parameters)


def open_padded(folder: Path, **parameters: str) -> Any:
    """Return the options of a session with these parameters."""
    write_model(folder / "model", "", {"1/model.onnx": PADDED})
    path = contracts.model_file(folder / "model" / "1", settings(), "model.onnx")
    return ort_sessions.open_session(path, settings(**parameters)).get_session_options()


def test_a_session_has_only_the_options_of_the_native_backend(tmp_path: Path) -> None:
    import onnxruntime

    usual = onnxruntime.SessionOptions()
    allocator = "session.use_device_allocator_for_initializers"
    plain = open_padded(tmp_path / "plain", share_session_between_instances="maybe")
    for name in ("intra_op_num_threads", "inter_op_num_threads", "enable_mem_pattern"):
        assert getattr(plain, name) == getattr(usual, name)
    entries = ("session.force_spinning_stop", "session.x64quantprecision", allocator)
    for entry_name in entries:
        with pytest.raises(RuntimeError):
            plain.get_session_config_entry(entry_name)
    chosen = open_padded(
        tmp_path / "chosen",
        intra_op_thread_count="3",
        inter_op_thread_count="2",
        enable_mem_pattern="off",
        **{allocator: "1"},
    )
    assert (chosen.intra_op_num_threads, chosen.inter_op_num_threads) == (3, 2)
    assert not chosen.enable_mem_pattern
    assert chosen.get_session_config_entry(allocator) == "1"
