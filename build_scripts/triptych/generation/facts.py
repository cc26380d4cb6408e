"""What the files of a model that generates text say of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from triptych.cache import cached_stage, code_hash, versions_of
from triptych.errors import Progress, UserError
from triptych.generation.quantisation import Quantisation, read_quantisation
from triptych.model.source import hash_model, read_tokenizer
from triptych.runtime.generation_wire import TOKENIZER_FILE
from triptych.runtime.prompts import TEMPLATE_FILE

FACTS_FILE = "facts.json"


@dataclass(frozen=True)
class GenerationFacts:
    """One model.

    Attributes:
        sha256: of the files that decide its results.
        architecture: class of transformers.
        max_length: tokens of a prompt and its answer together, at most.
        stop_token_ids: tokens that end an answer.
        special_tokens: name to text, as chat templates use them.
        kv_values: numbers that the KV cache holds for a token.
        kv_heads: that these are of: more GPUs than heads hold some of them twice.
        quantisation: of the weights, by the model's files; None where there is none.
    """

    sha256: str
    architecture: str
    max_length: int
    stop_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    kv_values: int
    kv_heads: int
    quantisation: Quantisation | None = None


@dataclass(frozen=True)
class GenerationModel:
    """A model's facts, and the files that the steps read, in the cache.

    Attributes:
        tokenizer: that makes ids of a text.
        chat_template: None where the model has none.
        decoder: that makes text of ids, where it is another tokenizer.
        pieces: see `runtime.source_pieces`; None where the tokenizer's ids are the model's.
    """

    facts: GenerationFacts
    tokenizer: Path
    chat_template: Path | None
    decoder: Path | None = None
    pieces: Path | None = None

    def decoding(self) -> Tokenizer:
        """What makes text of ids."""
        return Tokenizer.from_file(str(self.decoder or self.tokenizer))


def read_generation_model(folder: Path, progress: Progress) -> GenerationModel:
    """Read the model in `folder`, once: transformers, which does, takes seconds to load.

    Raises:
        UserError: a model that does not generate text, or without a fast tokenizer.
    """
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "template": _text_of(folder / TEMPLATE_FILE),
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash("generation/facts.py", "generation/quantisation.py", "model/source.py"),
    }

    def work(target: Path) -> None:
        facts, template = _read(folder, sha256)
        (target / TOKENIZER_FILE).write_text(read_tokenizer(folder), encoding="utf-8")
        if template is not None:
            (target / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        (target / FACTS_FILE).write_text(json.dumps(asdict(facts)), encoding="utf-8")

    stage = cached_stage("generation-model", inputs, work, progress)
    facts = TypeAdapter(GenerationFacts).validate_json((stage.folder / FACTS_FILE).read_bytes())
    template = stage.folder / TEMPLATE_FILE
    return GenerationModel(
        facts, stage.folder / TOKENIZER_FILE, template if template.is_file() else None
    )


def _read(folder: Path, sha256: str) -> tuple[GenerationFacts, str | None]:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(
            "model.source",
            "must be a model that goes on with a text (a causal language model)",
            given=architecture,
            remedy="Choose another model, or another task",
        )
    text_config = config.get_text_config()
    generation = read_generation_config(folder, config)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    stops = generation.eos_token_id
    heads = text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    facts = GenerationFacts(
        sha256=sha256,
        architecture=architecture,
        max_length=text_config.max_position_embeddings,
        stop_token_ids=tuple([stops] if isinstance(stops, int) else stops or ()),
        special_tokens=_special_tokens(tokenizer),
        kv_values=2 * text_config.num_hidden_layers * kv_heads * head_size,
        kv_heads=kv_heads,
        quantisation=read_quantisation(getattr(config, "quantization_config", None)),
    )
    return facts, _chat_template(tokenizer)


def read_generation_config(folder: Path, config: Any) -> Any:
    """How a model generates, as transformers has it: by its own file, else by its configuration."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    return {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }


def _chat_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
