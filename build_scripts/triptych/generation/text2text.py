"""Everything that is read before a pipeline that summarises or translates is built."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from triptych.cache import cached_stage, code_hash, versions_of
from triptych.errors import Progress, UserError
from triptych.generation.facts import GenerationFacts, GenerationModel
from triptych.generation.inputs import Prompt, make_prompts, read_prompt_lines
from triptych.model.source import hash_model, locate, read_tokenizer
from triptych.pipeline.text2text_spec import Text2TextSpec
from triptych.pipeline.traffic import TRAFFIC_FILE
from triptych.runtime.generation_wire import TOKENIZER_FILE

ARCHITECTURES = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MarianMTModel",
)
"""Those that CTranslate2 converts and that need no language of the answer in the request."""

GREEDY = {"beams": 1, "length_penalty": 1.0, "no_repeat_ngram": 0, "min_answer": 0}
"""How transformers searches where a model says nothing."""

LONGEST_BY_DEFAULT = 512
"""Tokens of a text where neither the model nor its tokenizer has a limit."""

_MODEL, _FACTS = "model", "facts.json"


@dataclass(frozen=True)
class SearchFacts:
    """What a model's files say of its answers.

    Attributes:
        answer_begins: ids that every answer has first.
        end: the id that ends an answer.
        own: as `GREEDY`, by the model's ``generation_config.json``.
    """

    answer_begins: tuple[int, ...]
    end: int
    own: dict[str, int | float]


@dataclass(frozen=True)
class Text2TextInputs:
    """What is known before anything is built.

    Attributes:
        original: folder of the model's files.
        weights: folder of what CTranslate2 made of them.
        max_length: tokens of a text.
        search: as `GREEDY`: by the spec, else the model.
    """

    spec: Text2TextSpec
    model: GenerationModel
    original: Path
    weights: Path
    max_length: int
    answers: SearchFacts
    search: dict[str, int | float]
    prompts: tuple[Prompt, ...]

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """What `runtime.prompts.Prompts` needs to know."""
        return _prompt_settings(self.spec, self.model.facts, self.max_length)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """What the engine is told."""
        core = self.spec.core
        return {
            "precision": core.precision,
            "max_sequences": core.max_sequences,
            "threads": core.threads or 0,
            "answer_begins": list(self.answers.answer_begins),
            "stop_token_ids": [self.answers.end],
            **self.search,
        }


def read_text2text(spec: Text2TextSpec, progress: Progress) -> Text2TextInputs:
    """Resolve the model, convert it, read the traffic. Writes only to the cache.

    Raises:
        UserError: in the spec, the model or the traffic.
    """
    path = spec.folder / TRAFFIC_FILE
    lines = read_prompt_lines(path)
    original = locate(spec.model, spec.folder)
    model, answers = _read_model(original, progress)
    progress("source", f"{model.facts.architecture}, from {spec.model.source}")
    wanted = spec.core.max_length
    if wanted is not None and wanted > model.facts.max_length:
        raise UserError(
            "core.max_length",
            f"must be at most the model's own limit of {model.facts.max_length}",
            given=wanted,
            remedy="Lower it, or leave it out to use the model's limit",
        )
    max_length = wanted or model.facts.max_length
    settings = _prompt_settings(spec, model.facts, max_length)
    sent = [(f"{path}:{number}", one) for number, one, _ in lines]
    prompts = make_prompts(sent, settings, model.tokenizer.parent, progress)
    named = spec.core.model_dump(include=set(GREEDY), exclude_none=True)
    return Text2TextInputs(
        spec=spec,
        model=model,
        original=original,
        weights=_convert(original, spec.core.precision, model.facts.sha256, progress),
        max_length=max_length,
        answers=answers,
        search={**answers.own, **named},
        prompts=prompts,
    )


def _prompt_settings(
    spec: Text2TextSpec, facts: GenerationFacts, max_length: int
) -> dict[str, Any]:
    return {
        "special_tokens": dict(facts.special_tokens),
        "max_length": max_length,
        "max_answer": spec.core.max_answer,
        "prefix": spec.prefix,
    }


def _read_model(folder: Path, progress: Progress) -> tuple[GenerationModel, SearchFacts]:
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash("generation/text2text.py", "model/source.py"),
    }

    def work(target: Path) -> None:
        facts, answers = _read_facts(folder, sha256)
        (target / TOKENIZER_FILE).write_text(read_tokenizer(folder), encoding="utf-8")
        both = {"facts": asdict(facts), "answers": asdict(answers)}
        (target / _FACTS).write_text(json.dumps(both), encoding="utf-8")

    stage = cached_stage("text2text-model", inputs, work, progress)
    both = json.loads((stage.folder / _FACTS).read_bytes())
    facts = TypeAdapter(GenerationFacts).validate_python(both["facts"])
    answers = TypeAdapter(SearchFacts).validate_python(both["answers"])
    return GenerationModel(facts, stage.folder / TOKENIZER_FILE, None), answers


def _read_facts(folder: Path, sha256: str) -> tuple[GenerationFacts, SearchFacts]:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            "model.source",
            "must be an encoder-decoder model that is known here",
            given=architecture,
            remedy=f"Choose one of {', '.join(ARCHITECTURES)}, or another task",
        )
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    limits = (
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        tokenizer.model_max_length,
    )
    known = [limit for limit in limits if isinstance(limit, int) and limit < 1_000_000]
    ends = generation.eos_token_id
    facts = GenerationFacts(
        sha256=sha256,
        architecture=architecture,
        max_length=min(known, default=LONGEST_BY_DEFAULT),
        stop_token_ids=(ends if isinstance(ends, int) else ends[0],),
        special_tokens={},
        kv_values=0,
        kv_heads=0,
    )
    first = generation.forced_bos_token_id
    own = {
        "beams": generation.num_beams or 1,
        "length_penalty": generation.length_penalty,
        "no_repeat_ngram": generation.no_repeat_ngram_size,
        # transformers counts the token that a decoder starts with.
        "min_answer": max((generation.min_length or 0) - 1, 0),
    }
    said = {name: value for name, value in own.items() if value is not None}
    begins = () if first is None else (first,)
    return facts, SearchFacts(begins, facts.stop_token_ids[0], {**GREEDY, **said})


def _convert(folder: Path, precision: str, sha256: str, progress: Progress) -> Path:
    inputs = {
        "model": sha256,
        "precision": precision,
        "versions": versions_of("ctranslate2", "transformers"),
        "code": code_hash("generation/text2text.py", "generation/converting.py"),
    }

    def work(target: Path) -> None:
        from triptych.generation.converting import convert

        progress("convert", f"to CTranslate2, {precision} ...")
        convert(folder, target / _MODEL, precision)

    return cached_stage("ctranslate2", inputs, work, progress).folder / _MODEL
