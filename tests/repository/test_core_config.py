"""Configs of cores, what `inspect` says of them, and text of a spec that is merged into them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import check_refused, refusal
from tests.support.plan_cases import facts
from tests.support.project import ROOT, write_pipeline
from triptych.base.releases import parse_release, without_newer_fields
from triptych.core.inputs import check_cached_outputs, task_of
from triptych.interface.cli.plan_text import describe_plan
from triptych.repository.config import core_config, parse_config, print_config
from triptych.repository.config_comments import explain
from triptych.repository.config_text import GENERATED, check_config_texts, merge_config_text
from triptych.repository.render import CoreFiles, StepFiles, render
from triptych.spec.model_fields import load_model_spec
from triptych.spec.own_task import own_task
from triptych.spec.plan import Plan, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths
from triptych.tasks.catalog import (
    TASKS,
    text_classification,
    text_embedding,
    token_classification,
    zero_shot_classification,
)
from triptych.tasks.classes import with_class_scores

CONFIGS = ROOT / "tests/data/configs"
LENGTHS = Lengths.of([5, 9, 12, 17, 30], max_length=32)
OPTIONS = "{memory_limit_mib: 2, arena: as_requested, convolution_search: default, tf32: true"
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
    return make_plan(spec, facts(max_length=32), text_embedding.TASK, {}, LENGTHS)


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
    task = with_class_scores(text_classification.TASK, info)
    core = text_classification.TASK.core(info, {})
    assert [tensor.dims for tensor in core.outputs] == [(64,)] * 2
    assert [tensor.dims for tensor in task.core(info, {}).outputs] == [(100,)] * 2
    assert (task.outputs[-1].name, task.outputs[-1].dims) == ("scores", (100,))
    assert task.settings(info)["class_scores"]
    for other in (text_embedding.TASK, token_classification.TASK, zero_shot_classification.TASK):
        check_refused("is only supported for text-classification", with_class_scores, other, info)


def test_a_response_cache_needs_a_pipeline_with_one_output(tmp_path: Path) -> None:
    """Triton's key has no names of outputs, so a part of several would be stored as the whole."""
    cached = ["serving.response_cache=true"]
    allowed = {"text-embedding": "embedding", "token-classification": "entities"}
    allowed |= dict.fromkeys(("reranking", "late-interaction-reranking"), "score")
    for name, task in TASKS.items():
        folder = write_pipeline(tmp_path / name, task=name)
        check_cached_outputs(load_spec(folder), task)
        spec = load_spec(folder, cached)
        if name in allowed:
            check_cached_outputs(spec, task_of(spec))
            assert [tensor.name for tensor in task_of(spec).outputs] == [allowed[name]]
        else:
            error = refusal(check_cached_outputs, spec, task_of(spec))
            assert error.field == "serving.response_cache"
            assert error.given == ", ".join(tensor.name for tensor in task.outputs)
    added = [{"name": "language", "dtype": "BYTES", "dims": [1]}]
    spec = load_spec(write_pipeline(tmp_path / "added", outputs=added), cached)
    assert refusal(check_cached_outputs, spec, task_of(spec)).given == "embedding, language"
    # Requests of the pipeline cannot choose another output.
    rule = task_of(load_spec(tmp_path / "text-embedding", cached)).parameters(facts())["encoding"]
    assert rule.choices == ("float",)
    field = {"type": "float"}
    for names in (["y"], ["y", "z"]):
        fields = {"inputs": {"x": field}, "outputs": dict.fromkeys(names, field)}
        folder = write_pipeline(
            tmp_path / "-".join(names), task="model", model={"onnx": "a.onnx"}, **fields
        )
        own = load_model_spec(folder, cached)
        if names == ["y"]:
            check_cached_outputs(own, own_task(own))
        else:
            check_refused("one output", check_cached_outputs, own, own_task(own))


def test_memory_of_contexts_is_found_anew_where_the_server_can(tmp_path: Path) -> None:
    wanted = [*CASES["bucketed"], "core.engine.context_memory=on_profile_change"]
    plan = plan_of(tmp_path, wanted)
    assert plan.engine is not None
    assert "context_memory" not in plan.engine.options
    for triton, found in (("25.04", []), ("25.05", ["ON_PROFILE_CHANGE"])):
        config = without_newer_fields(core_config(plan), parse_release(triton))
        assert [value.string_value for value in config.parameters.values()] == found, triton


def configs_of(folder: Path, wanted: list[str]) -> dict[str, Any]:
    """File to config, of the pipeline ``a``."""
    plan = plan_of(folder, wanted)
    core = CoreFiles(plan, folder / "model.onnx", None)
    files = render(plan, [core], StepFiles(), question={"text": "x"})
    texts = {path: text for path, text in files.items() if path.endswith(".pbtxt")}
    return {path: parse_config(text.decode()) for path, text in texts.items() if text}  # type: ignore[union-attr]


def test_requests_in_each_step_are_limited_where_the_server_can(tmp_path: Path) -> None:
    for triton, limit, embedded in (("25.10", 0, None), ("25.11", 8, 0)):
        wanted = ["serving.max_inflight_requests=8", f"serving.triton='{triton}'"]
        configs = configs_of(tmp_path / triton, wanted)
        limits = {path: c.ensemble_scheduling.max_inflight_requests for path, c in configs.items()}
        assert limits["a/config.pbtxt"] == limit
        # For the embedded server, where the config has what it lacks.
        assert limits.get("a/configs/24.10.pbtxt") == embedded


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


CORE = """
name: "minilm_core" backend: "onnxruntime" max_batch_size: 32
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters { key: "enable_mem_pattern" value { string_value: "0" } }
"""


def test_a_text_is_merged_by_the_rules_of_protobuf() -> None:
    for text, expected in (
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
            CORE.replace("100 }", "100 priority_levels: 2 default_priority_level: 2 }"),
        ),
        (
            "dynamic_batching { max_queue_delay_microseconds: 7 }",
            CORE.replace("microseconds: 100", "microseconds: 7"),
        ),
        (
            'instance_group { count: 2 kind: KIND_CPU host_policy: "numa0" }',
            CORE.replace("count: 1", "count: 2").replace("_CPU", '_CPU host_policy: "numa0"'),
        ),
        *(
            (more, CORE + more)
            for more in (
                'parameters { key: "mine" value { string_value: "1" } }',
                "version_policy { specific { versions: [1, 3] } }",
            )
        ),
    ):
        config = parse_config(CORE)
        assert merge_config_text(config, {"core": text}, "core") == parse_config(expected), text
        # The generated config and other steps stay as they are.
        assert config == merge_config_text(config, {"ensemble": text}, "core") == parse_config(CORE)


def test_what_the_build_decides_cannot_be_set() -> None:
    for field in GENERATED:
        values = {"max_batch_size": ": 4", "ensemble_scheduling": " { }"}
        kinds = ("input", "output", "batch_input", "batch_output", "model_warmup", "response_cache")
        value = values.get(field, " { }" if field in kinds else ': "x"')
        error = refusal(check_config_texts, {"core": field + value})
        assert "must not set what is decided elsewhere" in error.message, field
        assert (error.field, error.given) == ("serving.config.core", field)
    own = {"core": 'parameters { key: "enable_mem_pattern" value { string_value: "1" } }'}
    error = refusal(merge_config_text, parse_config(CORE), own, "core")
    assert error.given == "parameters enable_mem_pattern"
    error = refusal(check_config_texts, {"preprocess": "dynamic_batching {\n  priority: 2\n}"})
    assert error.field == "serving.config.preprocess"
    assert "is not a ModelConfig" in error.message
    assert "2:3" in str(error.given)
    versions = "version_policy { all { } }"  # a shared core is configured by its owner
    check_config_texts({"ensemble": versions}, shares_core=True)
    error = refusal(check_config_texts, {"core": versions}, shares_core=True)
    assert "decided elsewhere" in error.message
