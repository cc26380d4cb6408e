"""Parts that tasks share: inputs, outputs, cores that choose classes, checks of a model."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.task import LARGEST_TOP_K, Core, Reads, Rule, View

TEXT = Tensor("text", "BYTES", (1,))
TEXT_PAIR = Tensor("text_pair", "BYTES", (1,))
CHOICES = (Tensor("label", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",)))
BEST_CHOICES = View("choices", asks={"top_k": 5})
SEQUENCE_CLASSIFIER = "AutoModelForSequenceClassification"


def choosing_core(auto_class: str, reads: Reads, classes: int) -> Core:
    """A core that returns the best of `classes` with their scores, best first."""
    kept = min(classes, LARGEST_TOP_K)
    outputs = (Tensor("class_id", "INT32", (kept,)), Tensor("class_score", "FP32", (kept,)))
    return Core(auto_class=auto_class, reads=reads, returns="choices", outputs=outputs)


def top_k(classes: int, *, default: int) -> Mapping[str, Rule]:
    kept = min(classes, LARGEST_TOP_K)
    return {"top_k": Rule("int", default=min(default, kept), min=1, max=kept)}


def labels(facts: ModelFacts) -> Mapping[str, object]:
    return {"labels": list(facts.labels)}


def has_labels(facts: ModelFacts) -> None:
    if not facts.labels:
        raise UserError(
            "model.source",
            "must name its classes (id2label in config.json)",
            given=f"{facts.architecture} without any",
            remedy="Choose a model fine-tuned for this task",
        )
