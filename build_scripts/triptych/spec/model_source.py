"""Where a model's files are, and what they say: `ModelSource` -> local folder -> `ModelFacts`."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.spec.model_classes import ModelConfig, SentenceConfig, read_activation, read_labels
from triptych.spec.model_facts import ImageFacts, ModelFacts
from triptych.spec.model_hub import FILES, WEIGHTS, has_weights, hub_folder
from triptych.spec.model_own_code import refuse_own_code
from triptych.spec.sentence_modules import read_json, read_modules
from triptych.spec.spec_fields import ModelSource

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
OUT_OF_REACH = 1 << 30


def locate(model: ModelSource, pipeline_folder: Path) -> Path:
    """The local folder with the model's files; a Hub model is fetched into the ordinary cache.

    Raises:
        UserError: nothing there, not a model, or one with code of its own.
    """
    folder = find_folder(model, pipeline_folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            "model.source",
            "must hold a Hugging Face model (config.json, weights, tokenizer)",
            given=f"{model.source}: no config.json in it",
            remedy="Name the folder that `save_pretrained` wrote",
        )
    if not has_weights(folder):
        raise UserError(
            "model.source",
            "must hold weights (*.safetensors or pytorch_model*.bin)",
            given=f"{model.source}: none in it",
            remedy="Save the model with `save_pretrained`, or fetch its weights",
        )
    refuse_own_code(folder)
    return folder


def find_folder(model: ModelSource, pipeline_folder: Path) -> Path:
    """The local folder that a source names, whatever is in it.

    Raises:
        UserError: there is none.
    """
    if model.source.startswith("package:"):
        return _package_folder(model.source)
    if (pipeline_folder / model.source).is_dir():
        return (pipeline_folder / model.source).resolve()
    if model.source.startswith((".", "/", "~")) or model.source.count("/") != 1:
        raise UserError(
            "model.source",
            "must be a folder, a Hub id `owner/name`, or `package:<module>/<folder>`",
            given=model.source,
            remedy="A relative folder is looked up from the pipeline's own folder",
        )
    return hub_folder(model)


def _package_folder(source: str) -> Path:
    module, _, inner = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "model.source",
            "must name an installed package",
            given=source,
            remedy=f"pip install the package of `{module}`, or name a folder or a Hub id",
        )
    return Path(next(iter(spec.submodule_search_locations))) / inner


class _TransformerConfig(TypedDict, total=False):
    """Fields of ``sentence_bert_config.json``."""

    do_lower_case: bool
    max_seq_length: int | None


def read_facts(folder: Path, sha256: str | None = None) -> ModelFacts:
    """What the files in `folder` say of the model.

    Args:
        folder: of the model.
        sha256: its `hash_model`, where that is known: weights take long to read.

    Raises:
        UserError: a setting that changes results and is not known here.
    """
    config: ModelConfig = read_json(folder / "config.json")
    transformer: _TransformerConfig = read_json(folder / "sentence_bert_config.json", default={})
    sentence: SentenceConfig = read_json(folder / "config_sentence_transformers.json", default={})
    pooling, head = read_modules(folder, sentence)
    labels = read_labels(config)
    image = _image_facts(folder)
    texts = _TextFacts() if image and not _has_vocabulary(folder) else _read_texts(folder, config)

    def size(name: str) -> int | None:
        own: Mapping[str, object] = config
        value = own.get(name) if image else _setting(folder, config, name)
        return value if isinstance(value, int) else None

    return ModelFacts(
        sha256=sha256 or hash_model(folder),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        hidden_size=0 if image else _hidden_size(folder, config),
        max_length=_max_length(folder, config, transformer),
        pad_token_id=config.get("pad_token_id") or 0,
        lowercase=bool(transformer.get("do_lower_case", False)),
        pooling=pooling,
        head=head,
        prompts=sentence.get("prompts") or {},
        default_prompt=sentence.get("default_prompt_name"),
        labels=labels,
        activation=read_activation(config, sentence, len(labels)),
        segments=texts.segments,
        mask_token=texts.mask_token,
        mask_token_id=texts.mask_token_id,
        unk_token_id=texts.unk_token_id,
        vocabulary=config.get("vocab_size"),
        image=image,
        layers=size("num_hidden_layers"),
        heads=size("num_attention_heads"),
        intermediate_size=size("intermediate_size"),
    )


def read_tokenizer(folder: Path) -> str:
    """The model's tokenizer as the text of a ``tokenizer.json``, without padding.

    Where it cuts long texts at their beginning, the text says so, with a limit out of reach;
    otherwise it says nothing of truncation. It is loaded through transformers, which applies
    ``tokenizer_config.json`` and converts the older formats, so that it tokenizes exactly as the
    reference does.

    Raises:
        UserError: the folder has no tokenizer, or only one without a fast form.
    """
    tokenizer = _load_tokenizer(folder)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    if tokenizer.truncation_side != "right":
        backend.enable_truncation(OUT_OF_REACH, direction=tokenizer.truncation_side)
    text: str = backend.to_str()
    return text


class _TextFacts(NamedTuple):
    """The part of `ModelFacts` that the tokenizer knows."""

    segments: int = 1
    mask_token: str | None = None
    mask_token_id: int | None = None
    unk_token_id: int | None = None


def _read_texts(folder: Path, config: ModelConfig) -> _TextFacts:
    tokenizer = _load_tokenizer(folder)
    return _TextFacts(
        segments=_segments(tokenizer, _setting(folder, config, "type_vocab_size") or 1),
        mask_token=tokenizer.mask_token,
        mask_token_id=tokenizer.mask_token_id,
        unk_token_id=tokenizer.unk_token_id,
    )


def _segments(tokenizer: Any, known_to_model: int) -> int:
    """Kinds of segment in use: those the model tells apart and the tokenizer marks."""
    pair = tokenizer("one", "two").get("token_type_ids")
    if known_to_model == 1 or pair is None or not any(pair):
        return 1
    single = tokenizer("one")["token_type_ids"]
    if any(single) or pair != sorted(pair) or max(pair) != 1:
        raise UserError(
            "model.source",
            "must have a tokenizer whose token types are 0 for a first text, 1 for a second one",
            given=f"{pair} for two words",
            remedy="Choose a model with such token types, or none",
        )
    return known_to_model


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        # Without any vocabulary transformers returns an empty tokenizer without an error.
        if not _has_vocabulary(folder):
            raise FileNotFoundError(f"none of {', '.join(VOCABULARIES)}")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            "model.source",
            "must hold a tokenizer with a fast form (tokenizer.json)",
            given=" ".join(str(error).split())[:200],
            remedy="Save the model's fast tokenizer into the folder",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            "model.source",
            "must have a tokenizer with a fast form",
            given=f"{type(tokenizer).__name__}, of which transformers has none",
            remedy="Choose another model, or put a tokenizer.json that makes the same tokens into "
            "the folder and name PreTrainedTokenizerFast in tokenizer_config.json",
        )
    return tokenizer


def _has_vocabulary(folder: Path) -> bool:
    return any(True for pattern in VOCABULARIES for _ in folder.glob(pattern))


def _image_facts(folder: Path) -> ImageFacts | None:
    if not (folder / "preprocessor_config.json").is_file():
        return None
    from triptych.spec.image_source import read_image_facts

    return read_image_facts(folder)


def _hidden_size(folder: Path, config: ModelConfig) -> int:
    size = _setting(folder, config, "hidden_size")
    if not isinstance(size, int):
        raise UserError(
            str(folder / "config.json"),
            "must give the size of a token's vector (hidden_size)",
            given=config.get("model_type", "no model_type"),
            remedy="Choose an encoder model",
        )
    return size


def _setting(folder: Path, config: ModelConfig, name: str) -> Any:
    """A setting by its usual name: transformers knows each model's own one, and its default."""
    own: Mapping[str, object] = config
    if name in own:
        return own[name]
    from transformers import AutoConfig

    try:
        config_of = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return getattr(config_of, name, None)
    except Exception as error:
        raise UserError(
            str(folder / "config.json"),
            "must be a config transformers can load",
            given=" ".join(str(error).split())[:200],
            remedy="Check model_type, and that transformers is recent enough for the model",
        ) from error


def _max_length(folder: Path, config: ModelConfig, transformer: _TransformerConfig) -> int:
    """The tightest of the limits the files give; positions that padding takes are not counted."""
    tokenizer = read_json(folder / "tokenizer_config.json", default={})
    positions = config.get("max_position_embeddings")
    if positions and positions % 8:  # RoBERTa and its kin: positions up to the pad's are not used
        positions -= (config.get("pad_token_id") or 0) + 1
    limits = (transformer.get("max_seq_length"), tokenizer.get("model_max_length"), positions)
    known = [int(limit) for limit in limits if limit and limit < 1_000_000]
    return min(known) if known else 512


def hash_model(folder: Path) -> str:
    """Hash over names and contents of the files that decide a model's results, in hex."""
    digest = hashlib.sha256()
    patterns = (*FILES, *WEIGHTS[1:], "*/*.json", "*/*.safetensors", "*/pytorch_model.bin")
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()
