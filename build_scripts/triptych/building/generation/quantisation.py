"""Numbers of fewer bits that a model's weights are stored in, by its files or by our own making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.base.errors import UserError

CONVERTED = {"int8": "int", "fp8": "float"}
"""Precisions that an ordinary model is converted to, by the type as compressed-tensors calls it."""

COMPUTED = ("fp16", "bf16")
"""Precisions that quantised weights may be computed in."""


@dataclass(frozen=True)
class Quantisation:
    """What the files of a model say.

    Attributes:
        name: a precision of `GenerationCore` where it is one: ``awq``, ``gptq``, ``int8``, ``fp8``;
            else the method that made it.
        words: for a reader.
    """

    name: str
    words: str


def read_quantisation(config: Mapping[str, Any] | None) -> Quantisation | None:
    """What ``quantization_config`` of a ``config.json`` says; None where there is none."""
    if not config:
        return None
    method = str(config.get("quant_method", "unknown")).lower()
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit", 4))
        size = config.get("group_size", config.get("q_group_size", -1))
        groups = f"groups of {size}" if size > 0 else "a scale a channel"
        return Quantisation(method, f"{method}: weights of {bits} bits, {groups}")
    if method == "compressed-tensors":
        kinds = [_kind(group) for group in config.get("config_groups", {}).values()]
        name = kinds[0] if len(set(kinds)) == 1 and kinds[0] in CONVERTED else method
        return Quantisation(name, f"{method}: {', '.join(kinds) or config.get('format')}")
    return Quantisation(method, method)


def _kind(group: Mapping[str, Any]) -> str:
    """A group of layers: ``int8`` or ``fp8`` where weights and activations are, else in words."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind = f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits')}"
    same = activations is not None and all(
        activations.get(name) == weights.get(name) for name in ("type", "num_bits")
    )
    return kind if same else f"{kind} weights alone" if activations is None else f"{kind} mixed"


def check_precision(precision: str, found: Quantisation | None, *, backend: str) -> None:
    """The precision suits what the model's weights are stored in, and the engine reads that.

    Raises:
        UserError: the precision names something else, or the engine was never tried on it.
    """
    if found is not None and backend != "vllm":
        raise UserError(
            "core.backend",
            "must be vllm where the model's weights are quantised: no other was tried on them",
            given=f"{backend}, and {found.words}",
            remedy="Set core.backend: vllm, or name the original model",
        )
    if found is None:
        if precision in ("awq", "gptq"):
            raise UserError(
                "core.precision",
                f"{precision} needs a model that was quantised so: it takes calibration, which "
                "is not done here",
                given="a model whose config.json has no quantization_config",
                remedy=f"Name such a model, often called …-{precision.upper()}; or choose int8, "
                "fp8 or bf16",
            )
    elif precision not in (*COMPUTED, found.name):
        own = f"{found.name} or " if found.name in (*CONVERTED, "awq", "gptq") else ""
        raise UserError(
            "core.precision",
            f"must be {own}one of {', '.join(COMPUTED)}, to compute in: the model's weights are "
            "quantised already",
            given=f"{precision}, and {found.words}",
            remedy=f"Set core.precision: {own.removesuffix(' or ') or 'bf16'}, or name the "
            "original model",
        )


def compressed_tensors_config(precision: str) -> dict[str, Any]:
    """``quantization_config`` of weights by channel and activations by token, scaled as they come.

    As the compressed-tensors format has it, which vLLM reads:
    https://github.com/vllm-project/compressed-tensors
    """
    both = {"num_bits": 8, "type": CONVERTED[precision], "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{CONVERTED[precision]}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**both, "strategy": "channel", "dynamic": False},
                "input_activations": {**both, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }
