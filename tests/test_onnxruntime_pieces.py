"""The local ONNX Runtime backend without a server: what it refuses, how it cuts batches."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxruntime_cases import PACKED, PADDED, write_model
from triptych.server.backends.onnxruntime import ort_contract, ort_runner, ort_sessions
from triptych.server.stand_in import contract as contracts
from triptych.server.stand_in import feeds

PACKED_INPUTS = [
    ort_contract.OrtTensor("input_ids", "tensor(int32)", (-1,)),
    ort_contract.OrtTensor("row_length", "tensor(int32)", (-1, 1)),
    ort_contract.OrtTensor("row_stride", "tensor(int32)", (-1,)),
]
PACKED_OUTPUTS = [ort_contract.OrtTensor("embedding", "tensor(float)", (-1, 384))]


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
        ort_contract.OrtTensor(t.name, t.type, dims if t.name == name else t.dims) for t in tensors
    ]


@pytest.mark.parametrize(
    ("changes", "inputs", "outputs", "message"),
    [
        (
            {"batch_input": []},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "configuration expects 2 inputs, model provides 3",
        ),
        (
            {"batch_input": [{**STRIDE, "target_name": ["row_stride", "more"]}]},
            [*PACKED_INPUTS, ort_contract.OrtTensor("more", "tensor(int32)", (-1,))],
            PACKED_OUTPUTS,
            "configuration expects 3 inputs, model provides 4",
        ),
        (
            {},
            with_dims(PACKED_INPUTS, "input_ids", (-1, -1)),
            PACKED_OUTPUTS,
            "shape [-1] for ragged input 'input_ids', model provides [-1,-1]",
        ),
        (
            {},
            with_dims(PACKED_INPUTS, "row_length", (8, 1)),
            PACKED_OUTPUTS,
            "the first dimension must be -1; but shape expected by the model is [8,1]",
        ),
        (
            {},
            PACKED_INPUTS,
            with_dims(PACKED_OUTPUTS, "embedding", (-1, -1)),
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0",
        ),
        (
            {"input": [RAGGED, entry("row_length", "TYPE_INT64", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "expects datatype TYPE_INT64 for input 'row_length', model provides TYPE_INT32",
        ),
        (
            {"input": [RAGGED, entry("row_length", "TYPE_BF16", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "unsupported datatype TYPE_BF16 for input 'row_length'",
        ),
        (
            {"output": [entry("embedding", "TYPE_FP16", [384])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "expects datatype TYPE_FP16 for output 'embedding', model provides TYPE_FP32",
        ),
        (
            {"input": [RAGGED, entry("length", "TYPE_INT32", [1])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "unexpected inference input 'length', allowed inputs are: input_ids, row_length, row_",
        ),
        (
            {"output": [entry("logits", "TYPE_FP32", [384])]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "unexpected inference output 'logits', allowed outputs are: embedding",
        ),
        (
            {"batch_input": [{**STRIDE, "target_name": ["strides"]}]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "unexpected batch input 'strides'",
        ),
        (
            {"batch_input": [{**STRIDE, "kind": "BATCH_ITEM_SHAPE"}]},
            PACKED_INPUTS,
            PACKED_OUTPUTS,
            "of kind BATCH_ITEM_SHAPE has 2 dimension(s), model provides [-1]",
        ),
        (
            {"input": [RAGGED, {**LENGTH, "optional": True}]},
            PACKED_INPUTS[:1] + PACKED_INPUTS[2:],
            PACKED_OUTPUTS,
            "optional input 'row_length' is not supported for models that support batching",
        ),
        (
            {},
            PACKED_INPUTS,
            [ort_contract.OrtTensor("embedding", "seq(tensor(float))", ())],
            "Unsupported ONNX Type 'seq(tensor(float))' for I/O 'embedding'",
        ),
    ],
)
def test_contract_refuses(
    changes: dict[str, Any], inputs: list[Any], outputs: list[Any], message: str
) -> None:
    ort_contract.check_contract(
        contracts.parse_contract(packed_contract(), backend="onnxruntime"),
        PACKED_INPUTS,
        PACKED_OUTPUTS,
    )
    contract = contracts.parse_contract(packed_contract(**changes), backend="onnxruntime")
    with pytest.raises(contracts.ContractError) as refusal:
        ort_contract.check_contract(contract, inputs, outputs)
    assert message in str(refusal.value)


def tickets(*requests: tuple[int, int]) -> list[feeds.Ticket]:
    """Requests as (rows, elements a row)."""
    return [
        feeds.Ticket(index, {}, rows=rows, row_cost=cost)
        for index, (rows, cost) in enumerate(requests)
    ]


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 16, 128, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_hold_every_row_once_and_in_order(
    seed: int, budget: int, workers: int, separable: bool
) -> None:
    rng = np.random.default_rng(seed)
    asked = tickets(*((int(rng.integers(1, 9)), int(rng.lognormal(3, 0.8)) + 1) for _ in range(20)))
    batches = ort_runner.form_micro_batches(
        asked, budget=budget, workers=workers, separable=separable
    )
    rows = [
        (part.ticket.caller, row)
        for parts in batches
        for part in parts
        for row in range(part.start, part.stop)
    ]
    assert rows == [(ticket.caller, row) for ticket in asked for row in range(ticket.rows)]
    for parts in batches:
        assert parts
        pieces = sum(part.stop - part.start for part in parts) if separable else len(parts)
        cost = sum((part.stop - part.start) * part.ticket.row_cost for part in parts)
        assert cost <= budget or pieces == 1
        if not separable:
            assert all((part.start, part.stop) == (0, part.ticket.rows) for part in parts)


def test_micro_batches_keep_all_workers_busy_alike() -> None:
    batches = ort_runner.form_micro_batches(
        tickets(*[(1, 30)] * 32), budget=128, workers=2, separable=True
    )
    assert [sum(part.ticket.row_cost for part in parts) for parts in batches] == [120] * 8
    (first, second) = ort_runner.form_micro_batches(
        tickets((6, 20)), budget=128, workers=2, separable=True
    )
    assert [(part.start, part.stop) for part in first + second] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(
    ("requests", "budget", "workers", "count"),
    [
        ([(1, 100)], 128, 2, 1),  # a lone row has all cores
        ([(1, 10), (1, 10)], 128, 4, 1),  # as have fewer rows than workers
        ([(1, 10), (1, 10)], 128, 2, 2),
        ([(8, 500)], 0, 2, 1),  # no limit, and no splitting
        ([(8, 1)], sys.maxsize, 2, 2),  # rows of one fixed shape
        ([(1, 1)], sys.maxsize, 2, 1),
    ],
)
def test_one_micro_batch_when_all_cores_had_better_share_it(
    requests: list[tuple[int, int]], budget: int, workers: int, count: int
) -> None:
    batches = ort_runner.form_micro_batches(
        tickets(*requests), budget=budget, workers=workers, separable=True
    )
    assert len(batches) == count


def test_token_budget_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ort_sessions.TOKEN_BUDGET_VARIABLE, raising=False)
    assert ort_sessions.token_budget({}) == 128
    monkeypatch.setenv(ort_sessions.TOKEN_BUDGET_VARIABLE, "64")
    assert ort_sessions.token_budget({}) == 64
    own: Any = {"parameters": {"token_budget": {"string_value": "192"}}}
    assert ort_sessions.token_budget(own) == 192
    monkeypatch.setenv(ort_sessions.TOKEN_BUDGET_VARIABLE, "much")
    with pytest.raises(contracts.ContractError, match="must be a number of tokens"):
        ort_sessions.token_budget({})


def test_rows_that_left_their_request_are_described_by_themselves() -> None:
    contract = contracts.parse_contract(packed_contract(), backend="onnxruntime")
    requests: list[feeds.Feed] = [
        {"input_ids": np.arange(6, dtype=np.int32).reshape(3, 2), "row_length": np.ones((3, 1))},
        {"input_ids": np.arange(10, 14, dtype=np.int32)[None], "row_length": np.ones((1, 1))},
    ]
    first, second = (feeds.new_ticket(contract, None, inputs) for inputs in requests)
    assert (first.rows, first.row_cost, second.rows, second.row_cost) == (3, 2, 1, 4)
    feed = feeds.build_feed(contract, [feeds.Part(first, 1, 3), feeds.Part(second, 0, 1)])
    assert feed["input_ids"].tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert feed["row_stride"].tolist() == [2, 2, 4]
    assert feed["row_stride"].dtype == np.int32
    assert feed["row_length"].shape == (3, 1)


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
        (settings(share_session_between_instances="maybe"), "CPU", "'maybe' to boolean"),
    ],
)
def test_settings_refuse(config: Any, kind: str, message: str) -> None:
    ort_sessions.check_settings(settings(share_session_between_instances="TRUE"), kind="CPU")
    with pytest.raises(contracts.ContractError) as refusal:
        ort_sessions.check_settings(config, kind=kind)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"inter_op_thread_count": "two"}, "failed to convert 'two' to integral number"),
        ({"enable_mem_arena": "2"}, "failed to convert '2' to boolean"),
        ({"execution_mode": "2"}, "Expected values for execution_mode are 0 or 1 but got 2"),
    ],
)
def test_parameters_refuse(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "", {"1/model.onnx": PADDED})
    path = contracts.model_file(tmp_path / "model" / "1", settings(), "model.onnx")
    for threads in ([1], [1, 2]):
        with pytest.raises(contracts.ContractError, match=message):
            ort_sessions.open_sessions(path, settings(**parameters), threads=threads)


def test_sessions_on_one_copy_of_the_weights_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", "", {"1/model.onnx": PACKED})
    path = contracts.model_file(tmp_path / "model" / "1", settings(), "model.onnx")
    feed = {
        "tokens": np.array([1, 2, 3, 4, 5], np.int32),
        "length": np.array([[2], [2]], np.int32),
        "stride": np.array([3, 2], np.int32),
    }
    expected = ort_sessions.open_session(path, settings(), threads=1).run(None, feed)
    for folder in (tmp_path, tmp_path / "missing"):  # without a place to write, they still open
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        first, second = ort_sessions.open_sessions(path, settings(), threads=(2, 1))
        for session in (first, second):
            for value, wanted in zip(session.run(None, feed), expected, strict=True):
                np.testing.assert_array_equal(value, wanted)
        assert first.get_session_options().intra_op_num_threads == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_initializers_of_odd_sizes_do_not_misalign_packed_weights(tmp_path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    generator = np.random.default_rng(0)
    sizes = {"odd": (1, 1002), "w": (1002, 64), "odder": (1, 518), "v": (64, 518)}
    values = {name: generator.random(size, np.float32) for name, size in sizes.items()}
    nodes = [
        ("Add", "x", "odd"),
        ("MatMul", "s0", "w"),
        ("MatMul", "s1", "v"),
        ("Add", "s2", "odder"),
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, [a, b], [f"s{i}"]) for i, (kind, a, b) in enumerate(nodes)],
        "odd",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 1002])],
        [helper.make_tensor_value_info("s3", onnx.TensorProto.FLOAT, ["rows", 518])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    path = tmp_path / "model.onnx"
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    ort_sessions._write_packed(path, tmp_path / "packed.onnx", settings(), smallest_bytes=1024)
    assert not ort_sessions._is_aligned(tmp_path / "packed.onnx")  # what would crash
    x = generator.random((7, 1002), np.float32)
    wanted = (x + values["odd"]) @ values["w"] @ values["v"] + values["odder"]
    for session in ort_sessions.open_sessions(path, settings(), threads=(2, 1)):
        assert np.allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-4)
