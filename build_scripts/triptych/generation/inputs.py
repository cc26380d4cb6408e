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
from triptych.generation.weights import find_weights
from triptych.pipeline.generation_spec import GenerationSpec
from triptych.pipeline.traffic import TRAFFIC_FILE, read_lines
from triptych.runtime.faults import RequestError
from triptych.runtime.prompts import Prompts

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Prompt:
    """One line of the traffic.

    Attributes:
        sent: ``text_input`` or ``messages`` as a client sends it.
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
        weights: folder of the model's files.
        max_length: tokens of a prompt and its answer together.
    """

    spec: GenerationSpec
    model: GenerationModel
    weights: Path
    max_length: int
    prompts: tuple[Prompt, ...]

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """What `runtime.prompts.Prompts` needs to know."""
        return {
            "special_tokens": dict(self.model.facts.special_tokens),
            "max_length": self.max_length,
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
    max_length = _max_length(spec, model.facts)
    _check_kv_cache(spec, model.facts, max_length)
    inputs = GenerationInputs(spec, model, weights, max_length, ())
    path = spec.folder / TRAFFIC_FILE
    prompts = tuple(_prompts(inputs, [(f"{path}:{number}", sent) for number, sent, _ in lines]))
    mean = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    progress("traffic", f"{len(prompts)} prompts, {mean:.1f} tokens on average")
    return GenerationInputs(spec, model, weights, max_length, prompts)


def make_prompt(inputs: GenerationInputs, sent: Mapping[str, str], place: str) -> Prompt:
    """What preprocess makes of a request that is none of the traffic; `place` is where it is from.

    Raises:
        UserError: it refuses it.
    """
    (prompt,) = _prompts(inputs, [(place, sent)])
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


def kv_mib(facts: GenerationFacts, precision: str, tokens: int) -> float:
    """MiB of KV cache that so many tokens take."""
    return facts.kv_values * BYTES[precision] * tokens / 2**20


def _check_kv_cache(spec: GenerationSpec, facts: GenerationFacts, max_length: int) -> None:
    """One request of full length must fit, or the engine would never run it."""
    needed = math.ceil(kv_mib(facts, spec.core.precision, max_length))
    if needed > spec.core.kv_cache.memory_mib:
        raise UserError(
            "core.kv_cache.memory_mib",
            f"must hold one request of core.max_length {max_length}: {needed} MiB",
            given=spec.core.kv_cache.memory_mib,
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
    if not lines:
        raise UserError(
            str(path), "must have rows", given="none", remedy=f"Add real requests: {form}"
        )
    return lines


def _prompts(
    inputs: GenerationInputs, sent: Sequence[tuple[str, Mapping[str, str]]]
) -> Iterator[Prompt]:
    maker = Prompts(inputs.prompt_settings, inputs.model.tokenizer.parent)
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
