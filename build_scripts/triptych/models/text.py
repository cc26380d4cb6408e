"""Pooling and modules of sentence-transformers models; labels and activation of classifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from triptych.base.errors import UserError
from triptych.models.info import Activation, Dense, HeadModule, LogitScore, Normalize, Truncate

CLASSIFIES = "Classification"
"""Part of the class name of every transformers model with a classifying head."""

ENTAILMENT = "entail"
"""Beginning of the label of a model of inference for hypotheses that follow, in lower case."""

LABELS_BY_DEFAULT = 2
"""Number of classes if the config gives none: transformers does not write this default."""

LOGIT_SCORE = "LogitScore"
"""Module of sentence-transformers that scores by the logit of a token."""

CROSS_ENCODER_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


class ModelConfig(TypedDict, total=False):
    """Fields of ``config.json`` that are read by name."""

    architectures: list[str] | None
    model_type: str
    id2label: Mapping[str, str] | None
    label2id: Mapping[str, int] | None
    num_labels: int | None
    _num_labels: int | None
    problem_type: str | None
    sentence_transformers: Mapping[str, str | None] | None
    sbert_ce_default_activation_function: str | None
    pad_token_id: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    is_causal: bool


class SentenceConfig(TypedDict, total=False):
    """Fields of ``config_sentence_transformers.json``."""

    model_type: str
    activation_fn: str | None
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None
    truncate_dim: int | None
    max_active_dims: int | None
    similarity_fn_name: str | None


def read_labels(config: ModelConfig) -> tuple[str, ...]:
    """Return labels by index; empty for a model without a classifying head.

    Raises:
        UserError: The labels are not numbered from 0.
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
            "must number the classes from 0 without gaps",
            given=names,
            remedy="Correct the model's config.json",
        )
    return tuple(by_index[index] for index in range(len(names)))


def read_entailment(config: ModelConfig, classes: int) -> int | None:
    """Return the class that transformers takes for entailment, by ``label2id``, else the last."""
    indexes = config.get("label2id")
    if not isinstance(indexes, dict):
        return None
    named = (i for label, i in indexes.items() if label.lower().startswith(ENTAILMENT))
    return next(named, classes - 1)


def read_activation(config: ModelConfig, classes: int) -> Activation:
    """Return the function from logits to scores, as transformers' pipelines choose it."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or classes == 1:
        return "sigmoid"
    return "softmax"


def read_relevance(config: ModelConfig, sentence: SentenceConfig, classes: int) -> Activation:
    """Return the function from a logit to a score, as sentence-transformers' cross-encoders do.

    Raises:
        UserError: The activation of a cross-encoder is neither the identity nor a sigmoid.
    """
    named = sentence.get("activation_fn") or _config_activation(config)
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
    return "sigmoid"


def _config_activation(config: ModelConfig) -> str | None:
    """Return the dotted name of the torch module, whose place depends on the version."""
    newer = config.get("sentence_transformers") or {}
    if "activation_fn" in newer:
        return newer["activation_fn"]
    return config.get("sbert_ce_default_activation_function")


SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
MASK = "MultiVectorMask"
"""Module that leaves out tokens of a model with a vector for each token."""
POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags in the pooling config of sentence-transformers, in the order of concatenation."""


class Module(TypedDict):
    """Entry of ``modules.json``: a dotted class name and the folder of its settings."""

    type: str
    path: str


def _kind(module: Module) -> str:
    """Return the name of a module's class without its package."""
    return module["type"].rsplit(".", 1)[-1]


class _DenseConfig(TypedDict, total=False):
    in_features: int
    out_features: int
    bias: bool
    activation_function: str
    use_residual: bool


def read_modules(
    folder: Path,
    modules: Sequence[Module],
    config: ModelConfig,
    sentence: SentenceConfig,
    of_task: Collection[str] = (),
) -> tuple[tuple[str, ...], bool, tuple[HeadModule, ...]]:
    """Return pooling modes, whether prompts are pooled, and modules after pooling.

    As in sentence-transformers, a model without modules is not normalized, and pooled by the last
    token if it generates text from left to right, else by the mean. The modules `of_task` are left
    out, because the head of the task computes them.

    Raises:
        UserError: A module, or a setting of one, affects results and is not supported.
    """
    pooling: tuple[str, ...] = ("lasttoken",) if not modules and _is_causal(config) else ("mean",)
    include_prompt = True
    head: list[HeadModule] = []
    of_tokens = MASK in of_task
    vectors, is_pooled = TOKENS if of_tokens else SENTENCE, of_tokens
    for index, module in enumerate(modules):
        kind, path = _kind(module), folder / module["path"]
        settings = read_json(path / "config.json", default={})
        # Newer files name the tensors a module reads and writes; only vectors are expected here.
        named = ("module_input_name", "module_output_name")
        on_vectors = all(settings.get(name) in (None, vectors) for name in named)
        is_first = kind == "Transformer" and index == 0 and not module["path"]
        is_pooled |= kind in of_task
        if is_first or kind == "Dropout" or kind in of_task:  # Dropout only acts in training
            continue
        if kind == "Pooling":
            pooling = _pooling(settings, path)
            include_prompt = bool(settings.get("include_prompt", True))
            is_pooled = True
        elif kind == "Dense" and on_vectors:
            head.append(_dense(settings, module["path"], path / "config.json"))
        elif kind == "Normalize" and on_vectors:
            head += [Normalize()] * is_pooled  # before there is a vector, it does nothing
        else:
            meaning, remedy = _OTHER_MODULES.get(kind, ""), "Choose a model without that module"
            if kind in ("Dense", "Normalize"):
                other = "multi-vector" if settings.get(named[0]) == TOKENS else "text"
                meaning = f"it does not read {vectors} (task {other}-embedding)"
            elif kind == "Transformer" and index == 0:
                meaning = f"its files are in the folder {module['path']}"
                remedy = "Load the model with sentence-transformers and save it again"
            raise UserError(
                str(folder / "modules.json"),
                "must be a Transformer, then Pooling, Dense and Normalize on the pooled vector",
                given=f"{module['type']} as module {index}" + f": {meaning}" * bool(meaning),
                remedy=remedy,
            )
    if size := sentence.get("truncate_dim"):
        head.append(Truncate(size))
    return pooling, include_prompt, tuple(head)


_OTHER_MODULES = {
    "Asym": "a different model for queries and for passages",
    "CLIPModel": "a model of images and texts (CLIP)",
    "MLMTransformer": "a sparse vector over the vocabulary (task sparse-embedding)",
    "HierarchicalTokenPooling": "vectors of several tokens are joined, which a client can do",
    MASK: "a vector for each token (task multi-vector-embedding)",
    "Router": "a different model for queries and for passages",
    "SparseStaticEmbedding": "a weight for each token, without a transformer",
    "SpladePooling": "a sparse vector over the vocabulary (task sparse-embedding)",
    "StaticEmbedding": "a table of token vectors, without a transformer",
}
"""Results of the modules of sentence-transformers that are not served."""


def read_settings_of(
    folder: Path, modules: Sequence[Module], kinds: Collection[str]
) -> dict[str, dict[str, object]]:
    """Return the settings of the modules of some classes, by the name of the class."""
    return {
        _kind(module): read_json(folder / module["path"] / "config.json", default={})
        for module in modules
        if _kind(module) in kinds
    }


def read_module_list(folder: Path) -> list[Module]:
    """Return the modules that ``modules.json`` names; none without the file.

    Raises:
        UserError: The file is not a list of objects with `type` and `path`.
    """
    modules: list[Module] = read_json(folder / "modules.json", [], list)
    for module in modules:
        fields = module if isinstance(module, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("type", "path")):
            raise UserError(
                str(folder / "modules.json"),
                "must give `type` and `path` of each module as texts",
                given=f"{module!r:.80}",
                remedy="Download the model again",
            )
    return modules


def is_routed(folder: Path) -> bool:
    """Whether the first module of a model is a Router, with modules in folders of their own."""
    return any(_kind(module) == "Router" for module in read_module_list(folder)[:1])


_MODULE_CONFIG = "sentence_bert_config.json"
OF_LIBRARY = ("modules.json", _MODULE_CONFIG, "config_sentence_transformers.json")
"""Files of sentence-transformers in a folder that is also one of transformers."""


def find_clip(folder: Path) -> Path | None:
    """Return the folder of a CLIP model that is the only module of a model; else None."""
    modules = read_module_list(folder)
    if len(modules) != 1:
        return None
    part = folder / modules[0]["path"]
    architectures = read_json(part / "config.json", default={}).get("architectures")
    methods = read_json(part / _MODULE_CONFIG, default={}).get("modality_config", {})
    usual = all(own["method"] == f"get_{name}_features" for name, own in methods.items())
    return part if architectures == ["CLIPModel"] and usual else None


def _is_causal(config: ModelConfig) -> bool:
    architectures = config.get("architectures") or [""]
    return architectures[0].endswith("ForCausalLM") and config.get("is_causal", True)


def read_json(path: Path, default: object = None, kind: type = dict) -> Any:
    """Return the content of a JSON file; `default`, unless it is None, if there is no file.

    Args:
        kind: Type of the content, `object` for any.

    Raises:
        UserError: The file is not JSON, or its content has another type.
    """
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            str(path), "is not valid JSON", given=str(error), remedy="Download the model again"
        ) from error
    if not isinstance(content, kind):
        rule = f"must be a JSON {'list' if kind is list else 'object'}"
        raise UserError(str(path), rule, remedy="Download the model again")
    return content


def read_logit_score(
    folder: Path,
    modules: Sequence[Module],
    config: ModelConfig,
    find_id: Callable[[str], int | None],
) -> LogitScore | None:
    """Return the score of a reranker that generates text; None for other models.

    As in sentence-transformers, a model without modules is scored by ``yes`` and ``no``.

    Args:
        folder: Folder of the model.
        modules: Modules of a saved cross-encoder.
        config: Content of ``config.json``.
        find_id: Function that returns the id of a token; None if there is no such token.
    """
    for module in modules:
        if _kind(module) == LOGIT_SCORE:
            settings = read_json(folder / module["path"] / "config.json", default={})
            ids = settings.get("true_token_id"), settings.get("false_token_id")
            if not isinstance(ids[0], int):
                raise UserError(
                    str(folder / module["path"] / "config.json"),
                    "must give `true_token_id` as an integer",
                    given=ids[0],
                    remedy="Download the model again",
                )
            return LogitScore(*ids)
    true_id, false_id = find_id("yes"), find_id("no")
    if modules or not _is_causal(config) or true_id is None or false_id is None:
        return None
    return LogitScore(true_id, false_id)


SLOTS = {"prompt": "system", "text": "query", "text_pair": "document"}
"""Inputs of a pair to the roles of their messages."""


def read_pair_template(
    render: Callable[[Sequence[Mapping[str, object]]], str],
) -> tuple[tuple[str, ...], ...] | None:
    """Return a chat template rendered without a prompt and with one, split at its slots.

    None if the template leaves out or changes a text.

    Args:
        render: Function that renders messages. Those of a pair have the roles ``system`` (the
            prompt), ``query`` and ``document``, as in sentence-transformers.
    """
    forms = [_split_template(render, slots) for slots in (list(SLOTS)[1:], list(SLOTS))]
    return None if None in forms else tuple(form for form in forms if form)


def _split_template(
    render: Callable[[Sequence[Mapping[str, object]]], str], slots: Sequence[str]
) -> tuple[str, ...] | None:
    """Return the template's own texts; every second one is the name of a slot."""
    before, after = "\n ", " \n"  # a template may strip texts
    for structured in (False, True):
        found = []
        for around in (("", ""), (before, after)):
            messages = []
            for slot in slots:
                text = f"{around[0]}\ue000{slot}\ue001{around[1]}"
                content = [{"type": "text", "text": text}] if structured else text
                messages.append({"role": SLOTS[slot], "content": content})
            try:
                found.append(re.split("\ue000(.*?)\ue001", render(messages)))
            except Exception:  # the template is the model's own and may raise anything
                break
        else:
            parts, spaced = found
            # As in the reference, a template may do without the prompt.
            if {*parts[1::2], "prompt"} == {*slots, "prompt"} and spaced == _spaced(
                parts, before, after
            ):
                return tuple(parts)
    return None


def _spaced(parts: Sequence[str], before: str, after: str) -> list[str]:
    """Return the parts with `before` and `after` around each slot."""
    last = len(parts) - 1
    return [
        part if place % 2 else after * (place > 0) + part + before * (place < last)
        for place, part in enumerate(parts)
    ]


def check_cross_encoder(folder: Path, modules: Sequence[Module]) -> None:
    """Check that nothing but the classifying head affects a cross-encoder's scores.

    Raises:
        UserError: There is another module.
    """
    kinds = [_kind(module) for module in modules]
    if kinds not in ([], ["Transformer"], ["Transformer", LOGIT_SCORE]):
        raise UserError(
            str(folder / "modules.json"),
            "must be the Transformer alone, or with a LogitScore, for a cross-encoder",
            given=", ".join(kinds),
            remedy="Choose a cross-encoder whose scores come from its classifying head",
        )


def _pooling(settings: Mapping[str, object], path: Path) -> tuple[str, ...]:
    mode = settings.get("pooling_mode")  # newer files name the modes, older ones set flags
    modes: tuple[str, ...]
    if isinstance(mode, str):
        modes = (mode,)
    elif isinstance(mode, Sequence):
        modes = tuple(mode)
    else:
        modes = tuple(name for flag, name in POOLING.items() if settings.get(flag)) or ("mean",)
    unknown = set(modes) - set(POOLING.values())
    if unknown or not modes:
        raise UserError(
            str(path / "config.json"),
            f"must choose among the pooling modes {', '.join(POOLING.values())}",
            given=", ".join(sorted(unknown)) or "none",
            remedy="Choose a model with one of them",
        )
    return modes


def _dense(settings: _DenseConfig, folder: str, file: Path) -> Dense:
    for name in ("in_features", "out_features"):
        if not isinstance(settings.get(name), int):
            raise UserError(
                str(file),
                f"must give `{name}` of the Dense module as an integer",
                given=settings.get(name, ""),
                remedy="Download the model again",
            )
    return Dense(
        folder=folder,
        in_features=settings["in_features"],
        out_features=settings["out_features"],
        bias=settings.get("bias", True),
        activation=settings.get("activation_function", "torch.nn.modules.activation.Tanh"),
        residual=bool(settings.get("use_residual")),
    )
