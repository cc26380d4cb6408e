"""What the files of sentence-transformers say of pooling and of what follows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from triptych.base.errors import UserError
from triptych.spec.model_classes import SentenceConfig, is_cross_encoder
from triptych.spec.model_facts import Dense, Normalize

SENTENCE = "sentence_embedding"
POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of a sentence-transformers pooling config, in the order their vectors are joined."""


class _Module(TypedDict):
    """An entry of ``modules.json``: a dotted class name and the folder of its settings."""

    type: str
    path: str


class _DenseConfig(TypedDict, total=False):
    in_features: int
    out_features: int
    bias: bool
    activation_function: str


def read_modules(
    folder: Path, sentence: SentenceConfig
) -> tuple[tuple[str, ...], tuple[Dense | Normalize, ...]]:
    """Pooling modes and what follows pooling, by ``modules.json`` and the files it names.

    A model without that file is pooled by the mean, not normalised, as sentence-transformers
    itself does.

    Raises:
        UserError: a module, or a setting of one, that changes results and is not known here.
    """
    modules: list[_Module] = read_json(folder / "modules.json", default=[])
    if is_cross_encoder(sentence):
        _check_cross_encoder(folder, modules, sentence)
        modules = []
    pooling: tuple[str, ...] = ("mean",)
    head: list[Dense | Normalize] = []
    for index, module in enumerate(modules):
        kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
        settings = read_json(path / "config.json", default={})
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
    return pooling, tuple(head)


def read_json(path: Path, default: Any = None) -> Any:
    """Content of a JSON file; `default`, unless it is None, where there is no file.

    Raises:
        UserError: not JSON.
    """
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            str(path), "must be JSON", given=str(error), remedy="Fetch the model again"
        ) from error


def _check_cross_encoder(
    folder: Path, modules: Sequence[_Module], sentence: SentenceConfig
) -> None:
    """Beside its classifying head, nothing else may change a cross-encoder's scores."""
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kinds not in ([], ["Transformer"]):
        raise UserError(
            str(folder / "modules.json"),
            "must be the Transformer alone for a cross-encoder",
            given=", ".join(kinds),
            remedy="Choose a cross-encoder whose scores come from its classifying head",
        )
    if sentence.get("default_prompt_name"):
        raise UserError(
            str(folder / "config_sentence_transformers.json"),
            "must not put a prompt before a cross-encoder's texts (default_prompt_name)",
            given=sentence["default_prompt_name"],
            remedy="Choose a cross-encoder without prompts",
        )


def _pooling(settings: Mapping[str, object], path: Path) -> tuple[str, ...]:
    mode = settings.get("pooling_mode")  # newer files name the modes, older ones set flags
    if isinstance(mode, str):
        modes = tuple(mode.split("+"))
    elif isinstance(mode, Sequence):
        modes = tuple(mode)
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


def _dense(settings: _DenseConfig, folder: str) -> Dense:
    return Dense(
        folder=folder,
        in_features=settings["in_features"],
        out_features=settings["out_features"],
        bias=settings.get("bias", True),
        activation=settings.get("activation_function", "torch.nn.modules.activation.Tanh"),
    )
