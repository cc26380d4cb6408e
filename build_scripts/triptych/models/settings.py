"""Settings of sentence-transformers: applied, without effect, or refused.

Modules are read in `models.text`. As in sentence-transformers, its files count only beside a
``modules.json``, and only for the class that saved them. Unknown keys of
``config_sentence_transformers.json`` do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError
from triptych.models.info import Loader
from triptych.models.text import Module, SentenceConfig, read_json, read_module_list

CONFIG = "config_sentence_transformers.json"
OTHER_CLASSES = {
    "ColBERT": "a model with a vector for each token, saved by PyLate",
    "MultiVectorEncoder": "a model with a vector for each token (task multi-vector-embedding)",
    "SparseEncoder": "a model of sparse vectors over the vocabulary (task sparse-embedding)",
}
"""Classes of sentence-transformers whose models no other class can load, with the meaning."""
USUAL_PROMPTS = ("query", "document")
"""Prompts that a SentenceTransformer always has, empty unless its files give them."""

FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file; the first one that is not empty counts."""

FORMER_NAMES = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}

WITHOUT_EFFECT = {
    "unpad_inputs": "it changes the layout of a batch",
    "model_kwargs.trust_remote_code": "it is removed",
    "model_kwargs.dtype": "the reference is in fp32",
    "model_kwargs.torch_dtype": "the reference is in fp32",
    "model_kwargs.attn_implementation": "all implementations give the same results",
    "processor_kwargs.trust_remote_code": "it is removed",
    "config_kwargs.trust_remote_code": "it is removed",
}
"""Settings that do not change a result in fp32, with the reason."""

TASKS = ("feature-extraction", "sequence-classification", "text-generation")
"""Values of ``transformer_task`` that read token vectors, or logits of a head."""

ROLE_SETTINGS = ("query_length", "document_length", "query_expansion")
"""Settings of a model with a vector for each token; see `roles`."""

OTHER_TASKS: Mapping[str, tuple[str, ...]] = {"SparseEncoder": ("fill-mask",)}
"""Further values that the models of a class have."""

OUTPUT_NAMES = ("token_embeddings", "scores", "causal_logits")
"""Values of ``module_output_name`` that the modules after the Transformer read."""

PLAIN = ("last_hidden_state", "logits")
"""Outputs of a model that the modules after the Transformer can read."""


class TransformerSettings(NamedTuple):
    """Settings that are applied."""

    # Maximum number of tokens, which overrides the tokenizer's; None for none.
    max_length: int | None = None
    lowercase: bool = False  # Whether texts are lower-cased
    of_roles: Mapping[str, object] = {}  # Values of `ROLE_SETTINGS`


class Saved(NamedTuple):
    """Files that sentence-transformers has saved; without contents if they do not count."""

    modules: tuple[Module, ...] = ()  # Entries of ``modules.json``
    # Content of ``config_sentence_transformers.json``.
    sentence: SentenceConfig = {}  # noqa: RUF012
    transformer: TransformerSettings = TransformerSettings()  # Settings of the Transformer module


def read_saved(folder: Path, loader: Loader) -> Saved:
    """Return the files of sentence-transformers that count for `loader`.

    As there, a model that another class has saved is converted: only its transformer counts.

    Raises:
        UserError: A setting changes results and is not supported.
    """
    if not loader or not (folder / "modules.json").is_file():
        return Saved()
    sentence: SentenceConfig = read_json(folder / CONFIG, default={})
    saved_by = sentence.get("model_type", "SentenceTransformer")
    if saved_by in OTHER_CLASSES and saved_by != loader:
        raise UserError(
            f"model_type in {CONFIG}",
            f"must be {loader}",
            given=f"{saved_by}, {OTHER_CLASSES[saved_by]}",
            remedy="Choose another model",
        )
    if saved_by != loader:
        return Saved()
    modules = tuple(read_module_list(folder))
    return Saved(modules, sentence, read_transformer_settings(folder, loader))


def read_prompts(sentence: SentenceConfig, loader: Loader) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a model by name, and the name of its default prompt.

    Raises:
        UserError: A prompt is not a text, or there is no prompt of the default's name.
    """
    given = sentence.get("prompts") or {}
    prompts = {}
    for name, text in given.items() if isinstance(given, dict) else [("", given)]:
        if not isinstance(text, str | None):
            raise UserError(
                f"prompts in {CONFIG}",
                "must have a text for each name",
                given=f"{text!r:.80}",
                remedy="Correct the file",
            )
        prompts[name] = text or ""
    default = sentence.get("default_prompt_name")
    if loader == "SentenceTransformer" and default in USUAL_PROMPTS:
        prompts.setdefault(default, "")
    if default is not None and default not in prompts:
        raise UserError(
            f"default_prompt_name in {CONFIG}",
            "must be the name of a prompt",
            given=default,
            remedy=f"Use one of: {', '.join(prompts) or 'none, so remove it'}",
        )
    return prompts, default


def read_transformer_settings(folder: Path, loader: Loader) -> TransformerSettings:
    """Return the settings of the Transformer module in a folder with ``modules.json``.

    Raises:
        UserError: A setting changes results and is not supported.
    """
    name = next((name for name in FILES if read_json(folder / name, default={})), FILES[0])
    given = read_json(folder / name, default={})
    settings = {FORMER_NAMES.get(key, key): value for key, value in given.items()}
    for key, value in _flat(settings):
        is_without_effect = value in (None, False, {}, []) or key in WITHOUT_EFFECT
        if is_without_effect or _is_plain(key, value, loader):
            continue
        raise UserError(
            f"{key} in {name}",
            "is a setting that changes results and is not supported",
            given=value,
            remedy="Choose a model without it, or move the setting to config.json or "
            "tokenizer_config.json",
        )
    longest = settings.get("max_seq_length")
    if longest is not None and not isinstance(longest, int):
        raise UserError(
            f"max_seq_length in {name}",
            "must be an integer",
            given=longest,
            remedy="Correct the file",
        )
    return TransformerSettings(
        max_length=longest,
        lowercase=bool(settings.get("do_lower_case")),
        of_roles={name: settings[name] for name in ROLE_SETTINGS if settings.get(name)},
    )


def _flat(settings: Mapping[str, object]) -> list[tuple[str, Any]]:
    """Return settings with their names; those of ``*_kwargs`` one by one."""
    flat: list[tuple[str, object]] = []
    for key, value in settings.items():
        if key.endswith("_kwargs") and isinstance(value, dict):
            flat += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            flat.append((key, value))
    return flat


def _is_plain(key: str, value: object, loader: Loader) -> bool:
    """Whether a setting is applied, or states what is always done."""
    if key == "modality_config" and isinstance(value, dict):
        text = value.get("text")
        return isinstance(text, dict) and (
            text.get("method") == "forward" and text.get("method_output_name") in PLAIN
        )
    return (
        key in ("max_seq_length", "do_lower_case")
        or (key in ROLE_SETTINGS and loader == "MultiVectorEncoder")
        or (key == "transformer_task" and value in (*TASKS, *OTHER_TASKS.get(loader, ())))
        or (key == "module_output_name" and value in OUTPUT_NAMES)
    )
