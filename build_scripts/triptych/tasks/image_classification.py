"""image-classification: the best labels of an encoded image."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.errors import UserError
from triptych.model.facts import ModelFacts
from triptych.tasks.parts import CHOICES, choosing_core, has_labels, labels, top_k
from triptych.tasks.task import Core, Parameters, Rule, Task
from triptych.tensors import Tensor


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForImageClassification", "image", len(facts.labels))


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    return top_k(len(facts.labels), default=5)


def _check(facts: ModelFacts) -> None:
    has_labels(facts)
    if facts.image is None:
        raise UserError(
            "model.source",
            "must hold an image processor (preprocessor_config.json)",
            given=f"{facts.architecture} without one",
            remedy="Save the model's image processor into the folder",
        )


IMAGE_CLASSIFICATION = Task(
    name="image-classification",
    inputs=(Tensor("image", "BYTES", (1,), content="image"),),
    outputs=CHOICES,
    rows="rows_image.py",
    decode="postprocess_classification.py",
    core=_core,
    parameters=_parameters,
    settings=labels,
    request_rows=8,  # decoding takes long: a request with many images would hold up the others
    check=_check,
)
