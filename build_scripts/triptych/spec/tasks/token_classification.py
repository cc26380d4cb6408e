"""token-classification: the entities in a text, with character offsets."""

from __future__ import annotations

from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import compare_entities
from triptych.spec.tasks.metrics_labeled import ENTITY_F1
from triptych.spec.tasks.task import TEXT, Core, Parameters, Rule, Task, View, has_labels, labels

EXAMPLE = {"entity": "PER", "score": 0.9, "text": "Ada", "start": 0, "end": 3}
AGGREGATIONS = ("none", "simple", "first", "max", "average")


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    auto_class = "AutoModelForTokenClassification"
    if parameters["aggregation"] == "average":  # needs the scores of every class
        scores = Tensor("token_scores", "FP32", ("tokens", len(facts.labels)))
        return Core(auto_class, reads="tokens", returns="token_scores", outputs=(scores,))
    best = Tensor("token_class", "INT32", ("tokens",)), Tensor("token_score", "FP32", ("tokens",))
    return Core(auto_class, reads="tokens", returns="token_choices", outputs=best)


TOKEN_CLASSIFICATION = Task(
    name="token-classification",
    inputs=(TEXT,),
    outputs=(Tensor("entities", "BYTES", (1,), content="json"),),
    rows="rows_spans.OffsetRowMaker",
    decode="decode_entities.EntityDecoder",
    core=_core,
    metrics=("entity_f1", "label_agreement"),
    compare_outputs=compare_entities,
    labeled=ENTITY_F1,
    parameters=lambda facts: {"aggregation": Rule("str", default="simple", choices=AGGREGATIONS)},
    settings=labels,
    carries=True,
    view=View("entities"),
    example={"entities": [EXAMPLE]},
    check=has_labels,
)
