"""What a model's config says of its classes: their names, and what turns logits into scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from triptych.base.errors import UserError
from triptych.spec.model_facts import Activation

CLASSIFIES = "Classification"
"""Part of the class name of every model of transformers with a classifying head."""

LABELS_BY_DEFAULT = 2
"""Classes of a config that says nothing of them: transformers does not write those down."""

CROSS_ENCODER = "CrossEncoder"

CROSS_ENCODER_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


class ModelConfig(TypedDict, total=False):
    """Fields of ``config.json``, as far as they are read by name."""

    architectures: list[str] | None
    model_type: str
    id2label: Mapping[str, str] | None
    num_labels: int | None
    _num_labels: int | None
    problem_type: str | None
    sentence_transformers: Mapping[str, str] | None
    sbert_ce_default_activation_function: str | None
    pad_token_id: int | None
    vocab_size: int | None
    max_position_embeddings: int | None


class SentenceConfig(TypedDict, total=False):
    """Fields of ``config_sentence_transformers.json``."""

    model_type: str
    activation_fn: str | None
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None


def read_labels(config: ModelConfig) -> tuple[str, ...]:
    """Names of the classes by index; empty for a model without a classifying head.

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


def read_activation(config: ModelConfig, sentence: SentenceConfig, classes: int) -> Activation:
    """What turns the logits of so many classes into scores, as transformers' pipelines decide it.

    A model with one output may be a cross-encoder of sentence-transformers: then its settings
    decide. With more outputs they do not, as their default there is no activation at all, which
    holds for no pipeline of transformers.

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


def _cross_encoder_activation(config: ModelConfig, sentence: SentenceConfig) -> str | None:
    """Dotted name of the torch module, from where each version of the library wrote it."""
    return (
        (sentence.get("activation_fn") if is_cross_encoder(sentence) else None)
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )


def is_cross_encoder(sentence: SentenceConfig) -> bool:
    return sentence.get("model_type") == CROSS_ENCODER
