"""Tests of the emulated backends without a server: refusals, feeds, sessions and settings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.backend_models import PADDED, SCALARS, write_graphs
from triptych.serving.backends import feeds
from triptych.serving.backends.contract import (
    Contract,
    ContractError,
    ModelTensor,
    check_model,
    model_file,
    parse_contract,
)
from triptych.serving.backends.onnxruntime import ort_sessions
from triptych.serving.backends.tensorrt import trt_settings
from triptych.spec.engine_plan import GraphSpec, ShapeRange

ONNX, TENSORRT = ("onnxruntime",), ("tensorrt",)
BOTH = ONNX + TENSORRT
IDS, LENGTHS = ("TYPE_INT32", (-1,)), ("TYPE_INT32", (-1, 1))
INPUTS = {"input_ids": IDS, "row_length": LENGTHS, "row_stride": IDS}
OUTPUTS = {"embedding": ("TYPE_FP32", (-1, 384))}
LOGITS = {"logits": ("TYPE_FP32", (-1, 2))}
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


def parsed(backend: str = "onnxruntime", **changes: Any) -> Contract:
    """The contract of a packed core's config; `changes` override its fields."""
    config: Any = {
        "name": "core",
        "max_batch_size": 32,
        "input": [RAGGED, LENGTH],
        "output": [entry("embedding", "TYPE_FP32", [384])],
        "batch_input": [STRIDE],
        **changes,
    }
    return parse_contract(config, backend=backend)


def check(contract: Contract, inputs: Tensors = INPUTS, outputs: Tensors = OUTPUTS) -> None:
    """Compare a config with a model of these tensors."""
    sides = ([ModelTensor(name, *t) for name, t in side.items()] for side in (inputs, outputs))
    check_model(contract, *sides)


def scattered(dims: Sequence[int]) -> dict[str, Any]:
    """Return a change of the config: an output with these dims, scattered like the tokens."""
    target = {"target_name": ["embedding"], "source_input": ["input_ids"]}
    return {
        "output": [entry("embedding", "TYPE_FP32", dims)],
        "batch_output": [{"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", **target}],
    }


TWO_TARGETS = {"batch_input": [{**STRIDE, "target_name": ["row_stride", "more"]}]}
REFUSED: Sequence[tuple[Sequence[str], Mapping[str, Any], Tensors, str]] = (
    # Backends, changes of the config, changes of the model's tensors, words of the error.
    (BOTH, {"batch_input": []}, {}, "inputs input_ids, row_length, the model has input_ids, row_"),
    (BOTH, {}, {"more": IDS}, "input_ids, row_length, row_stride, the model has input_ids, more"),
    (BOTH, {"output": [entry("logits", "TYPE_FP32", [384])]}, {}, "outputs logits, the model has"),
    # An engine writes all of its outputs.
    (TENSORRT, {}, LOGITS, "the outputs embedding, the model has embedding, logits"),
    (ONNX, TWO_TARGETS, {"more": IDS}, "each batch input must have one target"),
    (BOTH, {}, {"input_ids": LENGTHS}, "'input_ids' is TYPE_INT32 [-1] in the config and TYPE_"),
    (ONNX, {}, {"row_length": ("TYPE_INT32", (8, 1))}, "[-1,1] in the config and TYPE_INT32 [8,1]"),
    (ONNX, {}, {"embedding": ("TYPE_FP32", (-1, -1))}, "config and TYPE_FP32 [-1,-1] in the model"),
    (BOTH, {}, {"embedding": ("TYPE_FP32", (-1, 200))}, "'embedding' is TYPE_FP32 [-1,384] in"),
    (
        BOTH,
        {"input": [RAGGED, {**LENGTH, "data_type": "TYPE_INT64"}]},
        {},
        "is TYPE_INT64 [-1,1] in",
    ),
    (BOTH, {"output": [entry("embedding", "TYPE_FP16", [384])]}, {}, "'embedding' is TYPE_FP16"),
    (BOTH, {"batch_input": [{**STRIDE, "kind": "BATCH_ITEM_SHAPE"}]}, {}, "TYPE_INT32 [-1,-1] in"),
    (BOTH, {"sequence_batching": {}}, {}, "use dynamic_batching or the native backend"),
    (BOTH, scattered([-1, -1]), {}, "'embedding' has more variable dimensions"),
)


def test_a_contract_refuses_what_the_native_backends_refuse() -> None:
    for backends, changes, tensors, message in REFUSED:
        outputs = {n: t for n, t in tensors.items() if n in ("embedding", "logits")}
        inputs = {n: t for n, t in tensors.items() if n not in outputs}
        for backend in backends:
            with pytest.raises(ContractError) as refusal:
                check(parsed(backend, **changes), {**INPUTS, **inputs}, {**OUTPUTS, **outputs})
            assert message in str(refusal.value), (backend, changes, tensors)
    optional = {"input": [RAGGED, {**LENGTH, "optional": True}]}
    for backend in BOTH:
        with pytest.raises(ContractError, match="'row_length' cannot be optional"):
            check(parsed(backend, **optional), {"input_ids": IDS, "row_stride": IDS})
    node = SimpleNamespace(name="embedding", type="seq(tensor(float))", shape=None)
    with pytest.raises(ContractError, match="unsupported ONNX type seq"):
        ort_sessions.read_tensors([node])


def test_a_contract_accepts_what_the_native_backends_accept() -> None:
    for backend in BOTH:
        check(parsed(backend))
        parsed(backend, **scattered([-1, 2]))
    check(parsed("onnxruntime"), outputs={**OUTPUTS, **LOGITS})
    check(parsed("tensorrt", **TWO_TARGETS), {**INPUTS, "more": IDS})
    fixed = {**INPUTS, "row_length": ("TYPE_INT32", (8, 1))}
    check(parsed("tensorrt"), fixed, {"embedding": ("TYPE_FP32", (-1, -1))})


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


def test_each_kind_of_batch_input_describes_the_requests() -> None:
    nothing = [-(2**31)] * 3  # a longest row is a shape without contents
    for backend, kind, data_type, expected in (
        ("onnxruntime", "BATCH_ELEMENT_COUNT", "TYPE_INT32", [2, 3, 1]),
        ("tensorrt", "BATCH_ACCUMULATED_ELEMENT_COUNT", "TYPE_FP32", [2, 5, 6]),
        ("tensorrt", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "TYPE_INT32", [0, 2, 5, 6]),
        ("onnxruntime", "BATCH_ITEM_SHAPE", "TYPE_INT32", [[2], [3], [1]]),
        ("onnxruntime", "BATCH_ITEM_SHAPE_FLATTEN", "TYPE_INT32", [2, 3, 1]),
        ("onnxruntime", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_INT32", nothing),
        ("onnxruntime", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_FP32", [np.nan] * 3),
        ("tensorrt", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_INT32", [0, 0, 0]),
    ):
        description = {**STRIDE, "kind": kind, "data_type": data_type}
        contract = parsed(backend, batch_input=[description])
        values = feeds.build_feed(contract, packed_rows(2, 3, 1))["row_stride"]
        np.testing.assert_array_equal(values, expected, str(description))
        assert values.dtype == (np.float32 if data_type == "TYPE_FP32" else np.int32)


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
    return engine(parameters={key: {"string_value": value} for key, value in parameters.items()})


ALLOCATOR = "session.use_device_allocator_for_initializers"
THREADS = {"intra_op_thread_count": "3", "inter_op_thread_count": "2"}


def test_a_session_has_only_the_options_of_the_native_backend(tmp_path: Path) -> None:
    import onnxruntime

    write_graphs(tmp_path / "model", "", {"1/model.onnx": PADDED})
    path = model_file(tmp_path / "model" / "1", settings(), "model.onnx")

    def opened(**parameters: str) -> Any:
        return ort_sessions.open_session(path, settings(**parameters)).get_session_options()

    usual = onnxruntime.SessionOptions()
    plain = opened(share_session_between_instances="maybe")
    for name in ("intra_op_num_threads", "inter_op_num_threads", "enable_mem_pattern"):
        assert getattr(plain, name) == getattr(usual, name)
    for name in ("session.force_spinning_stop", "session.x64quantprecision", ALLOCATOR):
        with pytest.raises(RuntimeError):
            plain.get_session_config_entry(name)
    chosen = opened(**THREADS, **{"enable_mem_pattern": "off", ALLOCATOR: "1"})
    assert (chosen.intra_op_num_threads, chosen.inter_op_num_threads) == (3, 2)
    assert not chosen.enable_mem_pattern
    assert chosen.get_session_config_entry(ALLOCATOR) == "1"
    for name, value, message in (
        ("inter_op_thread_count", "two", "failed to convert 'two' to integral number"),
        ("intra_op_thread_count", "2147483648", "failed to convert '2147483648' to integral"),
        ("enable_mem_arena", "2", "failed to convert '2' to boolean"),
        ("execution_mode", "2", "Expected values for  execution_mode are 0 or 1 but got 2"),
    ):
        with pytest.raises(ContractError, match=message):
            opened(**{name: value})


def engine(**fields: Any) -> Any:
    """A ModelConfig as Triton hands it to a backend: 64-bit numbers are texts."""
    return {"name": "core", "max_batch_size": 8, **fields}


def graphs(*specs: Mapping[str, Any], on: bool = True) -> Any:
    """A ModelConfig with these CUDA graphs."""
    return engine(optimization={"cuda": {"graphs": on, "graph_spec": list(specs)}})


def tokens(count: int, rows: int, **more: Any) -> dict[str, Any]:
    """A CUDA graph of `rows` rows with so many tokens each."""
    return {"batch_size": rows, "input": {"input_ids": {"dim": [str(count)]}}, **more}


PLACES = {"fast": ["1"], "fast_and_large": ["2", "0"], "named": ["long"]}
NAMED = [{"name": name, "profile": profiles} for name, profiles in PLACES.items()]
GROUPS = engine(instance_group=[{"name": "core"}, *NAMED])
ROW_LENGTH = ShapeRange((1,), (1,), (9,))
PROFILES = [
    {"input_ids": ShapeRange((1, 1), (1, 8), (rows, 8)), "row_length": ROW_LENGTH}
    for rows in (4, 32)
]


def test_an_instance_has_the_gpu_the_profiles_and_the_graphs_of_its_config() -> None:
    for instance, places in (("fast_0", [1]), ("fast_and_large_1", [2, 0]), ("core_0", [0])):
        assert trt_settings.instance_profiles(GROUPS, instance) == places
    for kind, device in (("GPU", 3), ("MODEL", 0)):
        assert trt_settings.instance_device(engine(), kind=kind, device_id="3") == device
    trt_settings.check_profiles(parsed("tensorrt", max_batch_size=9), PROFILES, [0, 1])
    off = {"enable": False}
    for optimization, locked in (
        ({}, (True, True)),
        ({"input_pinned_memory": off}, (False, True)),
        ({"output_pinned_memory": off}, (True, False)),
    ):
        assert trt_settings.pinned_memory(engine(optimization=optimization)) == locked
    bounded = tokens(16, 8, graph_lower_bound=tokens(16, 5))
    assert trt_settings.graph_specs(graphs(tokens(16, 8), bounded)) == [
        GraphSpec(8, 8, {"input_ids": (16,)}),
        GraphSpec(8, 5, {"input_ids": (16,)}),
    ]
    assert trt_settings.graph_specs(graphs(on=True)) == []
    assert trt_settings.graph_specs(graphs(tokens(16, 8), on=False)) == []


def test_settings_that_a_backend_lacks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.plan").touch()
    named = engine(default_model_filename="other.plan")
    assert trt_settings.plan_file(tmp_path, named).name == "other.plan"
    ort_sessions.check_settings(settings(), kind="CPU")
    openvino = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    accelerated: Any = {**settings(), "optimization": {"execution_accelerators": openvino}}
    cuda = {"gpu_execution_accelerator": [{"name": "cuda", "parameters": {"use_tf32": "off"}}]}
    ignored: Any = {**settings(), "optimization": {"execution_accelerators": cuda}}
    ort_sessions.check_settings(ignored, kind="CPU")  # the native backend does not read it there
    nine = parsed("tensorrt", max_batch_size=9)
    shorter = tokens(16, 8, graph_lower_bound=tokens(2, 5))
    by_device = engine(cc_model_filenames={"9.0": "other.plan"})
    on_cpu, on_gpu = {"kind": "CPU"}, {"kind": "GPU"}
    refused: Sequence[tuple[str, Callable[..., object], Sequence[Any], Mapping[str, str]]] = (
        ("runs on the CPU only", ort_sessions.check_settings, [settings()], on_gpu),
        ("unknown Execution Accelerator", ort_sessions.check_settings, [accelerated], on_cpu),
        ("unable to find", trt_settings.plan_file, [tmp_path, engine()], {}),
        ("cc_model_filenames is not", trt_settings.plan_file, [tmp_path, by_device], {}),
        ("unable to parse 'long'", trt_settings.instance_profiles, [GROUPS, "named_0"], {}),
        ("only GPU", trt_settings.instance_device, [engine()], {**on_cpu, "device_id": "0"}),
        ("max-batch 9 but .* max-batch 4", trt_settings.check_profiles, [nine, PROFILES, [0]], {}),
        ("invalid profile 2.*: 2", trt_settings.check_profiles, [nine, PROFILES, [0, 2]], {}),
        ("got 9", trt_settings.graph_specs, [graphs(tokens(16, 9))], {}),
        ("other dims than its graph", trt_settings.graph_specs, [graphs(shorter)], {}),
    )
    for message, call, arguments, more in refused:
        with pytest.raises(ContractError, match=message):
            call(*arguments, **more)
