"""Tests of the emulated backends without a server: refusals, feeds, sessions and settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend_models import PADDED, SCALARS, write_graphs
from triptych.serving.backends import contract as contracts
from triptych.serving.backends import feeds
from triptych.serving.backends.onnxruntime import ort_sessions
from triptych.serving.backends.tensorrt import trt_settings
from triptych.spec.engine_plan import GraphSpec, ShapeRange

PACKED_INPUTS = {
    "input_ids": ("TYPE_INT32", (-1,)),
    "row_length": ("TYPE_INT32", (-1, 1)),
    "row_stride": ("TYPE_INT32", (-1,)),
}
PACKED_OUTPUTS = {"embedding": ("TYPE_FP32", (-1, 384))}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


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


def parsed(backend: str = "onnxruntime", **changes: Any) -> contracts.Contract:
    """The contract of a packed core's config; `changes` override its fields."""
    config: Any = {
        "name": "core",
        "max_batch_size": 32,
        "input": [RAGGED, LENGTH],
        "output": [entry("embedding", "TYPE_FP32", [384])],
        "batch_input": [STRIDE],
        **changes,
    }
    return contracts.parse_contract(config, backend=backend)


def check(contract: contracts.Contract, inputs: Tensors, outputs: Tensors) -> None:
    contracts.check_model(
        contract,
        *(
            [contracts.ModelTensor(name, *t) for name, t in side.items()]
            for side in (inputs, outputs)
        ),
    )


MORE = {"more": ("TYPE_INT32", (-1,))}
TWO_TARGETS = {"batch_input": [{**STRIDE, "target_name": ["row_stride", "more"]}]}
NO_LENGTH = {name: PACKED_INPUTS[name] for name in ("input_ids", "row_stride")}
OPTIONAL = {"input": [RAGGED, {**LENGTH, "optional": True}]}
REFUSED: Sequence[tuple[str, Mapping[str, Any], Tensors, str]] = (
    # The backend, changes of the config, changes of the model's tensors, and words of the error.
    # changes of the config, or changes of the model's tensors
    (
        "both",
        {"batch_input": []},
        {},
        "inputs input_ids, row_length, the model has input_ids, row_",
    ),
    (
        "both",
        {},
        MORE,
        "the inputs input_ids, row_length, row_stride, the model has input_ids, more",
    ),
    ("onnxruntime", TWO_TARGETS, MORE, "each batch input must have one target"),
    (
        "both",
        {},
        {"input_ids": ("TYPE_INT32", (-1, -1))},
        "'input_ids' is TYPE_INT32 [-1] in the config and TYPE_INT32 [-1,-1] in the model",
    ),
    (
        "onnxruntime",
        {},
        {"row_length": ("TYPE_INT32", (8, 1))},
        "'row_length' is TYPE_INT32 [-1,1] in the config and TYPE_INT32 [8,1] in the model",
    ),
    (
        "onnxruntime",
        {},
        {"embedding": ("TYPE_FP32", (-1, -1))},
        "'embedding' is TYPE_FP32 [-1,384] in the config and TYPE_FP32 [-1,-1] in the model",
    ),
    (
        "both",
        {},
        {"embedding": ("TYPE_FP32", (-1, 200))},
        "'embedding' is TYPE_FP32 [-1,384] in the config and TYPE_FP32 [-1,200] in the model",
    ),
    (
        "both",
        {"input": [RAGGED, {**LENGTH, "data_type": "TYPE_INT64"}]},
        {},
        "'row_length' is TYPE_INT64 [-1,1] in the config and TYPE_INT32 [-1,1] in the model",
    ),
    (
        "both",
        {"output": [entry("embedding", "TYPE_FP16", [384])]},
        {},
        "'embedding' is TYPE_FP16",
    ),
    (
        "both",
        {"input": [RAGGED, {**LENGTH, "name": "length"}]},
        {},
        "describes the inputs input_ids, length, row_stride, the model has input_ids,",
    ),
    (
        "both",
        {"output": [entry("logits", "TYPE_FP32", [384])]},
        {},
        "describes the outputs logits, the model has embedding",
    ),
    (
        "tensorrt",  # an engine writes all of its outputs
        {},
        {"logits": ("TYPE_FP32", (-1, 2))},
        "describes the outputs embedding, the model has embedding, logits",
    ),
    (
        "both",
        {"batch_input": [{**STRIDE, "target_name": ["strides"]}]},
        {},
        "describes the inputs input_ids, row_length, strides, the model has",
    ),
    (
        "both",
        {"batch_input": [{**STRIDE, "kind": "BATCH_ITEM_SHAPE"}]},
        {},
        "'row_stride' is TYPE_INT32 [-1,-1] in the config and TYPE_INT32 [-1] in the model",
    ),
)


def test_contract_refuses() -> None:
    for backends, changes, tensors, message in REFUSED:
        outputs = {n: t for n, t in tensors.items() if n in ("embedding", "logits")}
        inputs = {n: t for n, t in tensors.items() if n not in outputs}
        for backend in ("onnxruntime", "tensorrt") if backends == "both" else (backends,):
            contract = parsed(backend, **changes)
            with pytest.raises(contracts.ContractError) as refusal:
                check(contract, {**PACKED_INPUTS, **inputs}, {**PACKED_OUTPUTS, **outputs})
            assert message in str(refusal.value), (backend, changes, tensors)


def test_contract_accepts_what_the_native_backends_accept() -> None:
    for backend in ("onnxruntime", "tensorrt"):
        check(parsed(backend), PACKED_INPUTS, PACKED_OUTPUTS)
    more_outputs = {**PACKED_OUTPUTS, "logits": ("TYPE_FP32", (-1, 2))}
    check(parsed("onnxruntime"), PACKED_INPUTS, more_outputs)
    check(parsed("tensorrt", **TWO_TARGETS), {**PACKED_INPUTS, **MORE}, PACKED_OUTPUTS)
    fixed = {**PACKED_INPUTS, "row_length": ("TYPE_INT32", (8, 1))}
    check(parsed("tensorrt"), fixed, {"embedding": ("TYPE_FP32", (-1, -1))})


def test_an_input_that_the_model_lacks_cannot_be_optional() -> None:
    for backend in ("onnxruntime", "tensorrt"):
        with pytest.raises(contracts.ContractError, match="'row_length' cannot be optional"):
            check(parsed(backend, **OPTIONAL), NO_LENGTH, PACKED_OUTPUTS)


def test_sequences_are_refused() -> None:
    for backend in ("onnxruntime", "tensorrt"):
        with pytest.raises(contracts.ContractError, match=f"emulation of the {backend} backend"):
            parsed(backend, sequence_batching={})


def test_a_graph_without_tensors_is_refused() -> None:
    node = SimpleNamespace(name="embedding", type="seq(tensor(float))", shape=None)
    with pytest.raises(contracts.ContractError, match="unsupported ONNX type seq"):
        ort_sessions.read_tensors([node])


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
    feed = feeds.build_feed(parsed(), requests)
    assert feed["input_ids"].tolist() == [*range(6), *range(10, 14)]
    assert feed["row_stride"].tolist() == [2, 2, 2, 4]
    assert feed["row_stride"].dtype == np.int32
    assert feed["row_length"].shape == (4, 1)


def test_tokens_after_an_empty_request_are_not_copied() -> None:
    for lengths, by_onnxruntime, by_tensorrt in (
        ([2, 1], [1, 2, 3], [1, 2, 3]),
        ([2, 1, 0], [1, 2, 3], [1, 2, 3]),
        ([0, 2, 1], [0, 0, 0], [0, 0, 0]),
        ([2, 0, 1], [1, 2, 0], [1, 2, 0]),
        ([0, 2, 0], [1, 2], [0, 0]),
        ([0], [], []),
    ):
        for backend, tokens in (("onnxruntime", by_onnxruntime), ("tensorrt", by_tensorrt)):
            feed = feeds.build_feed(parsed(backend), packed_rows(*lengths))
            assert feed["input_ids"].tolist() == tokens, (backend, lengths)
            assert feed["row_stride"].tolist() == lengths


def test_a_longest_row_is_a_shape_without_contents() -> None:
    for backend, data_type, content in (
        ("onnxruntime", "TYPE_INT32", -(2**31)),
        ("onnxruntime", "TYPE_FP32", np.nan),
        ("tensorrt", "TYPE_INT32", 0),
        ("tensorrt", "TYPE_FP32", 0),
    ):
        kind = {"kind": "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "data_type": data_type}
        contract = parsed(backend, batch_input=[{**STRIDE, **kind}])
        longest = feeds.build_feed(contract, packed_rows(2, 3, 1))["row_stride"]
        np.testing.assert_array_equal(longest, [content] * 3)


def test_an_output_with_too_few_rows_fails_the_requests_beyond_its_end() -> None:
    values = {"embedding": np.arange(2)[:, None]}
    first, second, third, fourth = feeds.split_outputs(parsed(), values, packed_rows(2, 3, 1, 4))
    assert not isinstance(first, feeds.SplitError)
    assert not isinstance(second, feeds.SplitError)
    assert (first["embedding"].item(), second["embedding"].item()) == (0, 1)
    assert str(third).endswith("expected batch size of at least 3 in model output, got 2")
    assert str(fourth).endswith("expected batch size of at least 4 in model output, got 2")


def scattered(dims: Sequence[int]) -> dict[str, Any]:
    """Return a change of the config: an output with these dims, scattered like the tokens."""
    target = {"target_name": ["embedding"], "source_input": ["input_ids"]}
    return {
        "output": [entry("embedding", "TYPE_FP32", dims)],
        "batch_output": [{"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", **target}],
    }


def test_a_scattered_output_has_no_more_variable_dimensions_than_its_source() -> None:
    parsed(**scattered([-1, 2]))
    for backend in ("onnxruntime", "tensorrt"):
        with pytest.raises(contracts.ContractError, match="'embedding' has more variable dim"):
            parsed(backend, **scattered([-1, -1]))


def test_a_scattered_output_that_is_too_small_fails_the_whole_batch() -> None:
    contract = parsed(**scattered([-1]))
    shares: Any = feeds.split_outputs(contract, {"embedding": np.arange(5)}, packed_rows(2, 3))
    assert [share["embedding"].tolist() for share in shares] == [[[0, 1]], [[2, 3, 4]]]
    with pytest.raises(feeds.SplitError, match="expected at least 5 elements in model output, got"):
        feeds.split_outputs(contract, {"embedding": np.arange(4)}, packed_rows(2, 3))


def test_a_config_of_a_graph_without_a_batch_dimension_is_completed(tmp_path: Path) -> None:
    write_graphs(tmp_path / "model", "", {"1/model.onnx": SCALARS})
    session = ort_sessions.open_session(tmp_path / "model/1/model.onnx", settings())
    config: Any = {"name": "core", "max_batch_size": 0}
    sides = (session.get_inputs(), session.get_outputs())
    ort_sessions.complete_config(config, *map(ort_sessions.read_tensors, sides))
    assert (config["max_batch_size"], "dynamic_batching" in config) == (0, False)
    assert [(t["name"], t["dims"]) for t in config["input"]] == [("factor", [1]), ("x", [-1])]
    assert [(t["name"], t["dims"]) for t in config["output"]] == [("top", [1]), ("y", [-1])]


def settings(**parameters: str) -> Any:
    """A ModelConfig with these parameters."""
    return {
        "name": "core",
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def test_settings_refuse() -> None:
    ort_sessions.check_settings(settings(), kind="CPU")
    openvino = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    accelerated: Any = {**settings(), "optimization": {"execution_accelerators": openvino}}
    for config, kind, message in (
        (settings(), "GPU", "runs on the CPU only; use KIND_CPU or the native backend"),
        (accelerated, "CPU", "unknown Execution Accelerator 'openvino' is requested"),
    ):
        with pytest.raises(contracts.ContractError, match=message):
            ort_sessions.check_settings(config, kind=kind)


def open_padded(folder: Path, **parameters: str) -> Any:
    """Return the options of a session with these parameters."""
    write_graphs(folder / "model", "", {"1/model.onnx": PADDED})
    path = contracts.model_file(folder / "model" / "1", settings(), "model.onnx")
    return ort_sessions.open_session(path, settings(**parameters)).get_session_options()


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


def test_a_session_has_only_the_options_of_the_native_backend(tmp_path: Path) -> None:
    import onnxruntime

    usual = onnxruntime.SessionOptions()
    allocator = "session.use_device_allocator_for_initializers"
    plain = open_padded(tmp_path / "plain", share_session_between_instances="maybe")
    for name in ("intra_op_num_threads", "inter_op_num_threads", "enable_mem_pattern"):
        assert getattr(plain, name) == getattr(usual, name)
    for name in ("session.force_spinning_stop", "session.x64quantprecision", allocator):
        with pytest.raises(RuntimeError):
            plain.get_session_config_entry(name)
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


def engine_config(**fields: Any) -> Any:
    """A ModelConfig as Triton hands it to a backend: 64-bit numbers are texts."""
    return {"name": "core", "max_batch_size": 8, **fields}


def shapes(**dims: int) -> dict[str, Any]:
    return {name: {"dim": [str(dim)]} for name, dim in dims.items()}


def cuda(**fields: Any) -> Any:
    return engine_config(optimization={"cuda": {"graphs": True, **fields}})


def test_an_instance_uses_the_profiles_of_its_own_group() -> None:
    groups = [
        {"name": "core"},
        {"name": "fast", "profile": ["1"]},
        {"name": "fast_and_large", "profile": ["2", "0"]},
    ]
    config = engine_config(instance_group=groups)
    for instance, places in (("fast_0", [1]), ("fast_and_large_1", [2, 0]), ("core_0", [0])):
        assert trt_settings.instance_profiles(config, instance) == places
    named = engine_config(instance_group=[{"name": "core", "profile": ["long"]}])
    with pytest.raises(contracts.ContractError, match="unable to parse 'long'"):
        trt_settings.instance_profiles(named, "core_0")


def test_the_profiles_of_an_engine_hold_the_batches_of_the_config() -> None:
    profiles = [
        {
            "input_ids": ShapeRange((1, 1), (1, 8), (rows, 8)),
            "row_length": ShapeRange((1,), (1,), (9,)),
        }
        for rows in (4, 32)
    ]
    trt_settings.check_profiles(parsed("tensorrt", max_batch_size=9), profiles, [0, 1])
    for chosen, message in (
        ([0], "configuration specified max-batch 9 but TensorRT engine only supports max-batch 4"),
        ([0, 2], "invalid profile 2. Number of profiles supported by TensorRT engine: 2"),
    ):
        with pytest.raises(contracts.ContractError, match=message):
            trt_settings.check_profiles(parsed("tensorrt", max_batch_size=9), profiles, chosen)


def test_a_graph_with_a_lower_bound_takes_smaller_batches() -> None:
    graph = {"batch_size": 8, "input": shapes(input_ids=16)}
    bound = {"batch_size": 5, "input": shapes(input_ids=16)}
    bounded = {**graph, "graph_lower_bound": bound}
    specs = trt_settings.graph_specs(cuda(graph_spec=[graph, bounded]))
    assert specs == [GraphSpec(8, 8, {"input_ids": (16,)}), GraphSpec(8, 5, {"input_ids": (16,)})]
    shorter = {"batch_size": 5, "input": shapes(input_ids=2)}
    for wrong, message in (
        ({**graph, "batch_size": 9}, "has a batch size from 1 to max_batch_size 8, got 9"),
        ({**graph, "graph_lower_bound": shorter}, "gives other dims than its graph"),
    ):
        with pytest.raises(contracts.ContractError, match=message):
            trt_settings.graph_specs(cuda(graph_spec=[wrong]))


def test_graphs_are_captured_only_where_listed_and_on() -> None:
    assert trt_settings.graph_specs(cuda()) == []
    assert trt_settings.graph_specs(cuda(graphs=False, graph_spec=[{"batch_size": 1}])) == []


def test_memory_is_pinned_unless_turned_off() -> None:
    off = {"enable": False}
    for optimization, locked in (
        ({}, (True, True)),
        ({"input_pinned_memory": off}, (False, True)),
        ({"output_pinned_memory": off}, (True, False)),
    ):
        config = engine_config(optimization=optimization)
        assert trt_settings.pinned_memory(config) == locked


def test_an_instance_runs_on_its_gpu() -> None:
    for kind, device in (("GPU", 3), ("MODEL", 0)):
        assert trt_settings.instance_device(engine_config(), kind=kind, device_id="3") == device
    with pytest.raises(contracts.ContractError, match="supports only GPU device"):
        trt_settings.instance_device(engine_config(), kind="CPU", device_id="0")


def test_the_plan_is_the_file_that_the_config_names(tmp_path: Path) -> None:
    for name in ("model.plan", "other.plan"):
        (tmp_path / name).touch()
    assert trt_settings.plan_file(tmp_path, engine_config()).name == "model.plan"
    named = engine_config(default_model_filename="other.plan")
    assert trt_settings.plan_file(tmp_path, named).name == "other.plan"
    with pytest.raises(contracts.ContractError, match="unable to find"):
        trt_settings.plan_file(tmp_path, engine_config(default_model_filename="gone.plan"))
    with pytest.raises(contracts.ContractError, match="cc_model_filenames is not supported"):
        trt_settings.plan_file(tmp_path, engine_config(cc_model_filenames={"9.0": "other.plan"}))
