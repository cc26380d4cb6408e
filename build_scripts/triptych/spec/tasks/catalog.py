"""The tasks that `task` in ``pipeline.yaml`` can name. A new task is one more value here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_info import ModelInfo
from triptych.spec.model_text import ENTAILMENT
from triptych.spec.tasks.compare import (
    LABEL_METRICS,
    compare_answers,
    compare_entities,
    compare_labels,
    compare_scores,
    compare_tokens,
)
from triptych.spec.tasks.labeled import (
    ANSWER_F1,
    ENTITY_F1,
    LABEL_ACCURACY,
    RECIPROCAL_RANK,
    SIMILARITY_CORRELATION,
    TOKEN_ACCURACY,
)
from triptych.spec.tasks.metrics_vectors import COSINES, NEIGHBORS, compare_vectors
from triptych.spec.tasks.task import (
    BEST_CHOICES,
    CHOICES,
    CLASS_DECODER,
    MAX_TOP_K,
    SEQUENCE_CLASSIFIER,
    TEXT,
    TEXT_PAIR,
    Core,
    Parameters,
    Rule,
    Task,
    View,
    choosing_core,
    has_labels,
    labels,
    top_k,
)


def _text_embedding_core(info: ModelInfo, parameters: Parameters) -> Core:
    # Not called `embedding`: the exporter uses that name for a value inside the graph.
    vector = Tensor("sentence_embedding", "FP32", (info.embedding_size,))
    return Core(auto_class="AutoModel", reads="pooled", returns="vector", outputs=(vector,))


ENCODINGS = ("float", "int8", "uint8", "binary", "ubinary")
"""Output types of embeddings, with the names of sentence-transformers except for float32."""

PROMPT = "prompt"
"""Request parameter with the name of a prompt, or with its text."""


def _text_embedding_parameters(info: ModelInfo) -> Mapping[str, Rule]:
    rules = {
        "dimensions": Rule("int", min=1, max=info.embedding_size),
        "normalize_embeddings": Rule("bool"),
        "encoding": Rule("str", default="float", choices=ENCODINGS),
    }
    return {**rules, **_prompt_rule(info)}


def _prompt_rule(info: ModelInfo) -> Mapping[str, Rule]:
    if not info.prompts and not info.free_prompt:
        return {}
    names = () if info.free_prompt else tuple(sorted(info.prompts))
    return {PROMPT: Rule("str", default=info.default_prompt, choices=names)}


def _prompt_settings(info: ModelInfo) -> Mapping[str, object]:
    free = {"free_prompt": True} if info.free_prompt else {}
    return {"prompts": dict(info.prompts), **free}


TEXT_EMBEDDING = Task(
    name="text-embedding",
    loader="SentenceTransformer",
    inputs=(TEXT,),
    # Variable axes and one of the outputs: the options `dimensions` and `encoding` decide.
    outputs=(
        Tensor("embedding", "FP32", ("dimensions",), optional=True),
        Tensor("embedding_int8", "INT8", ("bytes",), optional=True),
        Tensor("embedding_uint8", "UINT8", ("bytes",), optional=True),
    ),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_rows.EmbeddingDecoder",
    core=_text_embedding_core,
    metrics=(*COSINES, *NEIGHBORS, "similarity_rank_correlation"),
    compare_outputs=compare_vectors,
    labeled=SIMILARITY_CORRELATION,
    parameters=_text_embedding_parameters,
    view=View("vectors"),
    settings=_prompt_settings,
)


FLOAT_EMBEDDING = replace(
    TEXT_EMBEDDING,
    outputs=(Tensor("embedding", "FP32", ("dimensions",)),),
    parameters=lambda info: {
        **_text_embedding_parameters(info),
        "encoding": Rule("str", default="float", choices=ENCODINGS[:1]),
    },
)
"""Text embedding of pipelines with a response cache, whose requests must not choose the output."""


TEXT_CLASSIFICATION = Task(
    name="text-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.PlainTextRowMaker",
    decode=CLASS_DECODER,
    core=lambda info, _: choosing_core(SEQUENCE_CLASSIFIER, "row", len(info.labels)),
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: top_k(len(info.labels), default=1),
    settings=labels,
    view=BEST_CHOICES,
    check=has_labels,
)


PAIR_CLASSIFICATION = replace(TEXT_CLASSIFICATION, inputs=(TEXT, TEXT_PAIR), pairs=True)
"""Text classification of pipelines with ``pairs: true``: inference, paraphrases, similarity."""


_ENTITY_EXAMPLE = {"entity": "PER", "score": 0.9, "text": "Ada", "start": 0, "end": 3}
AGGREGATIONS = ("none", "simple", "first", "max", "average")


def _token_classification_core(info: ModelInfo, parameters: Parameters) -> Core:
    auto_class = "AutoModelForTokenClassification"
    if parameters["aggregation_strategy"] == "average":  # needs the scores of every class
        scores = Tensor("token_scores", "FP32", ("tokens", len(info.labels)))
        return Core(auto_class, reads="tokens", returns="token_scores", outputs=(scores,))
    best = Tensor("token_class", "INT32", ("tokens",)), Tensor("token_score", "FP32", ("tokens",))
    return Core(auto_class, reads="tokens", returns="token_choices", outputs=best)


TOKEN_CLASSIFICATION = Task(
    name="token-classification",
    inputs=(TEXT,),
    outputs=(Tensor("entities", "BYTES", (1,), content="json"),),
    rows="rows_spans.OffsetRowMaker",
    decode="decode_entities.EntityDecoder",
    core=_token_classification_core,
    metrics=("entity_f1", "label_agreement"),
    compare_outputs=compare_entities,
    labeled=ENTITY_F1,
    parameters=lambda info: {
        "aggregation_strategy": Rule("str", default="simple", choices=AGGREGATIONS)
    },
    settings=labels,
    has_row_metadata=True,
    view=View("entities"),
    example={"entities": [_ENTITY_EXAMPLE]},
    check=has_labels,
)


_QUESTION_ANSWERING_CORE = Core(
    "AutoModelForQuestionAnswering",
    reads="tokens",
    returns="spans",
    outputs=(Tensor("start_logit", "FP32", ("tokens",)), Tensor("end_logit", "FP32", ("tokens",))),
)


def _check_question_answering(info: ModelInfo) -> None:
    if info.padding_side != "right":
        raise UserError(
            "padding_side in tokenizer_config.json",
            "must be right: otherwise transformers 4 puts the context before the question",
            given=info.padding_side,
            remedy="Set it to right in a copy, if the model was trained with the question first",
        )


QUESTION_ANSWERING = Task(
    name="question-answering",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(
        Tensor("answer", "BYTES", (1,)),
        Tensor("score", "FP32", (1,)),
        Tensor("start", "INT32", (1,)),
        Tensor("end", "INT32", (1,)),
    ),
    rows="rows_spans.WindowRowMaker",
    decode="decode_answers.AnswerDecoder",
    pairs=True,
    core=lambda info, _: _QUESTION_ANSWERING_CORE,
    metrics=("exact_match", "answer_f1"),
    compare_outputs=compare_answers,
    labeled=ANSWER_F1,
    parameters=lambda info: {
        "max_answer_len": Rule("int", default=15, min=1, max=512),
        "handle_impossible_answer": Rule("bool", default=False),
    },
    has_row_metadata=True,
    view=View("answer"),
    max_length=384,  # as transformers' pipeline has it
    check=_check_question_answering,
)


_RELEVANCE = Tensor("relevance", "FP32", (1,))


def _check_reranking(info: ModelInfo) -> None:
    if info.pair_template is None:
        raise UserError(
            "chat_template of the model",
            "must write the texts of the roles `query`, `document` and `system` unchanged",
            given="a template that leaves out or changes one of them",
            remedy="Put the chat_template.jinja for sentence-transformers' CrossEncoder into the "
            "model's folder",
        )
    if len(info.labels) != 1 and info.logit_score is None:
        raise UserError(
            "model.source",
            "must be a cross-encoder with a single output (num_labels 1)",
            given=f"{len(info.labels)} outputs",
            remedy="Choose a reranking model, or task text-classification",
        )


RERANKING = Task(
    name="reranking",
    loader="CrossEncoder",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(Tensor("score", "FP32", (1,)),),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_rows.ScoreDecoder",
    pairs=True,
    core=lambda info, _: Core(SEQUENCE_CLASSIFIER, "row", "scores", (_RELEVANCE,), info.relevance),
    metrics=("rank_correlation", "top1_agreement"),
    compare_outputs=compare_scores,
    labeled=RECIPROCAL_RANK,
    parameters=_prompt_rule,
    settings=_prompt_settings,
    check=_check_reranking,
)


def with_logit_score(task: Task, info: ModelInfo) -> tuple[Task, ModelInfo]:
    """Return the task of a reranker that generates text, and its head: the logit of a token."""
    if task.name != RERANKING.name or info.logit_score is None:
        return task, info

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        return Core("AutoModel", "pooled", "scores", (_RELEVANCE,), info.relevance)

    task = replace(task, core=core)
    if info.pair_template:
        template = [list(form) for form in info.pair_template]
        task = replace(
            task,
            rows="rows_template.TemplateRowMaker",
            pairs=False,
            settings=lambda info: {**_prompt_settings(info), "pair_template": template},
        )
    return task, replace(info, pooling=("lasttoken",), head=(info.logit_score,))


def _check_fill_mask(info: ModelInfo) -> None:
    if info.mask_token_id is None:
        raise UserError(
            "model.source",
            "must have a mask token",
            given=f"{info.architecture} with a tokenizer without one",
            remedy="Choose a masked language model",
        )


FILL_MASK = Task(
    name="fill-mask",
    inputs=(TEXT,),
    outputs=(Tensor("token", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",))),
    rows="rows_text.MaskRowMaker",
    decode="decode_rows.MaskDecoder",
    core=lambda info, _: choosing_core("AutoModelForMaskedLM", "mask", MAX_TOP_K),
    metrics=("top_k_overlap", "label_agreement"),
    compare_outputs=compare_tokens,
    labeled=TOKEN_ACCURACY,
    parameters=lambda info: top_k(MAX_TOP_K, default=5),
    settings=lambda info: {"mask_token": info.mask_token, "mask_token_id": info.mask_token_id},
    decodes_tokens=True,
    view=BEST_CHOICES,
    check=_check_fill_mask,
)


def _zero_shot_classification_core(info: ModelInfo, parameters: Parameters) -> Core:
    logits = Tensor("inference_logits", "FP32", (len(info.labels),))
    return Core(SEQUENCE_CLASSIFIER, reads="row", returns="logits", outputs=(logits,))


def _entailment(info: ModelInfo) -> int | None:
    named = (i for i, label in enumerate(info.labels) if label.lower().startswith(ENTAILMENT))
    return next(named, None)


def _zero_shot_classification_settings(info: ModelInfo) -> Mapping[str, object]:
    entailment = _entailment(info)
    # As transformers takes it: the far end of the labels stands for contradiction.
    return {
        "entailment": entailment,
        "contradiction": len(info.labels) - 1 if entailment == 0 else 0,
    }


def _check_zero_shot_classification(info: ModelInfo) -> None:
    if _entailment(info) is None or len(info.labels) < 2:
        raise UserError(
            "model.source",
            "must be a model of natural language inference (a label `entailment` in id2label)",
            given=", ".join(info.labels) or "no labels",
            remedy="Choose a model fine-tuned on NLI data",
        )
    if info.entailment not in (None, _entailment(info)):
        raise UserError(
            "label2id in config.json",
            "must have the label `entailment` at its index in id2label",
            given=f"transformers takes class {info.entailment} for entailment, and id2label names "
            f"{', '.join(info.labels)}",
            remedy="Correct the wrong one in a copy of the model's config.json",
        )


ZERO_SHOT_CLASSIFICATION = Task(
    name="zero-shot-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.HypothesisRowMaker",
    decode="decode_rows.ZeroShotDecoder",
    pairs=True,
    core=_zero_shot_classification_core,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: {
        "candidate_labels": Rule("list"),
        "multi_label": Rule("bool", default=False),
        "hypothesis_template": Rule("str", default="This example is {}."),
    },
    settings=_zero_shot_classification_settings,
    view=View("choices"),
    check=_check_zero_shot_classification,
)


def _image_classification_core(info: ModelInfo, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForImageClassification", "image", len(info.labels))


def _check_image_classification(info: ModelInfo) -> None:
    has_labels(info)
    if info.image is None:
        raise UserError(
            "model.source",
            "must hold an image processor (preprocessor_config.json)",
            given=f"{info.architecture} without one",
            remedy="Save the model's image processor into the folder",
        )


IMAGE_CLASSIFICATION = Task(
    name="image-classification",
    inputs=(Tensor("image", "BYTES", (1,), content="image"),),
    outputs=CHOICES,
    rows="rows_image.ImageRowMaker",
    decode=CLASS_DECODER,
    core=_image_classification_core,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: top_k(len(info.labels), default=5),
    settings=labels,
    view=BEST_CHOICES,
    request_rows=8,  # decoding takes long: a request with many images would hold up the others
    check=_check_image_classification,
)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        TEXT_EMBEDDING,
        TEXT_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        QUESTION_ANSWERING,
        RERANKING,
        FILL_MASK,
        ZERO_SHOT_CLASSIFICATION,
        IMAGE_CLASSIFICATION,
    )
}


def find_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UserError: No task has that name.
    """
    if name not in TASKS:
        raise UserError(
            "task", "is not a known task", given=name, remedy=f"Choose one of: {', '.join(TASKS)}"
        )
    return TASKS[name]
