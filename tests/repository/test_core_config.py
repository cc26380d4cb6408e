"""The config of a GPU core, held against files that were read and found right once."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, write_pipeline
from plan_cases import facts
from triptych.base.errors import UserError
from triptych.base.releases import parse_release, without_newer_fields
from triptych.interface.cli.plan_text import describe_gpu, describe_plan
from triptych.repository.config import core_config, parse_config, print_config
from triptych.repository.config_comments import explain
from triptych.repository.render import render
from triptych.spec.plan import Plan, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.tasks.catalog import (
    TEXT_CLASSIFICATION,
    TEXT_EMBEDDING,
    TOKEN_CLASSIFICATION,
    ZERO_SHOT_CLASSIFICATION,
)
from triptych.spec.tasks.task import with_class_scores
from triptych.spec.traffic import Lengths

CONFIGS = ROOT / "tests/data/configs"
LENGTHS = Lengths.of([5, 9, 12, 17, 30], max_length=32)
CASES: dict[str, list[str]] = {
    "packed": ["core.backend=tensorrt", "core.precision=fp16"],
    "bucketed": ["core.backend=tensorrt", "core.layout=bucketed", "core.bucket_count=2"],
    "limits": [
        "core.backend=tensorrt",
        "serving.gpus=[0, 1]",
        "serving.instances.core=2",
        "serving.queue.max_delay_us=300",
        "serving.queue.timeout_ms=2000",
        "serving.transfers.eager_batching=true",
        "serving.transfers.pinned_output=false",
        "serving.transfers.output_copy_stream=false",
        "serving.transfers.gather_kernel_buffer_threshold=0",
        "serving.rate_limiter={priority: 2, resources: [{name: gpu-time, count: 3, shared: true}]}",
    ],
    "onnxruntime_cuda": ["core.device=gpu"],
    "onnxruntime_tensorrt": [
        "core.device=gpu",
        "core.accelerator=tensorrt",
        "core.precision=fp16",
        "core.layout=bucketed",
        "core.bucket_count=2",
    ],
}


def plan_of(folder: Path, overrides: list[str], **fields: Any) -> Plan:
    folder = write_pipeline(folder / "a", **fields)
    spec = load_spec(folder, ["core.max_batch_size=4", *overrides])
    return make_plan(spec, facts(max_length=32), TEXT_EMBEDDING, {}, LENGTHS)


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_as_it_was_read_and_found_right(
    tmp_path: Path, case: str, rewrite: bool
) -> None:
    plan = plan_of(tmp_path, CASES[case])
    text = print_config(core_config(plan), explain(plan, "core"))
    if rewrite:
        (CONFIGS / f"{case}.pbtxt").write_text(text, encoding="utf-8")
    assert text == (CONFIGS / f"{case}.pbtxt").read_text(encoding="utf-8")
    assert parse_config(text) == core_config(plan)


def test_all_gpus_are_those_that_the_server_sees(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ["core.device=gpu", "serving.gpus=all"])
    (group,) = core_config(plan).instance_group
    assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [])
    assert describe_gpu(plan)["gpus"].startswith("all: ")


def test_priorities_and_session_options_are_in_the_config_and_in_inspect(tmp_path: Path) -> None:
    given = ["serving.priority={levels: 3, default: 2}", "core.threads=3", "core.session="]
    given[-1] += "{inter_threads: 2, memory_arena: none, memory_pattern: true}"
    plan = plan_of(tmp_path, [*given, "serving.response_cache=true", "serving.versions=[6, 7]"])
    config = core_config(plan)
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "1",
    }
    batching = config.dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
    assert "# serving.priority.levels." in print_config(config, explain(plan, "core"))
    described = describe_plan(plan)["batching"]
    assert described["response_cache"].startswith("repeated requests")
    assert described["versions"] == "6, 7: 7 answers requests that name none"
    assert described["priority"].startswith("3 levels, 2 by default")
    assert described["session"] == "2 operators at a time, memory arena none, memory pattern yes"
    others = describe_plan(plan_of(tmp_path / "other", []))["batching"]
    assert not {"response_cache", "priority", "session", "versions"} & set(others)


def test_options_of_accelerators_are_those_of_the_backend(tmp_path: Path) -> None:
    options = "{memory_limit_mib: 2, arena: as_requested, convolution_search: default"
    of_tensorrt = ", workspace_mib: 3, engine_cache: false, optimization_level: 4"
    of_tensorrt += ", min_subgraph_size: 5, share_context_memory: true, layer_norm_fp32: true"
    of_cuda = {
        "gpu_mem_limit": str(2 * 2**20),
        "arena_extend_strategy": "1",
        "cudnn_conv_algo_search": "2",
    }
    cuda = core_config(
        plan_of(tmp_path / "cuda", ["core.device=gpu", f"core.accelerator_options={options}}}"])
    )
    given = ["core.device=gpu", "core.accelerator=tensorrt"]
    both = core_config(
        plan_of(tmp_path / "both", [*given, f"core.accelerator_options={options}{of_tensorrt}}}"])
    )
    for config in (cuda, both):
        assert {key: value.string_value for key, value in config.parameters.items()} == of_cuda
    assert not cuda.optimization.execution_accelerators.gpu_execution_accelerator
    (accelerator,) = both.optimization.execution_accelerators.gpu_execution_accelerator
    fixed = {key: text for key, text in accelerator.parameters.items() if "profile" not in key}
    assert fixed == {
        "max_workspace_size_bytes": str(3 * 2**20),
        "precision_mode": "FP32",
        "trt_builder_optimization_level": "4",
        "trt_context_memory_sharing_enable": "true",
        "trt_layer_norm_fp32_fallback": "true",
        "trt_min_subgraph_size": "5",
    }


def test_a_core_of_openvino_runs_each_request_alone(tmp_path: Path) -> None:
    given = ["core.backend=openvino", "core.precision=bf16", "serving.instances.core=2"]
    plan = plan_of(tmp_path, [*given, "core.threads=3"])
    config = core_config(plan)
    assert config.max_batch_size == 0
    assert config.default_model_filename == "model.onnx"
    assert not config.HasField("dynamic_batching")
    tensors = {t.name: list(t.dims) for t in (*config.input, *config.output)}
    assert tensors["input_ids"] == [-1, -1]
    assert all(dims[0] == -1 for dims in tensors.values())
    assert plan.spec.core.bucket_count == 32
    warm_up = config.model_warmup[0]
    assert warm_up.batch_size == 1
    assert list(warm_up.inputs["row_length"].dims) == [1, 1]
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "HINT_BF16": "YES",
        "INFERENCE_NUM_THREADS": "6",
        "NUM_STREAMS": "2",
        "PERFORMANCE_HINT": "THROUGHPUT",
    }
    limited = core_config(plan_of(tmp_path / "limited", [given[0], "serving.queue.timeout_ms=9"]))
    assert limited.dynamic_batching.default_queue_policy.default_timeout_microseconds == 9000


def test_inspect_tells_the_flow_control_and_its_limit(tmp_path: Path) -> None:
    cases = {
        ("triptych", "queue.max_backlog_ms=700"): "preprocess rejects .* for more than 700 ms, or",
        ("triton", "queue.timeout_ms=300"): "the queue of the core rejects .* more than 300 ms",
        ("triton", "triton='24.10'"): "the queue of the core rejects .* more than 5000 ms",
        ("none", "triton='24.10'"): "no request is rejected",
    }
    for number, ((choice, other), words) in enumerate(cases.items()):
        given = [f"serving.flow_control={choice}", f"serving.{other}"]
        described = describe_plan(plan_of(tmp_path / str(number), given))["batching"]
        assert re.match(f"{choice}: {words}", described["flow_control"]), described


def test_class_scores_need_all_classes_of_a_classification() -> None:
    info = facts(labels=tuple(map(str, range(100))), max_length=32)
    task = with_class_scores(TEXT_CLASSIFICATION, info)
    assert [tensor.dims for tensor in TEXT_CLASSIFICATION.core(info, {}).outputs] == [(64,)] * 2
    assert [tensor.dims for tensor in task.core(info, {}).outputs] == [(100,)] * 2
    assert (task.outputs[-1].name, task.outputs[-1].dims) == ("scores", (100,))
    assert task.settings(info)["class_scores"]
    for other in (TEXT_EMBEDDING, TOKEN_CLASSIFICATION, ZERO_SHOT_CLASSIFICATION):
        with pytest.raises(UserError, match="is only supported for text-classification"):
            with_class_scores(other, info)


def test_results_per_token_are_cut_up_again(tmp_path: Path) -> None:
    spec = load_spec(write_pipeline(tmp_path / "a"), ["core.backend=tensorrt"])
    tagged = facts(labels=("O", "B"), max_length=32)
    config = core_config(
        make_plan(spec, tagged, TOKEN_CLASSIFICATION, {"aggregation_strategy": "simple"}, LENGTHS)
    )
    # Of several targets of one `batch_output` Triton's backends answer the first alone.
    targets = [list(split.target_name) for split in config.batch_output]
    assert targets == [[output.name] for output in config.output]
    assert all(list(split.source_input) == ["input_ids"] for split in config.batch_output)


@pytest.mark.parametrize(("triton", "known"), [("25.04", False), ("25.05", True)])
def test_memory_of_contexts_is_found_anew_where_the_server_can(
    tmp_path: Path, triton: str, known: bool
) -> None:
    wanted = [*CASES["bucketed"], "core.engine.context_memory=on_profile_change"]
    plan = plan_of(tmp_path, wanted)
    assert plan.engine is not None
    assert "context_memory" not in plan.engine.options
    config = without_newer_fields(core_config(plan), parse_release(triton))
    strategies = [value.string_value for value in config.parameters.values()]
    assert strategies == ["ON_PROFILE_CHANGE"] * known


def configs_of(folder: Path, wanted: list[str]) -> dict[str, Any]:
    """File to config, of the pipeline ``a``."""
    files = render(
        replace(plan_of(folder, wanted)),
        core_file=folder / "model.onnx",
        tokenizer_file=None,
        hooks=None,
        question={"text": "x"},
        warm_ups=None,
    )
    texts = {path: text for path, text in files.items() if path.endswith(".pbtxt")}
    return {path: parse_config(text.decode()) for path, text in texts.items() if text}  # type: ignore[union-attr]


@pytest.mark.parametrize(("triton", "known"), [("25.10", False), ("25.11", True)])
def test_requests_in_each_step_are_limited_where_the_server_can(
    tmp_path: Path, triton: str, known: bool
) -> None:
    configs = configs_of(
        tmp_path, ["serving.max_inflight_requests=8", f"serving.triton='{triton}'"]
    )
    limits = {path: c.ensemble_scheduling.max_inflight_requests for path, c in configs.items()}
    assert limits["a/config.pbtxt"] == (8 if known else 0)
    # For the embedded server, where the config has what it lacks.
    assert limits.get("a/configs/24.10.pbtxt") == (0 if known else None)


def test_promised_latencies_are_edges_of_the_histogram_where_the_server_can(tmp_path: Path) -> None:
    slo = "serving.slo={p50_ms: 12.5, p99_ms: 50, p99_9_ms: 500}"
    known = configs_of(tmp_path / "known", [slo, "serving.triton='24.11'"])
    (control,) = known["a/config.pbtxt"].model_metrics.metric_control
    assert control.metric_identifier.family == "nv_inference_first_response_histogram_ms"
    assert control.histogram_options.buckets == [12.5, 50, 100, 500, 2000, 5000]
    steps = [c for path, c in known.items() if path != "a/config.pbtxt"]
    assert not any(config.HasField("model_metrics") for config in steps)
    for name, wanted in {
        "old": [slo],
        "none": ["serving.slo={throughput: 9}", "serving.triton='26.08'"],
    }.items():
        files = configs_of(tmp_path / name, wanted)
        assert not any(config.HasField("model_metrics") for config in files.values())
        assert "a/configs/24.10.pbtxt" not in files


def test_inspect_says_why_and_what_is_left_out(tmp_path: Path) -> None:
    wanted = [*CASES["bucketed"], "core.engine.context_memory=on_profile_change"]
    gpu = describe_gpu(plan_of(tmp_path / "old", [*wanted, "serving.max_inflight_requests=8"]))
    assert set(gpu["profiles"]) == {"0", "1"}
    assert gpu["cuda_graphs"].startswith("6 (1, 2, 4 rows of ")
    assert "24.10 does not support it (25.05 does)" in gpu["context_memory"]
    assert "24.10 does not support it (25.11 does)" in gpu["max_inflight_requests"]
    newer = describe_gpu(plan_of(tmp_path / "new", [*wanted, "serving.triton='26.08'"]))
    assert "does not know" not in newer["context_memory"]
    packed = describe_gpu(plan_of(tmp_path / "packed", CASES["packed"]))
    assert packed["cuda_graphs"].startswith("none: packed batches")
    assert "4 rows of 32 tokens" in packed["why_these_profiles"]
