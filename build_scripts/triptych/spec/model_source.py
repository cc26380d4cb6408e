"""Where a model's files are, and what they say: `ModelSource` -> local folder -> `ModelFacts`.

Under which license a model's own files say that it is.

A model of the Hugging Face Hub: fetched into the ordinary cache, or found there.

Refusing a model folder that brings code of its own: Triptych runs none of it.

What a model's files say, read once: transformers, which reads them, takes seconds to load.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from pydantic import TypeAdapter

from triptych.base.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.files import parse_yaml
from triptych.spec.fields import ModelSource
from triptych.spec.model_facts import ImageFacts, ModelFacts
from triptych.spec.model_text import (
    ModelConfig,
    SentenceConfig,
    read_activation,
    read_json,
    read_labels,
    read_modules,
)

CARD = "README.md"
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def read_license(folder: Path) -> str:
    """The `license` of the card in a model's folder, as it names it; empty where it names none."""
    try:
        head = _HEAD.match((folder / CARD).read_text(encoding="utf-8").replace("\r\n", "\n"))
        fields = parse_yaml(head[1]) if head else None
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    found = fields.get("license_name") or fields.get("license") or ""
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.safetensors")
FOREIGN = ("onnx/*", "openvino/*", "*.onnx")


def hub_folder(model: ModelSource) -> Path:
    """The local folder of a model that is named by its Hub id.

    Raises:
        UserError: the Hub has none, or cannot be reached and none is cached.
    """
    from huggingface_hub import snapshot_download

    # A full commit never changes: what is cached of it needs no look at the Hub.
    cached_first = model.revision is not None and len(model.revision) == 40

    def fetch(*patterns: str) -> Path:
        def download(*, local: bool) -> Path:
            return Path(
                snapshot_download(
                    model.source,
                    revision=model.revision,
                    allow_patterns=[*patterns],
                    ignore_patterns=[*FOREIGN],
                    local_files_only=local,
                )
            )

        try:
            return download(local=cached_first)
        except Exception as first:
            try:
                return download(local=not cached_first)
            except Exception as second:  # what the Hub said tells more than an empty cache
                raise (second if cached_first else first) from None

    try:
        folder = fetch(*FILES, CARD)
        if not has_weights(folder):
            folder = fetch(*FILES, CARD, WEIGHTS[1])
    except Exception as error:
        raise _not_found(model, error) from error
    return folder


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of a model."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def _not_found(model: ModelSource, error: Exception) -> UserError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = f"{model.source} (revision {model.revision or 'main'})"
    reason = " ".join(str(error).split())[:200]
    remedy = "Check the name, the revision, `hf auth login` and the network"
    if isinstance(error, LocalEntryNotFoundError):
        cause = " ".join(str(error.__cause__ or "").split())[:100]
        why = (
            "HF_HUB_OFFLINE forbids to ask the Hub"
            if constants.is_offline_mode()
            else f"the Hub cannot be reached ({cause or 'no answer'})"
        )
        reason = f"{why}, and {constants.HF_HUB_CACHE} does not have it"
        remedy = (
            "Name a local folder as model.source; or fetch it where there is a network, copy the "
            "cache and let HF_HOME name it"
            + ("; or unset HF_HUB_OFFLINE" if constants.is_offline_mode() else "")
        )
    return UserError(
        "model.source",
        "must be a model the Hugging Face Hub has, or one cached before",
        given=f"{wanted}: {reason}",
        remedy=remedy,
    )


_LIBRARY = "sentence_transformers."


def refuse_own_code(folder: Path) -> None:
    """Raises a `UserError` where the files in `folder` name code outside the libraries.

    transformers would ask on the terminal and run it, or take a class of its own instead, whose
    numbers need not be the model's.
    """
    for path, entry in _own_code(folder):
        raise UserError(
            "model.source",
            "must be a model without code of its own, which is never run",
            given=f"{entry} in {path}",
            remedy="Choose a model that transformers itself has; if it has this one, remove that "
            "entry from a copy of the folder",
        )


def _own_code(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files and the entries in them that name code."""
    for path in sorted(folder.glob("*config.json")):
        for entry in _entries(read_json(path)):
            yield path, entry
    for module in read_json(folder / "modules.json", default=[]):
        if not module["type"].startswith(_LIBRARY):
            yield folder / "modules.json", module["type"]


def _entries(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _entries(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            is_kernel = key.endswith("_implementation") and "/" in str(item)  # of the Hub
            if is_kernel or (key == "auto_map" and item):
                yield key
            yield from _entries(item)


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


CODE = ("spec/model_*.py", "spec/image_*.py", "spec/model_text.py")


def read_model(folder: Path, progress: Progress) -> tuple[ModelFacts, Path | None]:
    """The facts of the model in `folder`, and the runtime's ``tokenizer.json`` in the cache.

    A model of images has no tokenizer.

    Raises:
        UserError: a setting that changes results and is not known here; no fast tokenizer.
    """
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        facts = read_facts(folder, sha256)
        (target / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")
        if facts.image is None:
            (target / "tokenizer.json").write_text(read_tokenizer(folder), encoding="utf-8")

    stage = cached_stage("model", inputs, work, progress)
    facts = TypeAdapter(ModelFacts).validate_json((stage.folder / "facts.json").read_bytes())
    return facts, stage.folder / "tokenizer.json" if facts.image is None else None
