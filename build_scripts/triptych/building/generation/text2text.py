"""Inputs of a build of a pipeline that summarizes or translates: spec, model, prompts.

An encoder-decoder model of transformers is converted for CTranslate2 by its converter. Marian's
tokenizer has no fast form and is written as files that the steps read: ``source.spm`` splits a text
into pieces, and ``vocab.json`` has the ids of both languages.
"""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.extras import imports_of_extra
from triptych.building.generation.inputs import (
    GeneratingInputs,
    Prompt,
    PromptSettings,
    make_prompts,
    max_length_of,
    read_prompt_lines,
)
from triptych.building.generation.model import (
    GenerationInfo,
    GenerationModel,
    read_config,
    read_generation_config,
)
from triptych.models.fields import TokenizerSource
from triptych.models.source import hash_model, locate
from triptych.models.tokenizer import write_tokenizers
from triptych.repository.config_text import check_config_texts
from triptych.runtime.engine_ctranslate2 import COMPUTE_TYPES, VOCABULARY_FILE
from triptych.runtime.generation_messages import TOKENIZER_FILE
from triptych.runtime.prompts import PIECES_FILE, SPACE
from triptych.spec.generation_fields import Text2TextSpec
from triptych.spec.traffic import TRAFFIC_FILE

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

SOURCE_FILE = "source.spm"
UNIGRAM = 1
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
"""Numbers of ``sentencepiece_model.proto``: of a model's type, and of its pieces."""
MARGINS = r"\A +| +\z"


def is_marian(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` is Marian's, which has no fast form."""
    return (folder / SOURCE_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file()


@contextmanager
def without_advice() -> Iterator[None]:
    """Suppress the advice of Marian's tokenizer to install a package, while the block runs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        yield


def write_marian(folder: Path, source: Path, target: Path) -> None:
    """Write the files of preprocess into `source`, those of postprocess into `target`.

    Raises:
        UserError: The tokenizer is not like those of published models, or sentencepiece is missing.
    """
    with imports_of_extra("text2text", "model.source"):
        import sentencepiece  # noqa: F401  (for Marian's tokenizer)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.separate_vocabs:
        raise _refused("a vocabulary for each language", "Choose a model with one for both")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    model = _read(folder / SOURCE_FILE)
    (source / TOKENIZER_FILE).write_text(_finds_pieces(model).to_str(), encoding="utf-8")
    known = {
        "ids": vocabulary,
        "special": sorted(tokenizer.added_tokens_encoder, key=len, reverse=True),
        "unknown": tokenizer.unk_token_id,
        "end": tokenizer.eos_token_id,
        "characters": b64encode(model.normalizer_spec.precompiled_charsmap).decode(),
    }
    (source / PIECES_FILE).write_text(json.dumps(known), encoding="utf-8")
    (target / TOKENIZER_FILE).write_text(_decodes(tokenizer, vocabulary), encoding="utf-8")


def _read(path: Path) -> ModelProto:
    """Read a model of sentencepiece as its protobuf message."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    model.ParseFromString(path.read_bytes())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    plain = normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces
    plain = plain and normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    kinds = {piece.type for piece in model.pieces}
    if trainer.model_type != UNIGRAM or not kinds <= {NORMAL, UNKNOWN, CONTROL} or not plain:
        raise _refused("source.spm of another kind", "Choose a model with a unigram one")
    return model


def _finds_pieces(model: ModelProto) -> Tokenizer:
    # With a space before it, a special piece matches no text: preprocess replaces spaces there.
    pieces = [
        (one.piece if one.type == NORMAL else f" {one.piece}", one.score) for one in model.pieces
    ]
    return Tokenizer(models.Unigram(pieces, unk_id=model.trainer_spec.unk_id))


def _decodes(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> str:
    """Return a tokenizer that is used for decoding only."""
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=tokenizer.unk_token))
    special = [AddedToken(token, special=True) for token in tokenizer.added_tokens_encoder]
    made.add_special_tokens(special)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Replace(Regex(MARGINS), "")]
    )
    text: str = made.to_str()
    return text


def _refused(given: str, remedy: str) -> UserError:
    return UserError(
        "model.source",
        "must have a tokenizer like those of Marian's published models",
        given=given,
        remedy=remedy,
    )


def convert(folder: Path, target: Path, precision: str) -> None:
    """Write the converted model of `folder` to the new folder `target`.

    Raises:
        UserError: CTranslate2 is not installed, or does not convert the model.
    """
    with imports_of_extra("text2text", "core.backend"):
        from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]  # it has no types
        def load_model(
            self, model_class: type[PreTrainedModel], *places: object, **named: object
        ) -> PreTrainedModel:
            model = super().load_model(model_class, *places, **named)
            # transformers normalizes after each block of BART regardless of the file, and newer
            # configurations lack the fields that the converter reads.
            if model_class.__name__ == "BartForConditionalGeneration":
                model.config.normalize_before = False
                model.config.normalize_embedding = True
            # T5 1.1, Flan-T5 and mT5 do not scale the input of the last layer. The converter
            # decides this by tied embeddings, which newer configurations set for all T5 models.
            elif model_class.__name__ in (
                "T5ForConditionalGeneration",
                "MT5ForConditionalGeneration",
            ):
                scaled = getattr(model.config, "scale_decoder_outputs", False)
                model.config.tie_word_embeddings = scaled
            return model

    try:
        with without_advice():
            Converter(str(folder)).convert(str(target), quantization=COMPUTE_TYPES[precision])
    except (ValueError, KeyError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise UserError(
            "model.source",
            "must be a model that CTranslate2 can convert",
            given=" ".join(str(error).split())[:300],
            remedy="Choose another model",
        ) from error
    if not (target / VOCABULARY_FILE).is_file():
        raise UserError(
            "model.source",
            "must have one vocabulary for input and output",
            given="two vocabularies",
            remedy="Choose another model",
        )


ARCHITECTURES = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MarianMTModel",
)
"""Model classes that CTranslate2 converts and that need no target language in the request."""

Setting = bool | int | float | str

GREEDY: Mapping[str, Setting] = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "early_stopping": False,
}
"""Search settings of transformers if a model's files set none."""

NOT_SEARCHED_BY = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "diversity_penalty",
    "forced_decoder_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "num_beam_groups",
    "penalty_alpha",
    "guidance_scale",
    "renormalize_logits",
    "exponential_decay_length_penalty",
    "stop_strings",
    "watermarking_config",
    "bad_words_ids",
    "force_words_ids",
    "constraints",
    "dola_layers",
)
"""Fields of ``generation_config.json`` that CTranslate2 does not follow, unless null, 0 or 1."""

LIMITS_OF_OTHER_SEARCH: Mapping[str, float | None] = {
    "exact_prefix": None,
    "margin_at_difference": 0.25,
}
"""Limits for several beams with `no_repeat_ngram_size`. Another beam may win, because CTranslate2
renormalizes probabilities after it excludes a token and transformers does not."""

LIMITS_WITHOUT_LOGPROBS: Mapping[str, float | None] = dict.fromkeys(
    ("logprob_difference", "p99_logprob_difference", "perplexity_ratio")
)
"""Limits for live answers of a search with several beams or excluded tokens, for which a server
gives no log-probabilities or changed ones."""

MAX_BY_DEFAULT = 512
"""Maximum number of tokens in a text if neither the model nor its tokenizer has a limit."""

_MODEL, _INFO, _DECODER = "model", "facts.json", "decoder"


@dataclass(frozen=True)
class SearchInfo:
    """Facts about the answers of a model, from its files."""

    answer_begins: tuple[int, ...]  # Token ids at the beginning of every answer
    end: int  # Id of the token that ends an answer
    # Search settings of the model's ``generation_config.json``, as `GREEDY`.
    own: dict[str, Setting]
    samples: bool = False  # Whether ``generate`` samples an answer by default
    # Maximum number of tokens of an answer in that file; None for none.
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Text2TextInputs(GeneratingInputs):
    """Inputs of a build of a pipeline that summarizes or translates; see `GeneratingInputs`.

    Attributes:
        weights: Folder of the model as CTranslate2 converted it.
        original: Folder of the model's files.
        search: Search settings as `GREEDY`, of the spec, else of the model.
    """

    context_tokens = 0
    model_patterns = ("*",)
    batching = "static batches of like length"
    engine_packages = ("ctranslate2",)
    runs_in_own_environment = False

    spec: Text2TextSpec
    original: Path
    answers: SearchInfo
    search: dict[str, Setting]

    @property
    def other_search(self) -> str:
        beams, penalty, early = (
            self.search[name] for name in ("num_beams", "length_penalty", "early_stopping")
        )
        if beams == 1 or early == "never" or (early is True) == bool(penalty):
            return ""
        if early:
            return (
                "With length_penalty 0 CTranslate2 ends a search when its best beam has ended, "
                "transformers when as many answers as beams have ended (core.early_stopping true); "
                "answers may differ. core.early_stopping: never is the same in both"
            )
        return (
            "With core.early_stopping false transformers ends a search by an estimate that "
            "CTranslate2 does not have. CTranslate2 searches on, and may find a likelier answer "
            "than transformers does. core.early_stopping: never or true is the same in both"
        )

    @property
    def prompt_settings(self) -> PromptSettings:
        return {
            "special_tokens": {},
            "max_length": self.max_length,
            "max_answer": self.spec.core.max_new_tokens,
            "prefix": self.spec.prefix,
            "message_special_tokens": "text",
            "vocabulary": self.model.info.vocabulary,
        }

    def room(self, prompt: Prompt) -> int:
        return self.spec.core.max_new_tokens

    def other_limits(self, *, live: bool) -> Mapping[str, float | None]:
        beams, bound = self.search["num_beams"] != 1, bool(self.search["no_repeat_ngram_size"])
        unlike = live and (beams or bound or self.search["min_new_tokens"])
        return {
            **(LIMITS_OF_OTHER_SEARCH if beams and bound else {}),
            **(LIMITS_WITHOUT_LOGPROBS if unlike else {}),
        }

    @property
    def search_key(self) -> object:
        return [self.search, self.spec.prefix]

    @property
    def engine_settings(self) -> dict[str, object]:
        core = self.spec.core
        return {
            "precision": core.precision,
            "max_sequences": core.max_num_seqs,
            "threads": core.threads or 0,
            "answer_begins": list(self.answers.answer_begins),
            "stop_token_ids": [self.answers.end],
            **self.search,
        }


def read_text2text(spec: Text2TextSpec, progress: Progress) -> Text2TextInputs:
    """Resolve the model, convert it, read the traffic. Writes only to the cache.

    Raises:
        UserError: The spec, the model or the traffic is wrong.
    """
    check_config_texts(spec.serving.config)
    lines = read_prompt_lines(spec.folder / TRAFFIC_FILE)
    original = locate(spec.model, spec.folder)
    model, answers = _read_model(original, progress, spec.tokenizer.source)
    progress("source", f"{model.info.architecture}, from {spec.model.source}")
    named = spec.core.model_dump(include=set(GREEDY), exclude_none=True)
    inputs = Text2TextInputs(
        spec=spec,
        model=model,
        weights=_convert(original, spec.core.precision, model.info.sha256, progress),
        max_length=max_length_of(spec, model.info),
        prompts=(),
        original=original,
        answers=answers,
        search={**answers.own, **named},
    )
    for words in (inputs.other_search, *_other_answers(spec, answers)):
        if words:
            progress("WARNING", words)
    return replace(inputs, prompts=make_prompts(inputs, lines, progress))


def _other_answers(spec: Text2TextSpec, answers: SearchInfo) -> Iterator[str]:
    """Yield warnings of answers that end or are chosen otherwise than by ``generate``."""
    most, least = spec.core.max_new_tokens, answers.max_new_tokens
    if least is not None and least < most and "max_new_tokens" not in spec.core.model_fields_set:
        yield (
            f"generation_config.json ends an answer after {least} tokens, the pipeline after "
            f"{most}; set core.max_new_tokens"
        )
    if answers.samples:
        yield (
            "generation_config.json has do_sample: transformers samples an answer, and the "
            "pipeline searches for the likeliest one unless a request has a temperature"
        )


def _read_model(
    folder: Path, progress: Progress, source: TokenizerSource | None
) -> tuple[GenerationModel, SearchInfo]:
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "tokenizer": source,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(
            "building/generation/text2text.py",
            "models/source.py",
            "models/tokenizer.py",
        ),
    }

    def work(target: Path) -> None:
        with without_advice():
            if is_marian(folder):
                (target / _DECODER).mkdir()
                write_marian(folder, target, target / _DECODER)
            else:
                write_tokenizers(folder, target, source)
            info, answers = _read_info(folder, sha256)
        both = {"facts": asdict(info), "answers": asdict(answers)}
        (target / _INFO).write_text(json.dumps(both), encoding="utf-8")

    stage = cached_stage("text2text-model", inputs, work, progress)
    both = json.loads((stage.folder / _INFO).read_bytes())
    info = TypeAdapter(GenerationInfo).validate_python(both["facts"])
    answers = TypeAdapter(SearchInfo).validate_python(both["answers"])
    model = GenerationModel(info, stage.folder / TOKENIZER_FILE, None)
    if (stage.folder / PIECES_FILE).is_file():
        decoder = stage.folder / _DECODER / TOKENIZER_FILE
        model = replace(model, decoder=decoder, pieces=stage.folder / PIECES_FILE)
    return model, answers


def _read_info(folder: Path, sha256: str) -> tuple[GenerationInfo, SearchInfo]:
    from transformers import AutoTokenizer

    config = read_config(folder)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            "model.source",
            "must be an encoder-decoder model of a supported class",
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
    info = GenerationInfo(
        sha256=sha256,
        architecture=architecture,
        max_length=min(known, default=MAX_BY_DEFAULT),
        stop_token_ids=(ends if isinstance(ends, int) else ends[0],),
        special_tokens={},
        kv_values=0,
        kv_heads=0,
        vocabulary=config.vocab_size,
    )
    first = generation.forced_bos_token_id
    own = {
        "num_beams": generation.num_beams or 1,
        "length_penalty": generation.length_penalty,
        "no_repeat_ngram_size": generation.no_repeat_ngram_size,
        # transformers counts the start token of the decoder in min_length.
        "min_new_tokens": max((generation.min_length or 0) - 1, generation.min_new_tokens or 0, 0),
        "early_stopping": generation.early_stopping,
    }
    said = {name: value for name, value in own.items() if value is not None}
    most = generation.max_new_tokens
    if most is None and generation.max_length is not None:
        most = generation.max_length - 1  # it counts the start token of the decoder
    return info, SearchInfo(
        answer_begins=() if first is None else (first,),
        end=info.stop_token_ids[0],
        own={**GREEDY, **said},
        samples=bool(generation.do_sample),
        max_new_tokens=most,
    )


def _check_search(config: PretrainedConfig, generation: GenerationConfig) -> None:
    """Raise a `UserError` for search settings that CTranslate2 does not follow."""
    ends, start = generation.eos_token_id, generation.decoder_start_token_id
    asked = {name: getattr(generation, name, None) for name in NOT_SEARCHED_BY}
    # Marian's converter excludes the padding token.
    if generation.bad_words_ids == [[config.pad_token_id]] and config.model_type == "marian":
        del asked["bad_words_ids"]
    found = {
        name: value
        for name, value in asked.items()
        if value not in (None, 0, 1, []) or value is True
    }
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
            remedy="Remove it, so that the original model answers without it too",
        )


def _convert(folder: Path, precision: str, sha256: str, progress: Progress) -> Path:
    inputs = {
        "model": sha256,
        "precision": precision,
        "versions": versions_of("ctranslate2", "transformers"),
        "code": code_hash("building/generation/text2text.py"),
    }

    def work(target: Path) -> None:
        progress("convert", f"to CTranslate2, {precision} ...")
        convert(folder, target / _MODEL, precision)

    return cached_stage("ctranslate2", inputs, work, progress).folder / _MODEL
