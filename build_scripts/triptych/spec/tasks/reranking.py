"""reranking: how well a passage answers a query, by a cross-encoder."""

from __future__ import annotations

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import compare_scores
from triptych.spec.tasks.metrics_labeled import RECIPROCAL_RANK
from triptych.spec.tasks.task import SEQUENCE_CLASSIFIER, TEXT, TEXT_PAIR, Core, Task

_RELEVANCE = Tensor("relevance", "FP32", (1,))


def _check(facts: ModelFacts) -> None:
    if len(facts.labels) != 1:
        raise UserError(
            "model.source",
            "must be a cross-encoder with a single output (num_labels 1)",
            given=f"{len(facts.labels)} outputs",
            remedy="Choose a reranking model, or task text-classification",
        )


RERANKING = Task(
    name="reranking",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(Tensor("score", "FP32", (1,)),),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_rows.ScoreDecoder",
    pairs=True,
    core=lambda facts, _: Core(SEQUENCE_CLASSIFIER, "row", "scores", (_RELEVANCE,)),
    metrics=("rank_correlation", "top1_agreement"),
    compare_outputs=compare_scores,
    labeled=RECIPROCAL_RANK,
    check=_check,
)
