"""Settings of sentence-transformers' Transformer module: applied, without effect, or refused.

The other files are read in `model_text`. As in sentence-transformers, its files count only beside a
``modules.json``, and unknown keys of ``config_sentence_transformers.json`` do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError
from triptych.spec.model_text import read_json

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

OUTPUT_NAMES = ("token_embeddings", "scores", "causal_logits")
"""Values of ``module_output_name`` that the modules after the Transformer read."""

PLAIN = ("last_hidden_state", "logits")
"""Outputs of a model that the modules after the Transformer can read."""


class TransformerSettings(NamedTuple):
    """Settings that are applied.

    Attributes:
        max_length: Maximum number of tokens, which overrides the tokenizer's; None for none.
        lowercase: Whether texts are lower-cased.
    """

    max_length: int | None = None
    lowercase: bool = False


def read_transformer_settings(folder: Path) -> TransformerSettings:
    """Return the settings of the Transformer module in a folder with ``modules.json``.

    Raises:
        UserError: A setting changes results and is not supported.
    """
    name = next((name for name in FILES if read_json(folder / name, default={})), FILES[0])
    given = read_json(folder / name, default={})
    settings = {FORMER_NAMES.get(key, key): value for key, value in given.items()}
    for key, value in _flat(settings):
        if value in (None, False, {}, []) or key in WITHOUT_EFFECT or _is_plain(key, value):
            continue
        raise UserError(
            f"{key} in {name}",
            "is a setting that changes results and is not supported",
            given=value,
            remedy="Choose a model without it, or move the setting to config.json or "
            "tokenizer_config.json",
        )
    return TransformerSettings(
        max_length=settings.get("max_seq_length"),
        lowercase=bool(settings.get("do_lower_case")),
    )


def _flat(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return settings with their names; those of ``*_kwargs`` one by one."""
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if key.endswith("_kwargs") and isinstance(value, dict):
            flat += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            flat.append((key, value))
    return flat


def _is_plain(key: str, value: Any) -> bool:
    """Whether a setting is applied, or states what is always done."""
    if key == "modality_config" and isinstance(value, dict):
        text = value.get("text")
        return isinstance(text, dict) and (
            text.get("method") == "forward" and text.get("method_output_name") in PLAIN
        )
    return (
        key in ("max_seq_length", "do_lower_case")
        or (key == "transformer_task" and value in TASKS)
        or (key == "module_output_name" and value in OUTPUT_NAMES)
    )
