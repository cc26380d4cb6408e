"""Everything that is read before a pipeline that generates text is built: spec, model, prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import Progress, UserError
from triptych.generation.facts import GenerationFacts, GenerationModel, read_generation_model
from triptych.generation.quantisation import CONVERTED, check_precision
from triptych.generation.weights import find_weights
from triptych.pipeline.generation_spec import GenerationSpec
from triptych.pipeline.traffic import TRAFFIC_FILE, read_lines
from triptych.runtime.faults import RequestError
from triptych.runtime.prompts import Prompts
from triptych.runtime.sampling_parameters import DEFAULTS, FIELD, check_sampling

FP8_CACHE = "+fp8kv"
"""What follows the precision in a gate's name where the KV cache has one of its own."""


@dataclass(frozen=True)
class Prompt:
    """One line of the traffic.

    Attributes:
        sent: ``text_input`` or ``messages`` as a client sends it, and ``sampling_parameters``
            where the line has them.
        ids: its tokens, as preprocess makes them.
    """

    sent: Mapping[str, str]
    ids: tuple[int, ...]

    @property
    def messages(self) -> list[dict[str, str]] | None:
        """The conversation, where it is one."""
        text = self.sent.get("messages")
        parsed: list[dict[str, str]] | None = None if text is None else json.loads(text)
        return parsed


@dataclass(frozen=True)
class GenerationInputs:
    """What is known before anything is built.

    Attributes:
        weights: folder of the model's files; the engine may read others that are made of them.
        max_length: tokens of a prompt and its answer together.
    """

    spec: GenerationSpec
    model: GenerationModel
    weights: Path
    max_length: int
    prompts: tuple[Prompt, ...]

    @property
    def kv_token_bytes(self) -> int:
        """Of the KV cache, that one token takes on each GPU."""
        core, facts = self.spec.core, self.model.facts
        shares = min(core.tensor_parallel, facts.kv_heads) * core.pipeline_parallel
        computed = 4 if core.precision == "fp32" else 2
        size = 1 if core.kv_cache.precision == "fp8" else computed
        return -(-facts.kv_values * size // shares)

    @property
    def judged_as(self) -> str:
        """The precision whose limits the gate holds the core to, as `metrics.limits_of` has it.

        Weights alone that are quantised are held to the same in fp32, and computed in bf16.
        """
        core, stored = self.spec.core, self.model.facts.quantisation
        own: str = "bf16" if core.precision in ("awq", "gptq") else core.precision
        if stored is not None and stored.name in CONVERTED:
            own = stored.name
        return own + (FP8_CACHE if core.kv_cache.precision == "fp8" else "")

    @property
    def request_tokens(self) -> int:
        """Of the traffic's mean prompt, and the longest answer to one that does not say."""
        most = self.spec.parameters.get("max_tokens", DEFAULTS["max_tokens"])
        mean = sum(len(prompt.ids) for prompt in self.prompts) / len(self.prompts)
        return min(self.max_length, math.ceil(mean) + int(most))

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """What `runtime.prompts.Prompts` needs to know."""
        return {
            "special_tokens": dict(self.model.facts.special_tokens),
            "max_length": self.max_length,
            "max_answer": None,
            "prefix": "",
        }


def read_generation(spec: GenerationSpec, progress: Progress) -> GenerationInputs:
    """Resolve the model, read the traffic. Writes only to the cache.

    Raises:
        UserError: in the spec, the model or the traffic.
    """
    lines = read_prompt_lines(spec.folder / TRAFFIC_FILE)
    weights = find_weights(spec.model, spec.folder, progress)
    model = read_generation_model(weights, progress)
    progress("source", f"{model.facts.architecture}, from {spec.model.source}")
    if spec.core.backend != "scripted":
        core = spec.core
        check_precision(core.precision, model.facts.quantisation, backend=core.backend)
    max_length = _max_length(spec, model.facts)
    inputs = GenerationInputs(spec, model, weights, max_length, ())
    _check_kv_cache(inputs)
    path = spec.folder / TRAFFIC_FILE
    prompts = make_prompts(
        [(f"{path}:{number}", sent) for number, sent, _ in lines],
        inputs.prompt_settings,
        model.tokenizer.parent,
        progress,
    )
    for (number, _, _), prompt in zip(lines, prompts, strict=True):
        _check_sampling(f"{path}:{number}", prompt, max_length)
    return GenerationInputs(spec, model, weights, max_length, prompts)


def make_prompts(
    sent: Sequence[tuple[str, Mapping[str, str]]],
    settings: Mapping[str, Any],
    files: Path,
    progress: Progress,
) -> tuple[Prompt, ...]:
    """The prompts of a pipeline's traffic.

    Args:
        sent: requests, each with where it is from.
        settings: of `runtime.prompts.Prompts`.
        files: folder of what preprocess reads of the model.
        progress: told how many there are.

    Raises:
        UserError: one that the pipeline would refuse.
    """
    prompts = tuple(_prompts(settings, files, sent))
    mean = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    progress("traffic", f"{len(prompts)} prompts, {mean:.1f} tokens on average")
    return prompts


def make_prompt(inputs: GenerationInputs, sent: Mapping[str, str], place: str) -> Prompt:
    """What preprocess makes of a request that is none of the traffic; `place` is where it is from.

    Raises:
        UserError: it refuses it.
    """
    files = inputs.model.tokenizer.parent
    (prompt,) = _prompts(inputs.prompt_settings, files, [(place, sent)])
    return prompt


def _max_length(spec: GenerationSpec, facts: GenerationFacts) -> int:
    wanted = spec.core.max_length
    if wanted is not None and wanted > facts.max_length:
        raise UserError(
            "core.max_length",
            f"must be at most the model's own limit of {facts.max_length}",
            given=wanted,
            remedy="Lower it, or leave it out to use the model's limit",
        )
    return wanted or facts.max_length


def _check_kv_cache(inputs: GenerationInputs) -> None:
    """One request of full length must fit, or the engine would never run it: lint comes later."""
    memory_mib = inputs.spec.core.kv_cache.memory_mib
    needed = -(-inputs.kv_token_bytes * inputs.max_length // 2**20)
    if needed > memory_mib:
        raise UserError(
            "core.kv_cache.memory_mib",
            f"must hold one request of core.max_length {inputs.max_length}: {needed} MiB",
            given=memory_mib,
            remedy="Raise it, or lower core.max_length",
        )


def read_prompt_lines(path: Path) -> list[tuple[int, dict[str, str], Mapping[str, Any]]]:
    """Of each line its number, the request as a client sends it, and the whole object.

    Raises:
        UserError: no such file, a line that is no request, or none at all.
    """
    form = '{"messages": [{"role": "user", "content": "…"}]} or {"text_input": "…"}'
    if not path.is_file():
        raise UserError(
            str(path), "must exist", given="no such file", remedy=f"Write real requests: {form}"
        )
    lines: list[tuple[int, dict[str, str], Mapping[str, Any]]] = []
    for number, line, row in read_lines(path):
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
        if FIELD in row:
            lines[-1][1][FIELD] = json.dumps(row[FIELD])
    if not lines:
        raise UserError(
            str(path), "must have rows", given="none", remedy=f"Add real requests: {form}"
        )
    return lines


def _check_sampling(place: str, prompt: Prompt, max_length: int) -> None:
    try:
        check_sampling(prompt.sent.get(FIELD, ""), DEFAULTS, room=max_length - len(prompt.ids))
    except RequestError as error:
        raise UserError(place, "must be a request that the pipeline takes", given=error) from error


def _prompts(
    settings: Mapping[str, Any], files: Path, sent: Sequence[tuple[str, Mapping[str, str]]]
) -> Iterator[Prompt]:
    maker = Prompts(settings, files)
    for place, one in sent:
        try:
            ids = (
                maker.of_text(one["text_input"])
                if "text_input" in one
                else maker.of_messages(one["messages"])
            )
        except RequestError as error:
            raise UserError(
                place, "must be a request that the pipeline takes", given=error
            ) from error
        yield Prompt(one, tuple(ids))
