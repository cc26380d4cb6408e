"""Weights of fewer bits: made of a model's own, and read back from the layouts of others."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from triptych.base.errors import UserError
from triptych.building.generation.model import QuantizationConfig
from triptych.building.generation.quantizing import quantize
from triptych.building.generation.weights import UnknownLayoutError, dequantize, load_model

pytestmark = pytest.mark.build

INPUTS, OUTPUTS, GROUP = 32, 16, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in bf16, in several files."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="8KB")
    return folder


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shard in folder.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize(
    ("precision", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)]
)
def test_linear_layers_are_stored_in_8_bits_and_nothing_else(
    precision: str, dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    quantize(model, tmp_path / "made", precision)
    was, made = stored(model), stored(tmp_path / "made")
    assert len(list(model.glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "made/model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == made.keys()
    layers = {name for name in was if name.endswith("_proj.weight")}
    assert len(layers) == 2 * 7
    assert made.keys() - was.keys() == {f"{name}_scale" for name in layers}
    for name, weight in was.items():
        if name not in layers:
            assert made[name].dtype == torch.bfloat16
            assert torch.equal(made[name], weight), name
            continue
        scale = made[f"{name}_scale"]
        assert (made[name].dtype, scale.shape) == (dtype, (len(weight), 1))
        off = (made[name].float() * scale - weight.float()).abs()
        # Half a step of the scale, or of 3 bits behind the first.
        step = scale / 2 if precision == "int8" else weight.float().abs() / 16 + scale / 512
        assert bool((off <= step * 1.001).all()), name
        largest = weight.float().abs().amax(1, keepdim=True)
        assert torch.allclose(made[name].float().abs().amax(1, keepdim=True) * scale, largest)
    config = json.loads((tmp_path / "made/config.json").read_bytes())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    back = load_model(tmp_path / "made").state_dict()
    assert all(
        torch.allclose(back[name], made[name].float() * made[f"{name}_scale"]) for name in layers
    )


def test_a_model_without_plain_linear_layers_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"plain linear layers.*c_attn"):
        quantize(tmp_path / "gpt2", tmp_path / "made", "int8")
    with pytest.raises(UserError, match=r"requires a model with \*.safetensors files"):
        quantize(tmp_path, tmp_path / "none", "int8")


def words(values: torch.Tensor) -> torch.Tensor:
    """Eight values of 4 bits to a word, the first lowest, along the last axis."""
    eights = values.long().reshape(*values.shape[:-1], -1, 8)
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """AutoAWQ's kernels read value 0, 2, 4, 6, 1, 3, 5, 7 of each eight."""
    eights = values.reshape(*values.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return words(eights.flatten(-2))


def test_weights_of_4_bits_are_read_as_each_layout_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randint(0, 16, (OUTPUTS, INPUTS))
    zeros = torch.randint(1, 16, (OUTPUTS, INPUTS // GROUP))
    scales = torch.rand(OUTPUTS, INPUTS // GROUP).half()
    order = torch.arange(INPUTS) // GROUP
    mixed = order[torch.randperm(INPUTS)]

    def right(zero: torch.Tensor | int, group: torch.Tensor) -> torch.Tensor:
        subtracted = zero if isinstance(zero, int) else zero[:, group]
        return (values - subtracted).float() * scales.float()[:, group]

    awq = {"qweight": awq_words(values.T), "qzeros": awq_words(zeros.T), "scales": scales.T}
    gptq = {"qweight": words(values).T, "qzeros": words((zeros - 1).T), "scales": scales.T}
    packed = {
        "weight_packed": words(values),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    group = {"weights": {"num_bits": 4, "type": "int"}}
    for tensors, config, wanted in (
        (awq, {"quant_method": "awq", "bits": 4}, right(zeros, order)),
        (gptq, {"quant_method": "gptq", "bits": 4}, right(zeros, order)),
        (
            {**gptq, "g_idx": mixed.int()},
            {"quant_method": "gptq", "bits": 4, "desc_act": True},
            right(zeros, mixed),
        ),
        (
            {**gptq, "qzeros": words(zeros.T)},
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
            right(zeros, order),
        ),
        (
            packed,
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
            right(8, order),
        ),
    ):
        named = {f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file({**named, "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
        found = dict(dequantize(tmp_path, cast(QuantizationConfig, config)))
        assert found.keys() == {"a.weight", "norm.weight"}
        assert torch.equal(found["a.weight"], wanted), config
    blocks = {"a.weight": torch.full((3, 5), 2.0).to(torch.float8_e4m3fn)}
    blocks["a.weight_scale_inv"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file(blocks, tmp_path / "model.safetensors")
    (weight,) = dict(dequantize(tmp_path, {"quant_method": "fp8"})).values()
    assert weight.tolist() == [[2, 2, 2, 4, 4], [2, 2, 2, 4, 4], [6, 6, 6, 8, 8]]


def test_a_layout_that_is_not_known_is_named(tmp_path: Path) -> None:
    save_file({"a.qweight": torch.zeros(1, dtype=torch.int32)}, tmp_path / "model.safetensors")
    for method, bits in (("awq", 8), ("gptq", 3)):
        with pytest.raises(UnknownLayoutError, match=method):
            dict(dequantize(tmp_path, {"quant_method": method, "bits": bits}))
