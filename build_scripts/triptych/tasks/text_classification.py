"""text-classification: the best labels of a text, by softmax or, for several at once, sigmoid."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.model.facts import ModelFacts
from triptych.tasks.parts import CHOICES, TEXT, choosing_core, has_labels, labels, top_k
from triptych.tasks.task import Core, Parameters, Rule, Task


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForSequenceClassification", "row", len(facts.labels))


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    return top_k(len(facts.labels), default=1)


TEXT_CLASSIFICATION = Task(
    name="text-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.py",
    decode="postprocess_classification.py",
    core=_core,
    parameters=_parameters,
    settings=labels,
    check=has_labels,
)
