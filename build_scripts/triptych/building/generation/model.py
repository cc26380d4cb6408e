"""Read information about a model that generates text from its files, such as its quantization."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from jinja2 import TemplateError
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.models.fields import TokenizerSource
from triptych.models.source import hash_model
from triptych.models.tokenizer import (
    OTHER_TOKENIZER,
    OUT_OF_REACH,
    load_tokenizer,
    write_tokenizers,
)
from triptych.runtime.generation_messages import TOKENIZER_FILE
from triptych.runtime.prompts import TEMPLATE_FILE, ChatTemplate
from triptych.runtime.sampling_parameters import DEFAULTS, find_fault
from triptych.spec.scaffold import LIMITS

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

CONVERTED = {"int8": "int", "fp8": "float"}
"""Precision that an ordinary model is converted to, to its type in compressed-tensors."""

COMPUTED = ("fp16", "bf16")
"""Precisions in which products of quantized weights may be computed."""


@dataclass(frozen=True)
class Quantization:
    """Quantization of a model's weights, by the model's files."""

    # Precision of `GenerationCore` (``awq``, ``gptq``, ``int8``, ``fp8``) if one fits; otherwise
    # the quantization method.
    name: str
    words: str  # Description for a user


class QuantizedNumbers(TypedDict, total=False):
    """Form of the weights or activations of a group of layers."""

    num_bits: int
    type: str


class QuantizedLayers(TypedDict, total=False):
    """Group of layers in a configuration of compressed-tensors."""

    weights: QuantizedNumbers
    input_activations: QuantizedNumbers | None


class QuantizationConfig(TypedDict, total=False):
    """The ``quantization_config`` of a ``config.json``, as far as it is read here."""

    quant_method: str
    bits: int
    w_bit: int
    group_size: int
    q_group_size: int
    version: str
    checkpoint_format: str
    format: str
    config_groups: dict[str, QuantizedLayers]


def read_quantization(config: QuantizationConfig | None) -> Quantization | None:
    """Read the ``quantization_config`` of a ``config.json``; return None without one."""
    if not config:
        return None
    method = str(config.get("quant_method", "unknown")).lower()
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit", 4))
        size = config.get("group_size", config.get("q_group_size", -1))
        groups = f"groups of {size}" if size > 0 else "a scale a channel"
        return Quantization(method, f"{method}: weights of {bits} bits, {groups}")
    if method == "compressed-tensors":
        kinds = [_kind(group) for group in config.get("config_groups", {}).values()]
        name = kinds[0] if len(set(kinds)) == 1 and kinds[0] in CONVERTED else method
        return Quantization(name, f"{method}: {', '.join(kinds) or config.get('format')}")
    return Quantization(method, method)


def _kind(group: QuantizedLayers) -> str:
    """Return ``int8`` or ``fp8`` if weights and activations have this type, else a description."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind = f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits')}"
    same = activations is not None and all(
        activations.get(name) == weights.get(name) for name in ("type", "num_bits")
    )
    return kind if same else f"{kind} weights alone" if activations is None else f"{kind} mixed"


def check_precision(precision: str, found: Quantization | None, *, backend: str) -> None:
    """Check that the precision fits the stored weights and that the engine reads them.

    Raises:
        UserError: The precision does not fit, or the weights are quantized and `backend` is not
            vllm.
    """
    if found is not None and backend != "vllm":
        raise UserError(
            "core.backend",
            "must be vllm for a model with quantized weights: no other engine was tested with them",
            given=f"{backend}, and {found.words}",
            remedy="Set core.backend: vllm, or name the original model",
        )
    if found is None:
        if precision in ("awq", "gptq"):
            raise UserError(
                "core.precision",
                f"{precision} requires a model with weights of that format, because it needs "
                "calibration, which is not done here",
                given="a model whose config.json has no quantization_config",
                remedy=f"Choose such a model, often named …-{precision.upper()}, or set int8, fp8 "
                "or bf16",
            )
    elif precision not in (*COMPUTED, found.name):
        own = f"{found.name} or " if found.name in (*CONVERTED, "awq", "gptq") else ""
        raise UserError(
            "core.precision",
            f"must be {own}one of {', '.join(COMPUTED)}, because the model's weights are already "
            "quantized",
            given=f"{precision}, and {found.words}",
            remedy=f"Set core.precision: {own.removesuffix(' or ') or 'bf16'}, or name the "
            "original model",
        )


def compressed_tensors_config(precision: str) -> dict[str, object]:
    """Return the ``quantization_config`` of weights scaled by channel and activations by token.

    vLLM reads this format: https://github.com/vllm-project/compressed-tensors
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


INFO_FILE = "facts.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationInfo:
    """Facts about a model."""

    sha256: str  # SHA-256 hash of the files that decide its results, in hex
    architecture: str  # Class of the model in transformers
    # Maximum number of tokens of a prompt and its answer; `OUT_OF_REACH` if the files have no
    # limit.
    max_length: int
    stop_token_ids: tuple[int, ...]  # Ids of the tokens that end an answer
    special_tokens: Mapping[str, str]  # Name to text of the special tokens, for chat templates
    kv_values: int  # Number of values in the KV cache for a token
    # Number of heads of these values. With more GPUs than heads, some GPUs hold copies.
    kv_heads: int
    vocabulary: int  # Number of tokens in the weights; a tokenizer may have more
    # Quantization of the weights; None if they are not quantized.
    quantization: Quantization | None = None
    # Sampling parameters that the model's files suggest, which are not defaults here.
    suggested: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationModel:
    """Information about a model, and the files that the steps read, in the cache."""

    info: GenerationInfo
    tokenizer: Path  # File of the tokenizer that encodes texts
    chat_template: Path | None  # File of the chat template; None if the model has none
    # File of the tokenizer that decodes ids; None if `tokenizer` decodes them.
    decoder: Path | None = None
    # File for `runtime.prompts` that maps the tokenizer's pieces to the model's ids; None if the
    # tokenizer has the model's ids.
    pieces: Path | None = None

    @property
    def other_tokenizer(self) -> Path | None:
        """Folder with the model's own ``tokenizer.json``; None if `tokenizer` says the same."""
        folder = self.tokenizer.parent / OTHER_TOKENIZER
        return folder if folder.is_dir() else None

    def decoding(self) -> Tokenizer:
        """Return the tokenizer that decodes ids."""
        return Tokenizer.from_file(str(self.decoder or self.tokenizer))


def read_generation_model(
    folder: Path, progress: Progress, source: TokenizerSource | None = None
) -> GenerationModel:
    """Read the model in `folder`. The result is cached, because transformers takes seconds to load.

    `source` is the origin of its tokenizer, as `tokenizer.source` has it.

    Raises:
        UserError: The model does not generate text, or has no fast tokenizer.
    """
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "template": _text_of(folder / TEMPLATE_FILE),
        "tokenizer": source,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(
            "building/generation/model.py",
            "models/source.py",
            "models/tokenizer.py",
        ),
    }

    def work(target: Path) -> None:
        # The tokenizer is read first, because its errors are the most specific ones.
        write_tokenizers(folder, target, source)
        info, template = _read(folder, sha256, source)
        if template is not None:
            for place in (target, target / OTHER_TOKENIZER):
                if place.is_dir():
                    (place / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        (target / INFO_FILE).write_text(json.dumps(asdict(info)), encoding="utf-8")

    stage = cached_stage("generation-model", inputs, work, progress)
    info = TypeAdapter(GenerationInfo).validate_json((stage.folder / INFO_FILE).read_bytes())
    template = stage.folder / TEMPLATE_FILE
    return GenerationModel(
        info, stage.folder / TOKENIZER_FILE, template if template.is_file() else None
    )


def _read(
    folder: Path, sha256: str, source: TokenizerSource | None
) -> tuple[GenerationInfo, str | None]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(folder)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(
            "model.source",
            "must be a causal language model, which continues a text",
            given=architecture,
            remedy="Choose another model, or another task",
        )
    text_config = config.get_text_config()
    generation = read_generation_config(folder, config)
    tokenizer = load_tokenizer(folder, source)
    kv_values, kv_heads = _kv_cache(text_config, architecture)
    info = GenerationInfo(
        sha256=sha256,
        architecture=architecture,
        max_length=_max_length(text_config),
        stop_token_ids=_stops(generation.eos_token_id, tokenizer.eos_token_id),
        special_tokens=_special_tokens(tokenizer),
        kv_values=kv_values,
        kv_heads=kv_heads,
        vocabulary=text_config.vocab_size,
        quantization=read_quantization(getattr(config, "quantization_config", None)),
        suggested=_suggested(folder / GENERATION_FILE),
    )
    return info, _chat_template(tokenizer)


def _kv_cache(config: PretrainedConfig, architecture: str) -> tuple[int, int]:
    """Return the number of values in the KV cache for a token, and the number of their heads."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UserError(
            "model.source",
            "must be a model with attention, so that its KV cache can be planned",
            given=f"{architecture}, without num_attention_heads",
            remedy="Choose another model",
        )
    if latent := getattr(config, "kv_lora_rank", None):
        # DeepSeek's latent attention stores one vector and one positional part for all heads.
        return config.num_hidden_layers * (latent + config.qk_rope_head_dim), 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * head_size, kv_heads


def read_config(folder: Path) -> PretrainedConfig:
    """Read a model's configuration with transformers.

    Raises:
        UserError: transformers does not know the model, or the file is not a configuration.
    """
    from transformers import AutoConfig

    with _loading("config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def read_generation_config(folder: Path, config: PretrainedConfig) -> GenerationConfig:
    """Read a model's generation configuration with transformers, else from its configuration.

    Raises:
        UserError: The file is not a generation configuration.
    """
    from transformers import GenerationConfig

    if not (folder / GENERATION_FILE).is_file():
        return GenerationConfig.from_model_config(config)
    with _loading(GENERATION_FILE):
        found = GenerationConfig.from_pretrained(folder)
        ends = found.eos_token_id
        if not all(
            isinstance(one, int) for one in (ends if isinstance(ends, list) else [ends or 0])
        ):
            raise ValueError(f"eos_token_id is {ends!r}, and no number or list of numbers")
        return found


@contextmanager
def _loading(file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UserError(
            "model.source",
            f"must have a {file} that transformers {versions_of('transformers')['transformers']} "
            "can read",
            given=" ".join(str(error).split())[:300],
            remedy="Download the model again, or choose one for this release of transformers",
        ) from error


def _max_length(config: PretrainedConfig) -> int:
    found = (getattr(config, name, None) for name in LIMITS)
    return next((limit for limit in found if isinstance(limit, int)), OUT_OF_REACH)


def _stops(said: int | Sequence[int] | None, tokenizers: int | None) -> tuple[int, ...]:
    """Return the stop tokens of the model's files and of its tokenizer: vLLM stops at both.

    Many fine-tuned models name their stop token in the tokenizer only.
    """
    named = [said] if isinstance(said, int) else list(said or ())
    return tuple(dict.fromkeys([*named, *([] if tokenizers is None else [tokenizers])]))


def _suggested(file: Path) -> dict[str, float]:
    """Return the sampling parameters in the file itself: transformers adds its own defaults."""
    said = json.loads(file.read_bytes()) if file.is_file() else {}
    return {
        name: said[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if name in said and said[name] != DEFAULTS[name] and not find_fault(name, said[name])
    }


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        return None
    try:
        ChatTemplate(template, {})
    except TemplateError as error:
        raise UserError(
            "model.source",
            "must have a chat template that Jinja can compile",
            given=error,
            remedy=f"Correct {TEMPLATE_FILE} or the tokenizer's files, or download the model again",
        ) from error
    return template


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
