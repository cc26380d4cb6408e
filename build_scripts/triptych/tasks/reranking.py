"""reranking: how well a passage answers a query, by a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.errors import UserError
from triptych.model.facts import ModelFacts
from triptych.tasks.parts import TEXT, TEXT_PAIR
from triptych.tasks.task import Core, Parameters, Rule, Task
from triptych.tensors import Tensor


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    relevance = Tensor("relevance", "FP32", (1,))
    auto_class = "AutoModelForSequenceClassification"
    return Core(auto_class, reads="row", returns="scores", outputs=(relevance,))


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    return {}


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
    rows="rows_text.py",
    decode="postprocess_reranking.py",
    pairs=True,
    core=_core,
    parameters=_parameters,
    check=_check,
)
