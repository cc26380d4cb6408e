"""image-classification: the best labels of an encoded image."""

from __future__ import annotations

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import LABEL_METRICS, compare_labels
from triptych.spec.tasks.metrics_labeled import LABEL_ACCURACY
from triptych.spec.tasks.task import (
    BEST_CHOICES,
    CHOICES,
    Core,
    Parameters,
    Task,
    choosing_core,
    has_labels,
    labels,
    top_k,
)


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForImageClassification", "image", len(facts.labels))


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
    rows="rows_image.ImageRowMaker",
    decode="decode_rows.ClassDecoder",
    core=_core,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda facts: top_k(len(facts.labels), default=5),
    settings=labels,
    view=BEST_CHOICES,
    request_rows=8,  # decoding takes long: a request with many images would hold up the others
    check=_check,
)
