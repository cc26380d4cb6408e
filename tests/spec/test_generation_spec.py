"""What a user writes of a pipeline that generates text: its spec, its adapters, its folder."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from generation_cases import write_adapter, write_pipeline, write_tiny_model
from mistakes import check_refused, refusal
from triptych.building.generation.adapters import WEIGHTS, read_adapter
from triptych.building.generation.build import check_folder
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.spec import load_spec


def test_mistakes_in_a_spec_are_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "talk", tmp_path / "model")
    for override, said in (
        ("core.backend=onnxruntime", "one of vllm, tensorrt_llm"),
        ("core.max_num_seq=3", "Did you mean `max_num_seqs`?"),
        ("core.max_num_batched_tokens=16", "must be at least core.max_num_seqs"),
        ("core.token_delay_ms=1", "is not a field"),
        ("serving.stream_interval=0", "greater than or equal to 1"),
        ("parameters.max_tokens=0", "parameters.max_tokens must be an integer from 1"),
        ("parameters.stops=a", "parameters.stops is not known"),
        ("adapters={a/b: x}", "should match pattern"),
        ("adapters={a: {source: x, rank: 8}}", "Given: rank. Remove it"),
        ("parameters.adapter=a", "is not an adapter of the pipeline. Given: a"),
        ("parameters.priority=2", "is the level of requests that give none"),
        ("serving.priority={levels: 2, default: 3}", "default must be at most levels (2)"),
        ("serving.triton='24.01'", "serving.triton must be 24.10 or later"),
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
    assert [check.name for check in check_folder(folder)] == ["spec", "traffic"]
    (folder / "hooks.py").touch()
    (folder / "eval.jsonl").write_text('{"text_input": "a", "answers": ["b"]}')
    with (folder / "traffic.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user"}]}')
    found = {check.name: check for check in check_folder(folder)}
    assert (found["eval"].note, found["hooks"].severity) == ("1 rows", "warning")
    assert "traffic.jsonl:4: `messages[0]` must be" in found["messages"].note
    for row in ("{}", '{"text_input": "a"}', '{"text_input": "a", "answers": []}'):
        (folder / "eval.jsonl").write_text(row)
        check_refused("eval.jsonl:1", check_folder, folder)
    (folder / "eval.jsonl").unlink()
    (folder / "traffic.jsonl").write_text('{"text_input": "a", "max_tokens": 5}')
    check_refused("traffic.jsonl:1: max_tokens` is no part", check_folder, folder)
