"""Locate a model's files and read its information: `ModelSource` to folder to `ModelInfo`.

Models that bring their own code are rejected, because Triptych never runs it. Results are cached,
because transformers takes seconds to load.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import TypeAdapter
from typing_extensions import Unpack

from triptych.base.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.files import parse_yaml
from triptych.models.adapter import refuse_adapter
from triptych.models.fields import ModelSource, TokenizerSource
from triptych.models.image_vectors import (
    EOS,
    PADDED_TOWERS,
    TEXT_TOWERS,
    ImagePooling,
    read_image_vectors,
    read_space,
)
from triptych.models.info import Activation, Dense, ImageInfo, Loader, LogitScore, ModelInfo, Role
from triptych.models.roles import read_roles
from triptych.models.settings import read_prompts, read_saved
from triptych.models.text import (
    MASK,
    ModelConfig,
    Module,
    check_cross_encoder,
    find_clip,
    is_routed,
    read_activation,
    read_entailment,
    read_json,
    read_labels,
    read_logit_score,
    read_module_list,
    read_modules,
    read_pair_template,
    read_relevance,
    read_settings_of,
)
from triptych.models.token_layers import TOKEN_LAYERS
from triptych.models.tokenizer import has_vocabulary, load_tokenizer, write_tokenizers
from triptych.runtime.decode_queries import WEIGHTS_FILE

CARD = "README.md"
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def read_license(folder: Path) -> str:
    """Return the `license` that the model card in a folder names; empty if it names none."""
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
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.safetensors", *TOKEN_LAYERS)
FOREIGN = ("onnx/*", "openvino/*", "*.onnx")


def hub_folder(model: ModelSource) -> Path:
    """Return the local folder of a model on the Hugging Face Hub, downloading it if necessary.

    Raises:
        UserError: The Hub has no such model, or cannot be reached and the cache has none.
    """
    from huggingface_hub import snapshot_download

    # A full commit never changes, so the cache is valid without a request to the Hub.
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
            except Exception as second:  # the Hub's error explains more than an empty cache
                raise (second if cached_first else first) from None

    try:
        folder = fetch(*FILES, CARD)
        if not has_weights(folder):
            folder = fetch(*FILES, CARD, WEIGHTS[1])
    except Exception as error:
        raise _not_found(model, error) from error
    return folder


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of a whole model."""
    return any(
        path.is_file() and not path.name.startswith("adapter_model")
        for pattern in WEIGHTS
        for path in folder.glob(pattern)
    )


def _not_found(model: ModelSource, error: Exception) -> UserError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = f"{model.source} (revision {model.revision or 'main'})"
    reason = " ".join(str(error).split())[:200]
    remedy = "Check the name, the revision, `hf auth login` and the network"
    if isinstance(error, LocalEntryNotFoundError):
        cause = " ".join(str(error.__cause__ or "").split())[:100]
        why = (
            "HF_HUB_OFFLINE forbids requests to the Hub"
            if constants.is_offline_mode()
            else f"the Hub cannot be reached ({cause or 'no answer'})"
        )
        reason = f"{why}, and {constants.HF_HUB_CACHE} does not have it"
        remedy = (
            "Set model.source to a local folder; or download the model on another machine, copy "
            "the cache and set HF_HOME"
            + ("; or unset HF_HUB_OFFLINE" if constants.is_offline_mode() else "")
        )
    return UserError(
        "model.source",
        "must be a model on the Hugging Face Hub, or in its cache",
        given=f"{wanted}: {reason}",
        remedy=remedy,
    )


_LIBRARIES = ("sentence_transformers.", "pylate.models.Dense.Dense")
"""Beginnings of classes of sentence-transformers; it takes its own class for that of PyLate."""


def refuse_own_code(folder: Path) -> None:
    """Raise a `UserError` if files in `folder` name code outside the libraries.

    transformers would ask on the terminal and run it, or use a class of its own whose results may
    differ from the model's.
    """
    for path, entry in _own_code(folder):
        raise UserError(
            "model.source",
            "must be a model without its own code, because such code is never run",
            given=f"{entry} in {path}",
            remedy="Choose a model that transformers supports; if it supports this one, remove the "
            "entry from a copy of the folder",
        )


def _own_code(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield files and the entries in them that name code."""
    for path in sorted(filter(Path.is_file, folder.glob("*config.json"))):
        for entry in _entries(read_json(path, kind=object)):
            yield path, entry
    for module in read_module_list(folder):
        if not module["type"].startswith(_LIBRARIES):
            yield folder / "modules.json", module["type"]


def _entries(value: object) -> Iterator[str]:
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
            for key, item in value.items():
                is_kernel = (
                    key.endswith("_implementation") and isinstance(item, str) and "/" in item
                )
                if is_kernel or (key == "auto_map" and item):
                    yield key


def locate(model: ModelSource, pipeline_folder: Path) -> Path:
    """Return the local folder with the model's files, downloading a Hub model into the cache.

    Raises:
        UserError: The folder is missing, is not a model, or has its own code.
    """
    folder = find_folder(model, pipeline_folder)
    check_model_files(folder, "model.source", model.source)
    refuse_own_code(folder)
    return folder


def check_model_files(folder: Path, field: str, source: str) -> None:
    """Check that a folder has a config and weights; adapters and GLiNER are named.

    Args:
        folder: Folder of the model.
        field: Field or option that names the folder, for errors.
        source: Value of the field, for errors.

    Raises:
        UserError: A file is missing.
    """
    if is_routed(folder):  # `models.routed` checks it
        return
    folder = find_clip(folder) or folder
    gliner = folder / "gliner_config.json"
    has_config = (folder / "config.json").is_file()
    refuse_adapter(folder, field, source, whole=has_config and has_weights(folder))
    if gliner.is_file():
        raise UserError(
            field,
            "must contain a model of transformers",
            given=f"{source}, a GLiNER model (gliner_config.json)",
            remedy="Choose a model of transformers for token-classification",
        )
    if not has_config:
        # Names modules that are not served, which have no config.json.
        read_modules(folder, read_module_list(folder), {}, {})
        raise UserError(
            field,
            "must contain a Hugging Face model (config.json, weights, tokenizer)",
            given=f"{source} without config.json",
            remedy="Use the folder that `save_pretrained` wrote",
        )
    if not has_weights(folder):
        raise UserError(
            field,
            "must contain weights (*.safetensors or pytorch_model*.bin)",
            given=f"{source} without weights",
            remedy="Save the model with `save_pretrained`, or download its weights",
        )


def find_folder(model: ModelSource, pipeline_folder: Path) -> Path:
    """Return the local folder that a source names, whatever it contains.

    Raises:
        UserError: There is no such folder.
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
            remedy=_with_owner(model.source)
            or "Correct the path; relative paths start at the folder of the pipeline",
        )
    return hub_folder(model)


_OWNERS = {
    "albert-": "albert",
    "all-": "sentence-transformers",
    "bert-": "google-bert",
    "distilbert-": "distilbert",
    "distilgpt2": "distilbert",
    "distilroberta-": "distilbert",
    "gpt2": "openai-community",
    "multi-qa-": "sentence-transformers",
    "paraphrase-": "sentence-transformers",
    "roberta-": "FacebookAI",
    "t5-": "google-t5",
    "xlm-roberta-": "FacebookAI",
    "xlnet-": "xlnet",
}
"""Owner of the models on the Hub that had no owner in their id, by the beginning of their names."""


def _with_owner(source: str) -> str:
    """Return a question with the Hub id of a model whose owner is not given, if it is known."""
    owner = next((_OWNERS[start] for start in _OWNERS if source.startswith(start)), "")
    return f"Did you mean `{owner}/{source}`?" if owner and "/" not in source else ""


def _package_folder(source: str) -> Path:
    module, _, inner = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "model.source",
            "must name an installed package",
            given=source,
            remedy=f"Install the package of `{module}`, or use a folder or a Hub id",
        )
    return Path(next(iter(spec.submodule_search_locations))) / inner


def read_model_info(
    folder: Path,
    sha256: str | None = None,
    *,
    for_images: bool = True,
    loader: Loader = "SentenceTransformer",
    modules: Collection[str] = (),
    tokenizer: TokenizerSource | None = None,
    vectors_by: ImagePooling | Literal[""] | None = None,
) -> ModelInfo:
    """Read information about the model from the files in `folder`.

    Args:
        folder: Folder of the model.
        sha256: `hash_model` of the folder if known; reading weights takes long.
        for_images: Whether a ``preprocessor_config.json`` is read; False for tasks that read texts,
            where it is that of another part of the model.
        loader: Class of sentence-transformers that loads the model for the reference.
        modules: Modules of sentence-transformers that the head of the task computes itself.
        tokenizer: Origin of the tokenizer, by default the class.
        vectors_by: Pooling of the vectors of images, empty for that of the model; None for a task
            that has no vectors of images.

    Raises:
        UserError: A setting that affects results is not supported.
    """
    config: ModelConfig = read_json(folder / "config.json")
    saved = read_saved(folder, loader)
    is_pairs = loader == "CrossEncoder"
    if is_pairs:
        check_cross_encoder(folder, saved.modules)
    pooling, include_prompt, head = read_modules(
        folder, () if is_pairs else saved.modules, config, saved.sentence, modules
    )
    prompts, default_prompt = read_prompts(saved.sentence, loader)
    labels = read_labels(config)
    image = _image_info(folder) if for_images else None
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    hidden_size = 0 if image else _hidden_size(folder, config)
    if not image and architecture in TEXT_TOWERS:
        padded = architecture in PADDED_TOWERS
        name = "projection_size" if padded else "projection_dim"
        projection = _setting(folder, config, name, whole=not padded)
        pooling = ("lasttoken" if padded else EOS,)
        head = (Dense("", hidden_size, projection, padded, ""),)
    if image and vectors_by is not None:
        found, hidden_size = read_image_vectors(folder, architecture, image, vectors_by or None)
        pooling, head = (found,), ()
    texts = _TextInfo()
    if not image or has_vocabulary(folder):
        scored = saved.modules if is_pairs else None
        texts = _read_texts(folder, config, scored, tokenizer)
    if texts.logit_score is not None:
        pooling, head = ("lasttoken",), (texts.logit_score,)
    relevance: Activation = "sigmoid"
    if is_pairs:
        relevance = read_relevance(config, saved.sentence, 1 if texts.logit_score else len(labels))
    max_length, library_length = USUAL_LENGTH, None
    if not image:
        max_length, library_length = _lengths(
            folder, config, texts.max_length, saved.transformer.max_length
        )
    of_modules = read_settings_of(folder, saved.modules, modules)
    roles: Mapping[str, Role] = {}
    if MASK in of_modules:
        of_roles = saved.transformer.of_roles
        roles = read_roles(of_roles, of_modules[MASK], texts.tokenizer, max_length)
        max_length = max(role.max_length for role in roles.values())
        library_length = max_length if of_roles else library_length

    def size(name: str) -> int | None:
        own: Mapping[str, object] = config
        value = own.get(name) if image else _setting(folder, config, name)
        return value if isinstance(value, int) else None

    return ModelInfo(
        sha256=sha256 or hash_model(folder),
        architecture=architecture,
        hidden_size=hidden_size,
        max_length=max_length,
        library_length=library_length,
        pad_token_id=config.get("pad_token_id") or 0,
        lowercase=saved.transformer.lowercase and not texts.lowercase,
        pooling=pooling,
        head=head,
        modules=of_modules,
        roles=roles,
        similarity=saved.sentence.get("similarity_fn_name"),
        max_active_dims=saved.sentence.get("max_active_dims"),
        has_query_weights=(folder / WEIGHTS_FILE).is_file(),
        include_prompt=include_prompt,
        prompts=prompts,
        default_prompt=default_prompt,
        labels=labels,
        entailment=read_entailment(config, len(labels)),
        activation=read_activation(config, len(labels)),
        relevance=relevance,
        logit_score=texts.logit_score,
        pair_template=texts.pair_template,
        segments=texts.segments,
        mask_token=texts.mask_token,
        mask_token_id=texts.mask_token_id,
        special_ids=texts.special_ids,
        unk_token_id=texts.unk_token_id,
        padding_side=texts.padding_side,
        vocabulary=config.get("vocab_size"),
        image=image,
        layers=size("num_hidden_layers"),
        heads=size("num_attention_heads"),
        intermediate_size=size("intermediate_size"),
        space=read_space(folder, architecture, partial(hash_model, folder, ALL_WEIGHTS)),
    )


class _TextInfo(NamedTuple):
    """The part of `ModelInfo` that the tokenizer knows."""

    tokenizer: Any = None
    max_length: object = None
    segments: int = 1
    mask_token: str | None = None
    mask_token_id: int | None = None
    unk_token_id: int | None = None
    padding_side: str = "right"
    special_ids: tuple[int, ...] = ()
    lowercase: bool = False
    logit_score: LogitScore | None = None
    pair_template: tuple[tuple[str, ...], ...] | None = ()


def _read_texts(
    folder: Path,
    config: ModelConfig,
    scored: Sequence[Module] | None,
    source: TokenizerSource | None,
) -> _TextInfo:
    """Return what the tokenizer knows; `scored` are the modules of a cross-encoder."""
    tokenizer, logit_score = load_tokenizer(folder, source), None
    if scored is not None:
        logit_score = read_logit_score(folder, scored, config, tokenizer.convert_tokens_to_ids)
    template: tuple[tuple[str, ...], ...] | None = ()
    if logit_score is not None and tokenizer.chat_template:
        template = read_pair_template(partial(tokenizer.apply_chat_template, tokenize=False))
    return _TextInfo(
        tokenizer=tokenizer,
        max_length=tokenizer.model_max_length,
        segments=_segments(tokenizer, _setting(folder, config, "type_vocab_size") or 1),
        mask_token=tokenizer.mask_token,
        mask_token_id=tokenizer.mask_token_id,
        unk_token_id=tokenizer.unk_token_id,
        padding_side=tokenizer.padding_side,
        special_ids=tuple(tokenizer.all_special_ids),
        lowercase=_lowers(tokenizer.backend_tokenizer.normalizer),
        logit_score=logit_score,
        pair_template=template,
    )


def _lowers(normalizer: object) -> bool:
    """Whether a normalizer is or has the one of tokenizers that lower-cases."""
    from tokenizers.normalizers import Lowercase, Sequence

    parts: Any = normalizer if isinstance(normalizer, Sequence) else [normalizer]
    return any(isinstance(each, Lowercase) for each in parts)


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


def _image_info(folder: Path) -> ImageInfo | None:
    whole = read_json(folder / "processor_config.json", default={})  # of transformers 5
    if not (folder / "preprocessor_config.json").is_file() and "image_processor" not in whole:
        return None
    from triptych.models.image_source import read_image_info

    return read_image_info(folder)


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


def _setting(folder: Path, config: ModelConfig, name: str, *, whole: bool = False) -> Any:
    """Return a setting by its usual name; transformers knows each model's own name and default.

    It is that of the text side in a model of texts and images, unless it is of the `whole`.
    """
    own: Mapping[str, object] = config
    if name in own:
        return own[name]
    from transformers import AutoConfig

    try:
        config_of = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        is_tower = not whole and (config.get("architectures") or [""])[0] in TEXT_TOWERS
        return getattr(config_of.text_config if is_tower else config_of, name, None)
    except Exception as error:
        raise UserError(
            str(folder / "config.json"),
            "must be a config transformers can load",
            given=" ".join(str(error).split())[:200],
            remedy="Check model_type, and that transformers is recent enough for the model",
        ) from error


AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    "xmod",
)
"""Model types that count positions from the padding token's id on; earlier ones are unused."""
USUAL_LENGTH = 512
"""Maximum number of tokens of a row if no file of the model gives one."""
NO_LIMIT = 1_000_000
"""Limits from here on stand for none."""


def _lengths(
    folder: Path, config: ModelConfig, own: object, saved: int | None
) -> tuple[int, int | None]:
    """Return `max_length` and `library_length` of `ModelInfo`.

    The limit that sentence-transformers has `saved` overrides the tokenizer's (`own`) and the
    model's.
    """
    positions = _limit(_setting(folder, config, "max_position_embeddings"))
    known = [limit for limit in (_limit(own), positions) if limit]
    library = saved or min(known, default=None)
    if positions and config.get("model_type") in AFTER_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
        library = min(library or positions, positions)  # it fails for a longer text
    if library is None:
        return USUAL_LENGTH, None
    return min(library, positions or library), library


def _limit(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and 0 < value < NO_LIMIT else None


ALL_WEIGHTS = (*WEIGHTS, "*/*.safetensors", "*/pytorch_model.bin", WEIGHTS_FILE)


def hash_model(folder: Path, patterns: Sequence[str] = (*FILES, "*/*.json", *ALL_WEIGHTS)) -> str:
    """Return the hash of names and contents of the files that determine results, in hex."""
    digest = hashlib.sha256()
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


CODE = ("models/*.py",)


class ReadingOptions(TypedDict):
    """Keyword arguments of `read_model_info`."""

    for_images: bool
    loader: Loader
    modules: Sequence[str]
    tokenizer: TokenizerSource | None
    vectors_by: ImagePooling | Literal[""] | None


def read_model(
    folder: Path, progress: Progress, **options: Unpack[ReadingOptions]
) -> tuple[ModelInfo, Path | None]:
    """Return the information about the model in `folder` and the cached ``tokenizer.json``.

    An image model has no tokenizer.

    Raises:
        UserError: A setting that affects results is not supported, or there is no fast tokenizer.
    """
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        **options,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        info = read_model_info(folder, sha256, **options)
        (target / "facts.json").write_text(json.dumps(asdict(info)), encoding="utf-8")
        if info.image is None:
            padded = info.max_length if info.architecture in PADDED_TOWERS else None
            write_tokenizers(folder, target, options["tokenizer"], padded)
        if info.has_query_weights:
            shutil.copy(folder / WEIGHTS_FILE, target)

    stage = cached_stage("model", inputs, work, progress)
    info = TypeAdapter(ModelInfo).validate_json((stage.folder / "facts.json").read_bytes())
    return info, stage.folder / "tokenizer.json" if info.image is None else None
