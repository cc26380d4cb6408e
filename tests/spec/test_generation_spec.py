"""What a user writes of a pipeline that generates text, and which precision suits which model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.generation_cases import write_adapter, write_pipeline, write_tiny_model
from tests.support.mistakes import check_refused, refusal
from triptych.building.generation.adapters import WEIGHTS, read_adapter
from triptych.building.generation.build import check_texts, make_text_manifest
from triptych.building.generation.gate import LIMITS, cause_of, limits_of
from triptych.building.generation.inputs import GenerationInputs, Prompt
from triptych.building.generation.model import (
    GenerationInfo,
    GenerationModel,
    Quantization,
    QuantizationConfig,
    check_precision,
    compressed_tensors_config,
    read_quantization,
)
from triptych.interface.cli.plan_text import describe_text_generation
from triptych.models.fields import ModelSource
from triptych.repository.manifest import (
    BuildManifest,
    CompiledManifest,
    TextManifest,
    find_manifest,
    read_manifest,
    with_time_of,
)
from triptych.repository.records import GateResult
from triptych.spec.generation_fields import (
    GenerationCore,
    GenerationSpec,
    KvCache,
    load_generation_spec,
)
from triptych.spec.spec import load_spec


def test_mistakes_in_a_spec_are_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "talk", tmp_path / "model")
    for override, said in (
        ("core.backend=onnxruntime", "one of vllm, tensorrt_llm"),
        ("core.max_num_seq=3", "Did you mean `max_num_seqs`?"),
        ("core.max_num_batched_tokens=16", "must be at least core.max_num_seqs"),
        ("core.token_delay_ms=1", "is not a field"),
        ("serving.stream_interval=0", "at least 1"),
        ("parameters.max_tokens=0", "parameters.max_tokens must be an integer from 1"),
        ("parameters.stops=a", "parameters.stops is not known"),
        ("adapters={a/b: x}", "should match pattern"),
        ("adapters={a: {source: x, rank: 8}}", "Given: rank. Remove it"),
        ("parameters.adapter=a", "is not an adapter of the pipeline. Given: a"),
        ("parameters.priority=2", "is the level of requests that give none"),
        ("serving.priority={levels: 2, default: 3}", "default must be at most levels (2)"),
        ("serving.triton='24.01'", "serving.triton` is not valid: must be 24.10 or later"),
    ):
        check_refused(said, load_generation_spec, folder, [override])
    both = ["core.backend=tensorrt_llm", "adapters={a: x}"]
    words = "`adapters` are only supported for core.backend vllm"
    check_refused(words, load_generation_spec, folder, both)
    both = ["core.backend=tensorrt_llm", "serving.priority={levels: 2}"]
    words = "`serving.priority` is only supported for core.backend vllm"
    check_refused(words, load_generation_spec, folder, both)
    levels = load_generation_spec(folder, ["serving.priority={levels: 3}"])
    assert (levels.priority_levels, levels.own_parameters["priority"]) == (3, 3)
    check_refused("Given: text-generation. Use test, inspect, build", load_spec, folder)


def test_an_adapter_is_a_plain_lora_of_the_models_sizes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    sizes = {"self_attn.q_proj": (16, 16), "self_attn.v_proj": (16, 16), "mlp.down_proj": (32, 16)}
    modules = {f"model.layers.{n}.{name}": size for n in (0, 1) for name, size in sizes.items()}
    every = tuple(sizes)
    found = read_adapter("a", write_adapter(tmp_path / "a", model, modules=every), modules)
    assert (found.rank, found.scale) == (4, 2.0)
    rooted = write_adapter(tmp_path / "b", model, use_rslora=True)
    assert read_adapter("b", rooted, modules).scale == 4.0
    assert read_adapter("b", rooted, modules).sha256 != found.sha256
    other = {**modules, "model.layers.1.self_attn.v_proj": (16, 8)}
    gone = {name: size for name, size in modules.items() if not name.startswith("model.layers.1")}
    faults: tuple[tuple[dict[str, Any], dict[str, tuple[int, int]], str], ...] = (
        ({"peft_type": "IA3"}, modules, "must be an adapter of peft_type LORA. Given: IA3"),
        ({"use_dora": True, "bias": "all"}, modules, "Given: use_dora, bias. Merge it"),
        ({"init_lora_weights": "pissa"}, modules, "Given: init_lora_weights pissa"),
        ({"alpha_pattern": {"q_proj": 1}}, modules, "Given: alpha_pattern"),
        ({"r": 600}, modules, "a rank r between 1 and 512. Given: 600"),
        ({"r": 8}, modules, "lora_A of model.layers.0.self_attn.q_proj [8, 16]"),
        ({"lora_alpha": None}, modules, "a finite number as lora_alpha"),
        ({}, other, "lora_B of model.layers.1.self_attn.v_proj [8, 4]. Given: [16, 4]"),
        ({}, gone, "Given: model.layers.1.self_attn.q_proj. Did you mean"),
    )
    for number, (settings, known, said) in enumerate(faults):
        folder = write_adapter(tmp_path / f"bad{number}", model, **settings)
        error = refusal(read_adapter, "a", folder, known)
        assert error.field == "adapters.a"
        assert said in error.message, error.message
    tensor = np.zeros((4, 16), np.float32)
    for key, said in (
        ("base_model.model.lm_head.weight", "must only have tensors lora_A and lora_B"),
        (f"base_model.model.{next(iter(modules))}.lora_A.weight", "Given: one of them for"),
    ):
        save_file({key: tensor}, tmp_path / "b" / WEIGHTS)
        check_refused(said, read_adapter, "b", tmp_path / "b", modules)
    (tmp_path / "b" / WEIGHTS).write_bytes(b"pickled")
    check_refused("must have valid safetensors", read_adapter, "b", tmp_path / "b", modules)
    (tmp_path / "b" / WEIGHTS).unlink()
    words = f"b: no {WEIGHTS}. Name the folder"
    check_refused(words, read_adapter, "b", tmp_path / "b", modules)


def test_a_folder_is_checked_without_a_model(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "talk", tmp_path / "model")
    spec = load_generation_spec(folder)
    assert [check.name for check in check_texts(spec)] == ["spec", "traffic"]
    (folder / "hooks.py").touch()
    (folder / "eval.jsonl").write_text('{"text_input": "a", "answers": ["b"]}')
    with (folder / "traffic.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user"}]}')
    found = {check.name: check for check in check_texts(spec)}
    assert (found["eval"].note, found["hooks"].severity) == ("1 rows", "warning")
    assert "traffic.jsonl:4: `messages[0]` must be" in found["messages"].note
    for row in ("{}", '{"text_input": "a"}', '{"text_input": "a", "answers": []}'):
        (folder / "eval.jsonl").write_text(row)
        check_refused("eval.jsonl:1", check_texts, spec)
    (folder / "eval.jsonl").unlink()
    (folder / "traffic.jsonl").write_text('{"text_input": "a", "max_tokens": 5}')
    check_refused(
        "traffic.jsonl:1: max_tokens` is no part", check_texts, load_generation_spec(folder)
    )


FACTS = GenerationInfo("", "LlamaForCausalLM", 64, (1,), {}, 1000, 2, vocabulary=300)
W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
}


def inputs(quantized: Quantization | None, **core: Any) -> GenerationInputs:
    spec = GenerationSpec(
        name="chat",
        task="text-generation",
        model=ModelSource(source="model"),
        core=GenerationCore(**core),
    )
    model = GenerationModel(replace(FACTS, quantization=quantized), Path(), None)
    return GenerationInputs(spec, model, Path(), 64, ())


def test_what_a_model_says_of_its_weights_is_named() -> None:
    for config, name, words in (
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", "4 bits, groups of 128"),
        ({"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64}, "awq", "4 bits, groups of 64"),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            "gptq",
            "8 bits, a scale a channel",
        ),
        (compressed_tensors_config("int8"), "int8", "compressed-tensors: int8"),
        (compressed_tensors_config("fp8"), "fp8", "compressed-tensors: fp8"),
        (W4A16, "compressed-tensors", "int4 weights alone"),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4"),
    ):
        found = read_quantization(cast(QuantizationConfig, config))
        assert found is not None
        assert found.name == name, config
        assert words in found.words, config
    assert read_quantization(None) is read_quantization({}) is None


def test_a_precision_that_does_not_suit_the_weights_is_refused_in_words() -> None:
    awq, other = Quantization("awq", "awq: 4 bits"), Quantization("mxfp4", "mxfp4")
    for precision, stored in (
        *((name, None) for name in ("fp32", "fp16", "bf16", "int8", "fp8")),
        *((name, awq) for name in ("awq", "fp16", "bf16")),
        *((name, other) for name in ("fp16", "bf16")),
    ):
        check_precision(precision, stored, backend="vllm")
    for precision, stored, words in (
        ("awq", None, "requires a model with weights of that format"),
        ("gptq", awq, "must be awq or one of fp16, bf16"),
        ("int8", awq, "already quantized. Given: int8, and awq: 4 bits. Set core.precision: awq"),
        ("fp32", other, "must be one of fp16, bf16"),
    ):
        assert words in refusal(check_precision, precision, stored, backend="vllm").message
    error = refusal(check_precision, "bf16", awq, backend="tensorrt_llm")
    assert "must be vllm" in error.message
    for core in ({"precision": "int8"}, {"kv_cache": {"dtype": "fp8"}}):
        with pytest.raises(ValueError, match="never tested"):
            GenerationCore.model_validate({"backend": "tensorrt_llm", **core})


def test_a_token_takes_what_the_kv_cache_is_stored_in() -> None:
    fp8 = KvCache(dtype="fp8")
    for core, size in (
        ({"precision": "fp32"}, 4000),
        ({"precision": "bf16"}, 2000),
        ({"precision": "int8"}, 2000),
        ({"precision": "awq"}, 2000),
        ({"precision": "fp32", "kv_cache": fp8}, 1000),
    ):
        assert inputs(None, **core).kv_token_bytes == size, core


def test_the_limits_are_those_of_what_is_rounded() -> None:
    w8a8 = Quantization("int8", "compressed-tensors: int8")
    assert inputs(None, precision="bf16").judged_as == "bf16"
    assert inputs(w8a8, precision="fp16").judged_as == "int8"
    assert inputs(Quantization("awq", "awq"), precision="awq").judged_as == "bf16"
    both = inputs(None, precision="fp32", kv_cache=KvCache(dtype="fp8")).judged_as
    assert both == "fp32+fp8kv"
    assert limits_of("int8") == LIMITS["int8"]
    wider = limits_of(both)
    assert "exact_prefix" in LIMITS["fp32"]
    assert not wider.keys() & {"exact_prefix", "invariance"}
    assert wider["logprob_difference"] > LIMITS["fp32"]["logprob_difference"]
    assert limits_of("int8+fp8kv")["logprob_difference"] >= LIMITS["int8"]["logprob_difference"]


def test_the_manifest_of_generated_text_is_read_back(
    tmp_path: Path,
) -> None:
    gate = GateResult(cast("Any", "fp8+fp8kv"), 3, 0, True, (), ())
    prompts = (Prompt({"text_input": "a"}, (1, 2)),)
    quantized = replace(inputs(Quantization("fp8", "fp8")), prompts=prompts)
    assert describe_text_generation(quantized)["model"]["weights"] == "fp8"
    manifest = make_text_manifest(quantized, gate, {"chat/1/a": "0"})
    file = tmp_path / "chat/triptych.lock.json"
    file.parent.mkdir()
    file.write_bytes(manifest.as_bytes())
    assert read_manifest(tmp_path, "chat", BuildManifest) == manifest
    later = replace(manifest, built_at="2030-01-01T00:00:00+00:00")
    plain = json.loads(manifest.as_bytes())
    assert plain["quantization"] == {"name": "fp8", "words": "fp8"}
    previous = read_manifest(tmp_path, "chat", TextManifest)
    assert with_time_of(later, previous) == manifest
    assert with_time_of(replace(later, files={}), previous).built_at == later.built_at
    other = CompiledManifest
    check_refused("is not supported by this command", read_manifest, tmp_path, "chat", other)
    spec = {**plain["spec"], "core": {"backend": "x"}}
    for change, words in (
        ({"schema": 4}, ["has another schema than 5. Given: 4. Run `triptych build chat` again"]),
        ({"core_key": ""}, ["is not a build manifest", "core_key: Unexpected keyword argument"]),
        ({"spec": spec}, ["spec.text-generation.core.backend"]),
    ):
        file.write_text(json.dumps({**plain, **change}))
        check_refused(words, read_manifest, tmp_path, "chat", BuildManifest)
        assert find_manifest(tmp_path, "chat", BuildManifest) is None


def test_an_engine_that_ends_is_quoted_with_what_ended_it() -> None:
    cause = "NotImplementedError: FP8 KV cache requires head_size divisible by 32 on CPU."
    told = (
        f"(EngineCore pid=7) ERROR 11-23 05:00:00 [core.py:99] {cause}\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
    )
    assert cause_of(told) == cause
    assert cause_of("killed\n") == "killed"
