"""Which precision suits which model: what its files say of quantized weights, and the limits."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from mistakes import check_refused, refusal
from triptych.building.generation.build import make_text_manifest
from triptych.building.generation.gate import LIMITS, cause_of, limits_of
from triptych.building.generation.inputs import GenerationInputs, Prompt
from triptych.building.generation.model import (
    GenerationInfo,
    GenerationModel,
    Quantization,
    check_precision,
    compressed_tensors_config,
    read_quantization,
)
from triptych.interface.cli.plan_text import describe_text_generation
from triptych.repository.manifest import (
    BuildManifest,
    EncoderManifest,
    TextManifest,
    find_manifest,
    read_manifest,
    with_time_of,
)
from triptych.repository.records import GateResult
from triptych.spec.fields import ModelSource
from triptych.spec.generation_fields import GenerationCore, GenerationSpec, KvCache

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
        found = read_quantization(config)
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


def test_inspect_and_the_lock_name_quantized_weights() -> None:
    awq = Quantization("awq", "awq: weights of 4 bits, groups of 64")
    gate = GateResult("fp32", 0, 0, True, (), ())
    for quantized in (awq, None):
        found = replace(inputs(quantized), prompts=(Prompt({"text_input": "a"}, (1, 2)),))
        lock = json.loads(make_text_manifest(found, gate, {}).as_bytes())
        assert lock.get("quantization") == (None if quantized is None else asdict(awq))
        assert describe_text_generation(found, Path())["model"].get("weights") == (
            quantized and awq.words
        )


def test_the_manifest_of_generated_text_is_read_back_and_so_is_an_earlier_one(
    tmp_path: Path,
) -> None:
    gate = GateResult(cast("Any", "fp8+fp8kv"), 3, 0, True, (), ())
    prompts = (Prompt({"text_input": "a"}, (1, 2)),)
    manifest = make_text_manifest(
        replace(inputs(Quantization("fp8", "fp8")), prompts=prompts), gate, {"chat/1/a": "0"}
    )
    file = tmp_path / "chat/triptych.lock.json"
    file.parent.mkdir()
    file.write_bytes(manifest.as_bytes())
    assert read_manifest(tmp_path, "chat", BuildManifest) == manifest
    later = replace(manifest, built_at="2030-01-01T00:00:00+00:00")
    plain = json.loads(manifest.as_bytes())
    file.write_text(json.dumps({**plain, "schema": "generation-2"}))
    previous = read_manifest(tmp_path, "chat", TextManifest)
    assert with_time_of(later, previous) == manifest
    assert with_time_of(replace(later, files={}), previous).built_at == later.built_at
    other = EncoderManifest
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
