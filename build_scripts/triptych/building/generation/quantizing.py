"""Quantize an ordinary model to int8 or fp8 weights with one scale per channel, for vLLM.

There is no calibration: the largest value of a channel decides its scale, and activations are
scaled at run time. Only one tensor at a time is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError, no_progress
from triptych.building.generation.inputs import GeneratingInputs
from triptych.building.generation.model import compressed_tensors_config

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_INDEX = "model.safetensors.index.json"
_SCALE = "_scale"
_MODEL = "model"


def engine_weights(inputs: GeneratingInputs, progress: Progress = no_progress) -> Path:
    """Return the folder of weights that the engine reads: the model's own, or their conversion.

    Raises:
        UserError: The weights cannot be converted.
    """
    precision = inputs.converted_precision
    if precision is None:
        return inputs.weights
    key = {
        "model": inputs.model.info.sha256,
        "precision": precision,
        "versions": versions_of("torch", "safetensors", "transformers"),
        "code": code_hash("building/generation/quantizing.py", "building/generation/model.py"),
    }

    def work(target: Path) -> None:
        progress("convert", f"{precision} weights ...")
        quantize(inputs.weights, target / _MODEL, precision)

    return cached_stage("quantized", key, work, progress).folder / _MODEL


def quantize(folder: Path, target: Path, precision: str) -> None:
    """Quantize the model in `folder` and write the engine's files to the new folder `target`.

    Raises:
        UserError: The folder has no safetensors, or layers that cannot be quantized.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise UserError(
            "core.precision",
            f"{precision} requires a model with *.safetensors files",
            given="none in the model's folder",
            remedy="Save the model with `save_pretrained(safe_serialization=True)`",
        )
    layers, left = _matrices_of(folder)
    if odd := sorted(layers ^ (_matrices_in(shards) - left)):
        raise UserError(
            "core.precision",
            f"{precision} is only supported for plain linear layers without shared weights",
            given=", ".join(odd[:2]),
            remedy="Choose bf16, or a checkpoint that is already quantized (compressed-tensors)",
        )
    target.mkdir()
    places: dict[str, str] = {}
    for shard in shards:
        written = _quantize_shard(shard, target / shard.name, layers, precision)
        places |= dict.fromkeys(written, shard.name)
    if (folder / _INDEX).is_file():
        size = sum((target / shard.name).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (target / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = compressed_tensors_config(precision)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _matrices_in(shards: Sequence[Path]) -> set[str]:
    """Return the names of the weights with at least two axes."""
    from safetensors import safe_open

    found = set()
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        found |= {name for name, shape in shapes.items() if len(shape) > 1}
    return found


def _matrices_of(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the weights of linear layers, and of embeddings and the logit layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    last = model.get_output_embeddings()
    layers, left = set(), set()
    for name, module in model.named_modules():
        if module is last or isinstance(module, torch.nn.Embedding):
            left.add(f"{name}.weight")
        elif isinstance(module, torch.nn.Linear):
            layers.add(f"{name}.weight")
    return layers, left


def _quantize_shard(source: Path, target: Path, layers: set[str], precision: str) -> list[str]:
    """Quantize one file of the model; return the names of the tensors in the new file."""
    import torch
    from safetensors import safe_open

    kinds = {"int8": ("I8", torch.int8), "fp8": ("F8_E4M3", torch.float8_e4m3fn)}
    code, dtype = kinds[precision]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0

    def declare(name: str, kind: str, shape: list[int], size: int) -> None:
        nonlocal end
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size

    with safe_open(source, framework="pt") as file:
        names = list(file.keys())
        for name in names:
            part = file.get_slice(name)
            shape = part.get_shape()
            if name in layers:
                declare(name, code, shape, shape[0] * shape[1])
                declare(name + _SCALE, "F32", [shape[0], 1], 4 * shape[0])
            else:
                tensor = file.get_tensor(name)
                declare(name, part.get_dtype(), shape, tensor.numel() * tensor.element_size())
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors to 8 bytes
        with target.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor = file.get_tensor(name)
                if name not in layers:
                    out.write(_bytes_of(tensor))
                    continue
                values = tensor.float()
                scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST[precision]
                scaled = values / scale
                out.write(_bytes_of((scaled.round() if precision == "int8" else scaled).to(dtype)))
                out.write(_bytes_of(scale))
    return [name for name in header if name != "__metadata__"]


def _bytes_of(tensor: Tensor) -> bytes:
    import torch

    found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
