"""Weights of a model that generates text: find them, convert a GGUF file, dequantize them to fp32.

Layouts are those of AutoAWQ (gemm), GPTQModel, compressed-tensors and the fp8 of transformers.
"""

from __future__ import annotations

import importlib.machinery
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.cache import cached_stage, code_hash, sha256_of
from triptych.base.errors import Progress, UserError
from triptych.models.checks import check_unused
from triptych.models.fields import ModelSource
from triptych.models.source import locate
from triptych.serving.generation_environment import environment_python, vllm_packages

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from triptych.building.generation.model import QuantizationConfig

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Order of eight consecutive values in a word of AWQ."""

_SCALES = ("weight_scale", "weight_scale_inv")
_BESIDE = (
    *("qzeros", "scales", "g_idx", "weight_g_idx", "weight_shape", "weight_zero_point"),
    *("input_scale", "input_zero_point", "k_scale", "v_scale", *_SCALES),
)


class UnknownLayoutError(ValueError):
    """Error: the layout of the quantized weights is not supported."""


def load_model(folder: Path) -> PreTrainedModel:
    """Load the causal language model in `folder` in fp32 with transformers.

    Raises:
        UnknownLayoutError: The layout of the quantized weights is not supported.
        UserError: The class does not use all weights of the base model.
        OSError, ValueError, RuntimeError, KeyError: transformers does not load the model.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        check_unused(model, report["unexpected_keys"])
        return model.eval()
    del config.quantization_config
    weights = dict(dequantize(folder, quantized))
    # AutoModelForCausalLM does not accept a state dict without a folder.
    model, report = getattr(transformers, config.architectures[0]).from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )
    if wrong := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
        raise UnknownLayoutError(f"{quantized.get('quant_method')}: {', '.join(wrong[:3])}")
    return model.eval()


def dequantize(folder: Path, config: QuantizationConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the fp32 tensor of each parameter.

    Args:
        folder: Folder with ``*.safetensors``.
        config: ``quantization_config`` of the model's ``config.json``.

    Raises:
        UnknownLayoutError: The layout of a weight is not supported.
    """
    import torch
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= load_file(shard)
    small = (torch.int8, torch.float8_e4m3fn)
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        beside = {
            other: stored[f"{layer}.{other}"] for other in _BESIDE if f"{layer}.{other}" in stored
        }
        if kind in _BESIDE:
            continue
        if kind == "qweight":
            unpack = _awq if config["quant_method"] == "awq" else _gptq
            yield f"{layer}.weight", unpack(tensor, beside, config)
        elif kind == "weight_packed":
            yield f"{layer}.weight", _packed(tensor, beside, config)
        elif tensor.dtype in small and kind == "weight":
            yield (
                name,
                _scaled(tensor.float(), next(beside[one] for one in _SCALES if one in beside)),
            )
        else:
            yield name, tensor.float()


def _awq(packed: Tensor, beside: Mapping[str, Tensor], config: QuantizationConfig) -> Tensor:
    """Dequantize AWQ weights, whose words hold consecutive values of a row; rows are inputs."""
    import torch

    if config.get("bits", config.get("w_bit")) != 4 or config.get("version", "gemm") != "gemm":
        raise UnknownLayoutError("awq that is not of 4 bits and version gemm")
    order = torch.tensor(_AWQ_ORDER)

    def values(words: Tensor) -> Tensor:
        return _unpacked(words, 4).reshape(len(words), -1, 8)[:, :, order].flatten(1)

    scales = beside["scales"].float()
    rows = packed.shape[0] // scales.shape[0]
    zeros = values(beside["qzeros"]).repeat_interleave(rows, 0)
    return ((values(packed) - zeros) * scales.repeat_interleave(rows, 0)).T.contiguous()


def _gptq(packed: Tensor, beside: Mapping[str, Tensor], config: QuantizationConfig) -> Tensor:
    """Dequantize GPTQ weights, whose words hold consecutive values of a column; rows are inputs."""
    import torch

    bits = config["bits"]
    if 32 % bits:
        raise UnknownLayoutError(f"gptq of {bits} bits")
    values, scales = _unpacked(packed.T, bits).T, beside["scales"].float()
    # The first version of the format stores zero points minus one.
    first = config.get("checkpoint_format", "gptq") == "gptq"
    zeros = (_unpacked(beside["qzeros"], bits) + first) % (1 << bits)
    inputs = values.shape[0]
    each = torch.arange(inputs) // -(-inputs // scales.shape[0])
    group = beside.get("g_idx", each).long()
    return ((values - zeros[group]) * scales[group]).T.contiguous()


def _packed(packed: Tensor, beside: Mapping[str, Tensor], config: QuantizationConfig) -> Tensor:
    """Dequantize packed weights, whose words hold values of a row plus half the range."""
    (group,) = config["config_groups"].values()
    bits = group["weights"]["num_bits"]
    if 32 % bits or "weight_zero_point" in beside or "weight_g_idx" in beside:
        raise UnknownLayoutError(f"compressed-tensors of {bits} bits, with zero points or an order")
    columns = int(beside["weight_shape"][1])
    values = _unpacked(packed, bits)[:, :columns] - 2 ** (bits - 1)
    return _scaled(values, beside["weight_scale"])


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply values by one scale, one per row, or one per block of rows and columns."""
    scale = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    for axis, size in enumerate(values.shape):
        times = -(-size // scale.shape[axis])
        scale = scale.repeat_interleave(times, axis).narrow(axis, 0, size)
    return values * scale


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the values in the 32-bit words of each row, lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1).float()


GGUF = ".gguf"
_WORKER = Path(__file__).with_name("worker_gguf.py")
_MODEL = "model"


def find_weights(model: ModelSource, folder: Path, progress: Progress) -> Path:
    """Return the local folder with the model's files; a GGUF file is converted.

    Args:
        model: Source in the spec; ``package:<module>/<file>.gguf`` is also searched in the packages
            of vLLM.
        folder: Folder of the pipeline.
        progress: Receives a line for a conversion.

    Raises:
        UserError: There is no model, or it cannot be read.
    """
    if not model.source.endswith(GGUF):
        return locate(model, folder)
    file = _gguf_file(model.source, folder)
    inputs = {"gguf": sha256_of(file), "code": code_hash("building/generation/worker_gguf.py")}

    def work(target: Path) -> None:
        progress("source", f"{file.name}: dequantized to fp32 ...")
        done = subprocess.run(
            [str(environment_python()), str(_WORKER), str(file), str(target / _MODEL)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(
                "model.source",
                "must be a GGUF file that transformers can read",
                given=" ".join(done.stderr.split())[-300:],
                remedy="Name the folder of the original model",
            )

    stage = cached_stage("gguf", inputs, work, progress)
    return stage.folder / _MODEL


def _gguf_file(source: str, folder: Path) -> Path:
    if source.startswith("package:"):
        module, _, inner = source.removeprefix("package:").partition("/")
        places = [str(path) for path in vllm_packages()]
        spec = importlib.machinery.PathFinder.find_spec(module, places)
        found = list(spec.submodule_search_locations or ()) if spec is not None else []
        file = Path(found[0]) / inner if found else None
    else:
        file = (folder / source).resolve()
    if file is None or not file.is_file():
        raise UserError(
            "model.source",
            "must name an existing GGUF file",
            given=source,
            remedy="Correct the path, which is relative to the pipeline's folder; `make "
            "setup-generation` in a clone of Triptych fetches the example's",
        )
    return file
