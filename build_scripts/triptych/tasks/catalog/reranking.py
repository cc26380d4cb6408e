"""Task `reranking`: the relevance of a passage to a query, as `CrossEncoder` computes it."""

from __future__ import annotations

from dataclasses import replace

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.classes import SEQUENCE_CLASSIFIER
from triptych.tasks.compare import compare_scores
from triptych.tasks.labeled import RECIPROCAL_RANK
from triptych.tasks.metric import Metric
from triptych.tasks.prompts import prompt_rule, prompt_settings
from triptych.tasks.task import TEXT, TEXT_PAIR, Core, Parameters, Task

RANK_CORRELATION = Metric(
    "rank_correlation",
    "higher",
    "Spearman of the scores",
    limits=(0.9999, 0.999, 0.99),
    probe=(0.999, 0.98),
)
TOP1_AGREEMENT = Metric(
    "top1_agreement",
    "higher",
    "queries with the same first passage",
    limits=(1.0, 0.98, 0.95),
    probe=(0.95, 0.9),
)

_RELEVANCE = Tensor("relevance", "FP32", (1,))


def _check(info: ModelInfo) -> None:
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


def _of_logit(task: Task, info: ModelInfo, given: Parameters) -> Task:
    """Return the task of a reranker that generates text, and scores by the logit of a token."""
    if info.logit_score is None:
        return task

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        return Core("AutoModel", "pooled", "scores", (_RELEVANCE,), info.relevance)

    if not info.pair_template:
        return replace(task, core=core)
    template = [list(form) for form in info.pair_template]
    return replace(
        task,
        core=core,
        rows="rows_template.TemplateRowMaker",
        pairs=False,
        settings=lambda info: {**prompt_settings(info), "pair_template": template},
    )


TASK = Task(
    name="reranking",
    loader="CrossEncoder",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(Tensor("score", "FP32", (1,)),),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_scores.ScoreDecoder",
    pairs=True,
    core=lambda info, _: Core(SEQUENCE_CLASSIFIER, "row", "scores", (_RELEVANCE,), info.relevance),
    metrics=(RANK_CORRELATION, TOP1_AGREEMENT),
    compare_outputs=compare_scores,
    labeled=RECIPROCAL_RANK,
    parameters=prompt_rule,
    settings=prompt_settings,
    check=_check,
    form=_of_logit,
)
