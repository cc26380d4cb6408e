"""Configs of cores and what `inspect` says, compared with files that were read and found right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, write_pipeline
from plan_cases import facts
from triptych.base.errors import UserError
from triptych.base.releases import parse_release, without_newer_fields
from triptych.interface.cli.plan_text import describe_plan
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
OPTIONS = "{memory_limit_mib: 2, arena: as_requested, convolution_search: default"
TENSORRT_OPTIONS = (
    ", workspace_mib: 3, engine_cache: false, optimization_level: 4"
    ", min_subgraph_size: 5, share_context_memory: true, layer_norm_fp32: true"
)
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
    "contexts_24.10": [
        "core.backend=tensorrt",
        "core.layout=bucketed",
        "core.bucket_count=2",
        "core.engine.context_memory=on_profile_change",
        "serving.max_inflight_requests=8",
    ],
    "contexts_26.08": [
        "core.backend=tensorrt",
        "core.engine.context_memory=on_profile_change",
        "serving.max_inflight_requests=8",
        "serving.triton='26.08'",
    ],
    "onnxruntime_cuda": ["core.device=gpu", "serving.gpus=all", "serving.flow_control=triton"],
    "onnxruntime_cpu": ["serving.flow_control=none", "serving.response_cache=true"],
    "onnxruntime_session": [
        "core.threads=3",
        "core.session={inter_threads: 2, memory_arena: none, memory_pattern: true}",
        "serving.priority={levels: 3, default: 2}",
        "serving.versions=[6, 7]",
        "serving.queue.max_backlog_ms=700",
    ],
    "onnxruntime_cuda_options": ["core.device=gpu", f"core.accelerator_options={OPTIONS}}}"],
    "onnxruntime_tensorrt_options": [
        "core.device=gpu",
        "core.accelerator=tensorrt",
        f"core.accelerator_options={OPTIONS}{TENSORRT_OPTIONS}}}",
    ],
    "openvino": [
        "core.backend=openvino",
        "core.precision=bf16",
        "core.threads=3",
        "core.bucket_count=2",
        "serving.instances.core=2",
        "serving.queue.timeout_ms=9",
    ],
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
def test_config_and_inspect_are_as_they_were_read_and_found_right(
    tmp_path: Path, case: str, rewrite: bool
) -> None:
    plan = plan_of(tmp_path, CASES[case])
    text = print_config(core_config(plan), explain(plan, "core"))
    described = json.dumps(describe_plan(plan), indent=1, ensure_ascii=False) + "\n"
    for name, content in ((f"{case}.pbtxt", text), (f"{case}.json", described)):
        if rewrite:
            (CONFIGS / name).write_text(content, encoding="utf-8")
        assert content == (CONFIGS / name).read_text(encoding="utf-8"), name
    assert parse_config(text) == core_config(plan)


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
