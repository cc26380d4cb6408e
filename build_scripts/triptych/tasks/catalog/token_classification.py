"""Task `token-classification`: entities in a text."""

from __future__ import annotations

from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.classes import has_labels, labels
from triptych.tasks.compare import LABEL_AGREEMENT, compare_entities
from triptych.tasks.labeled import ENTITY_F1
from triptych.tasks.metric import Metric
from triptych.tasks.task import TEXT, Core, Parameters, Rule, Task, View

_ENTITY_F1 = Metric(
    "entity_f1",
    "higher",
    "F1 of entities against the reference's",
    limits=(1.0, 0.99, 0.97),
    probe=(0.98, 0.93),
)

_ENTITY_EXAMPLE = {"entity": "PER", "score": 0.9, "text": "Ada", "start": 0, "end": 3}
AGGREGATIONS = ("none", "simple", "first", "max", "average")


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    auto_class = "AutoModelForTokenClassification"
    if parameters["aggregation_strategy"] == "average":  # needs the scores of every class
        scores = Tensor("token_scores", "FP32", ("tokens", len(info.labels)))
        return Core(auto_class, reads="tokens", returns="token_scores", outputs=(scores,))
    best = Tensor("token_class", "INT32", ("tokens",)), Tensor("token_score", "FP32", ("tokens",))
    return Core(auto_class, reads="tokens", returns="token_choices", outputs=best)


TASK = Task(
    name="token-classification",
    inputs=(TEXT,),
    outputs=(Tensor("entities", "BYTES", (1,), content="json"),),
    rows="rows_spans.OffsetRowMaker",
    decode="decode_entities.EntityDecoder",
    core=_core,
    metrics=(_ENTITY_F1, LABEL_AGREEMENT),
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
