"""What a model's config says of its classes: their names, and what makes scores of their logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.errors import UserError
from triptych.model.facts import Activation

CLASSIFIES = "Classification"
"""Part of the class name of every model of transformers with a classifying head."""

LABELS_BY_DEFAULT = 2
"""Classes of a config that says nothing of them: transformers does not write those down."""

CROSS_ENCODER = "CrossEncoder"

CROSS_ENCODER_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the classes by index; empty for a model without a classifying head.

    Args:
        config: content of the model's ``config.json``.

    Raises:
        UserError: the names are not numbered from 0 on.
    """
    names = config.get("id2label")
    architectures = config.get("architectures")
    if not (CLASSIFIES in architectures[0] if architectures else names):
        return ()
    if not names:
        count = config.get("num_labels") or config.get("_num_labels") or LABELS_BY_DEFAULT
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        by_index = {int(index): str(name) for index, name in names.items()}
    except (AttributeError, ValueError):
        by_index = {}
    if sorted(by_index) != list(range(len(names))):
        raise UserError(
            "id2label in config.json",
            "must name every class by its number, from 0 on",
            given=names,
            remedy="Correct the model's config.json",
        )
    return tuple(by_index[index] for index in range(len(names)))


def read_activation(
    config: Mapping[str, Any], sentence: Mapping[str, Any], classes: int
) -> Activation:
    """What makes scores of the logits, as transformers' classification pipelines decide it.

    A model with one output may be a cross-encoder of sentence-transformers: then its settings
    decide. With more outputs they do not, as their default there is no activation at all, which
    holds for no pipeline of transformers.

    Args:
        config: content of the model's ``config.json``.
        sentence: content of its ``config_sentence_transformers.json``.
        classes: number of them.

    Raises:
        UserError: a cross-encoder's activation is neither the identity nor a sigmoid.
    """
    named = _cross_encoder_activation(config, sentence)
    if classes == 1 and named is not None:
        kind = named.rsplit(".", 1)[-1]
        if not named.startswith("torch.") or kind not in CROSS_ENCODER_ACTIVATIONS:
            raise UserError(
                "model.source",
                "must be a cross-encoder whose activation is Identity or Sigmoid of torch.nn",
                given=named,
                remedy="Set activation_fn in the model's files to one of them",
            )
        return CROSS_ENCODER_ACTIVATIONS[kind]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or classes == 1:
        return "sigmoid"
    return "softmax"


def _cross_encoder_activation(config: Mapping[str, Any], sentence: Mapping[str, Any]) -> str | None:
    """Dotted name of the torch module, from where each version of the library wrote it."""
    latest = sentence.get("activation_fn") if is_cross_encoder(sentence) else None
    named: str | None = (
        latest
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    return named


def is_cross_encoder(sentence: Mapping[str, Any]) -> bool:
    """Whether ``config_sentence_transformers.json`` is that of a cross-encoder."""
    return sentence.get("model_type") == CROSS_ENCODER
