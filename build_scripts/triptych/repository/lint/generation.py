"""Lint: a core that generates text suits its GPUs and its KV cache, and prompts begin once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from triptych.repository.lint.flaw import Flaw, error, info, warning
from triptych.repository.lint.snapshot import Model, enum_name

_SLICE = "MIG-"
_MIB = 1 << 20
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"


def engine_gpus(model: Model) -> Iterator[Flaw]:
    """A model on several GPUs has whole ones, one for each part, and chooses them itself."""
    settings = _settings(model)
    gpus = settings.get("gpus") or []
    parts = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
    slices = [gpu for gpu in gpus if str(gpu).startswith(_SLICE)]
    if slices and parts > 1:
        yield error(
            "must not split a model over slices of GPUs: none reaches another's memory",
            f"{parts} parts on {', '.join(map(str, gpus))}",
            "Use whole GPUs, or tensor_parallel: 1 and pipeline_parallel: 1",
        )
    elif slices:
        yield error(
            "must not name a slice by its UUID: vLLM ends on one in CUDA_VISIBLE_DEVICES "
            "(vllm-project/vllm#41848)",
            ", ".join(slices),
            "Give the container that slice alone, and leave serving.gpus out",
        )
    if gpus and len(gpus) != parts:
        yield error(
            "must have a GPU for each part of the model (tensor_parallel x pipeline_parallel)",
            f"{parts} parts, gpus {', '.join(map(str, gpus))}",
            "Name as many GPUs in serving.gpus",
        )
    kinds = {enum_name(group, "kind") for group in model.config.instance_group}
    if parts > 1 and kinds != {"KIND_MODEL"}:
        yield error(
            "must be KIND_MODEL: the engine, not Triton, places a model on several GPUs",
            ", ".join(sorted(kinds)) or "no instance_group",
            "Write instance_group [{ count: 1 kind: KIND_MODEL }]",
        )


def precision_gpus(model: Model) -> Iterator[Flaw]:
    """Which GPUs compute in 8 bits; vLLM says so only when it starts, or quietly does otherwise.

    https://docs.vllm.ai/en/latest/features/quantization/
    """
    settings = _settings(model)
    if "kv_cache_precision" not in settings:
        return
    if settings.get("precision") == "fp8" or settings["kv_cache_precision"] == "fp8":
        yield info(
            "fp8 is for GPUs of compute capability 8.9 or later (Ada, Hopper, Blackwell): on older "
            "ones vLLM computes with fp8 weights in bf16, and may refuse an fp8 KV cache",
            _eight_bits(settings),
            "Give it such GPUs, as L4, L40S or H100; on older ones int8",
        )
    if settings.get("precision") == "int8":
        yield info(
            "int8 is for GPUs of compute capability 8.0 to 9.0 (Ampere to Hopper): vLLM refuses "
            "it on Blackwell, and bf16, which the rest is computed in, on older ones",
            _eight_bits(settings),
            "Give it such GPUs; on newer ones fp8",
        )


def _eight_bits(settings: Mapping[str, Any]) -> str:
    return (
        f"core.precision {settings.get('precision')}, core.kv_cache.precision "
        f"{settings['kv_cache_precision']}"
    )


def kv_cache(model: Model) -> Iterator[Flaw]:
    """The KV cache holds one request of full length, and the usual ones of a whole batch."""
    settings = _settings(model)
    token_bytes, memory_mib = settings.get("kv_token_bytes"), settings.get("kv_cache_mib")
    if not token_bytes or not memory_mib:
        return
    holds = memory_mib * _MIB // token_bytes
    longest, together = settings.get("max_length", 0), settings.get("max_sequences", 0)
    if holds < longest:
        yield error(
            f"must hold one request of core.max_length {longest}: "
            f"{-(-longest * token_bytes // _MIB)} MiB, or the engine does not start",
            f"core.kv_cache.memory_mib {memory_mib}, {holds} tokens",
            "Raise core.kv_cache.memory_mib, or lower core.max_length",
        )
    usual = settings.get("request_tokens", 0)
    if holds < usual * together:
        yield warning(
            f"should hold core.max_sequences {together} requests as the traffic has them, of "
            f"{usual} tokens each: who finds no room is thrown out of the batch and computed again",
            f"core.kv_cache.memory_mib {memory_mib}, {holds // usual} such requests",
            f"Raise it to {-(-usual * together * token_bytes // _MIB)}, or lower "
            "core.max_sequences or parameters.max_tokens",
        )


def doubled_beginning(model: Model) -> Iterator[Flaw]:
    """A text on which a chat template was rendered gets no second beginning."""
    known = _settings(model).get("special_tokens", {})
    for folder in model.served_folders:
        first = _first_added(folder / _TOKENIZER)
        template = _text(folder / _TEMPLATE)
        if first and first in template and known.get("bos_token") != first:
            yield warning(
                "should know the token that both the chat template and the tokenizer put first: "
                "a text that was rendered elsewhere gets it twice",
                f"{first}; bos_token {known.get('bos_token', 'is not named')}",
                "Name it as bos_token in the model's tokenizer_config.json and build again",
                f"{model.name}/{folder.name}/{_TEMPLATE}",
            )


def _settings(model: Model) -> Mapping[str, Any]:
    """The parameters that are JSON, as ours are."""
    found = {}
    for name, value in model.config.parameters.items():
        try:
            found[name] = json.loads(value.string_value)
        except ValueError:
            continue
    return found


def _first_added(tokenizer: Path) -> str:
    """The token that a tokenizer puts before every text; empty where it puts none."""
    try:
        pending = [json.loads(_text(tokenizer) or "{}").get("post_processor")]
    except (ValueError, AttributeError):
        return ""
    while pending:
        processor = pending.pop() or {}
        pending += processor.get("processors", [])
        single = processor.get("single") or [{}]
        if "SpecialToken" in single[0]:
            return str(single[0]["SpecialToken"]["id"])
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
