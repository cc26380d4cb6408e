"""Everything that is read before a pipeline that summarises or translates is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.building.generation.facts import (
    GenerationFacts,
    GenerationModel,
    read_config,
    read_generation_config,
)
from triptych.building.generation.inputs import (
    GeneratingInputs,
    GenerationInputs,
    Prompt,
    make_prompts,
    max_length_of,
    read_prompt_lines,
)
from triptych.building.generation.marian import is_marian, without_advice, write_marian
from triptych.runtime.generation_wire import TOKENIZER_FILE
from triptych.runtime.source_pieces import PIECES_FILE
from triptych.spec.model_source import hash_model, locate, read_tokenizer
from triptych.spec.text2text_spec import Text2TextSpec
from triptych.spec.traffic import TRAFFIC_FILE

ARCHITECTURES = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MarianMTModel",
)
"""Those that CTranslate2 converts and that need no language of the answer in the request."""

GREEDY = {"beams": 1, "length_penalty": 1.0, "no_repeat_ngram": 0, "min_answer": 0}
"""How transformers searches where a model says nothing."""

NOT_SEARCHED_BY = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "diversity_penalty",
    "forced_decoder_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
)
"""Of ``generation_config.json``; nothing, 0 and 1 are as if it were not there."""

LIMITS_OF_OTHER_SEARCH: Mapping[str, float | None] = {
    "exact_prefix": None,
    "margin_at_difference": 0.25,
}
"""Where several beams may not repeat themselves. CTranslate2 shares out the probability of what is
forbidden, transformers does not: scores of beams add up otherwise, and another may win."""

LIMITS_WITHOUT_LOGPROBS: Mapping[str, float | None] = dict.fromkeys(
    ("logprob_difference", "p99_logprob_difference", "perplexity_ratio")
)
"""Of live answers, where a search has several beams, or tokens that it may not take: there are
none, or such as the search made of them."""

LONGEST_BY_DEFAULT = 512
"""Tokens of a text where neither the model nor its tokenizer has a limit."""

_MODEL, _FACTS, _DECODER = "model", "facts.json", "decoder"


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
class Text2TextInputs(GeneratingInputs):
    """What is known before a pipeline that makes one text of another is built.

    Attributes:
        weights: folder of what CTranslate2 made of the model's files.
        original: folder of the model's files.
        search: as `GREEDY`: by the spec, else the model.
    """

    spec: Text2TextSpec
    original: Path
    answers: SearchFacts
    search: dict[str, int | float]

    @property
    def prompt_settings(self) -> dict[str, Any]:
        return {
            "special_tokens": {},
            "max_length": self.max_length,
            "max_answer": self.spec.core.max_answer,
            "prefix": self.spec.prefix,
            "vocabulary": self.model.facts.vocabulary,
        }

    @property
    def context_tokens(self) -> int:
        return 0

    def room(self, prompt: Prompt) -> int:
        return self.spec.core.max_answer

    def other_limits(self, *, live: bool) -> Mapping[str, float | None]:
        beams, bound = self.search["beams"] > 1, bool(self.search["no_repeat_ngram"])
        unlike = live and (beams or bound or self.search["min_answer"])
        return {
            **(LIMITS_OF_OTHER_SEARCH if beams and bound else {}),
            **(LIMITS_WITHOUT_LOGPROBS if unlike else {}),
        }

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


AnyInputs = GenerationInputs | Text2TextInputs
"""Of a pipeline of either kind."""


def read_text2text(spec: Text2TextSpec, progress: Progress) -> Text2TextInputs:
    """Resolve the model, convert it, read the traffic. Writes only to the cache.

    Raises:
        UserError: in the spec, the model or the traffic.
    """
    lines = read_prompt_lines(spec.folder / TRAFFIC_FILE)
    original = locate(spec.model, spec.folder)
    model, answers = _read_model(original, progress)
    progress("source", f"{model.facts.architecture}, from {spec.model.source}")
    named = spec.core.model_dump(include=set(GREEDY), exclude_none=True)
    inputs = Text2TextInputs(
        spec=spec,
        model=model,
        weights=_convert(original, spec.core.precision, model.facts.sha256, progress),
        max_length=max_length_of(spec, model.facts),
        prompts=(),
        original=original,
        answers=answers,
        search={**answers.own, **named},
    )
    return replace(inputs, prompts=make_prompts(inputs, lines, progress))


def _read_model(folder: Path, progress: Progress) -> tuple[GenerationModel, SearchFacts]:
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(
            "building/generation/text2text.py",
            "building/generation/marian.py",
            "spec/model_source.py",
        ),
    }

    def work(target: Path) -> None:
        with without_advice():
            if is_marian(folder):
                (target / _DECODER).mkdir()
                write_marian(folder, target, target / _DECODER)
            else:
                (target / TOKENIZER_FILE).write_text(read_tokenizer(folder), encoding="utf-8")
            facts, answers = _read_facts(folder, sha256)
        both = {"facts": asdict(facts), "answers": asdict(answers)}
        (target / _FACTS).write_text(json.dumps(both), encoding="utf-8")

    stage = cached_stage("text2text-model", inputs, work, progress)
    both = json.loads((stage.folder / _FACTS).read_bytes())
    facts = TypeAdapter(GenerationFacts).validate_python(both["facts"])
    answers = TypeAdapter(SearchFacts).validate_python(both["answers"])
    model = GenerationModel(facts, stage.folder / TOKENIZER_FILE, None)
    if (stage.folder / PIECES_FILE).is_file():
        decoder = stage.folder / _DECODER / TOKENIZER_FILE
        model = replace(model, decoder=decoder, pieces=stage.folder / PIECES_FILE)
    return model, answers


def _read_facts(folder: Path, sha256: str) -> tuple[GenerationFacts, SearchFacts]:
    from transformers import AutoTokenizer

    config = read_config(folder)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            "model.source",
            "must be an encoder-decoder model that is known here",
            given=architecture,
            remedy=f"Choose one of {', '.join(ARCHITECTURES)}, or another task",
        )
    generation = read_generation_config(folder, config)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    limits = (
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        tokenizer.model_max_length,
    )
    known = [limit for limit in limits if isinstance(limit, int) and limit < 1_000_000]
    _check_search(config, generation)
    ends = generation.eos_token_id
    facts = GenerationFacts(
        sha256=sha256,
        architecture=architecture,
        max_length=min(known, default=LONGEST_BY_DEFAULT),
        stop_token_ids=(ends if isinstance(ends, int) else ends[0],),
        special_tokens={},
        kv_values=0,
        kv_heads=0,
        vocabulary=config.vocab_size,
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


def _check_search(config: Any, generation: Any) -> None:
    """Refuse what transformers would search by, and CTranslate2 would not."""
    ends, start = generation.eos_token_id, generation.decoder_start_token_id
    asked = {name: getattr(generation, name, None) for name in NOT_SEARCHED_BY}
    found = {name: value for name, value in asked.items() if value not in (None, 0, 1, [])}
    if isinstance(ends, list) and len(ends) > 1:
        found["eos_token_id"] = ends
    if config.decoder_start_token_id is not None and start not in (
        None,
        config.decoder_start_token_id,
    ):
        found["decoder_start_token_id"] = start
    if found:
        name, value = next(iter(found.items()))
        raise UserError(
            "model.source",
            f"must have no {name} in its generation_config.json that CTranslate2 does not follow",
            given=value,
            remedy="Take it out, so that the original model answers without it, too",
        )


def _convert(folder: Path, precision: str, sha256: str, progress: Progress) -> Path:
    inputs = {
        "model": sha256,
        "precision": precision,
        "versions": versions_of("ctranslate2", "transformers"),
        "code": code_hash("building/generation/text2text.py", "building/generation/converting.py"),
    }

    def work(target: Path) -> None:
        from triptych.building.generation.converting import convert

        progress("convert", f"to CTranslate2, {precision} ...")
        convert(folder, target / _MODEL, precision)

    return cached_stage("ctranslate2", inputs, work, progress).folder / _MODEL
