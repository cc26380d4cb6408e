"""Task `image-classification`: labels of an image."""

from __future__ import annotations

from triptych.models.info import ModelInfo
from triptych.tasks.classes import (
    BEST_CHOICES,
    CHOICES,
    CLASS_DECODER,
    choosing_core,
    has_labels,
    labels,
    of_labels,
    top_k,
)
from triptych.tasks.compare import LABEL_METRICS, compare_labels
from triptych.tasks.labeled import LABEL_ACCURACY
from triptych.tasks.task import IMAGE, Core, Parameters, Task, has_image_processor


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForImageClassification", "image", len(info.labels))


def _check(info: ModelInfo) -> None:
    has_labels(info)
    has_image_processor(info)


TASK = Task(
    name="image-classification",
    inputs=(IMAGE,),
    outputs=CHOICES,
    rows="rows_image.ImageRowMaker",
    decode=CLASS_DECODER,
    core=_core,
    form=of_labels,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: top_k(len(info.labels), default=5),
    settings=labels,
    view=BEST_CHOICES,
    request_rows=8,  # decoding takes long: a request with many images would hold up the others
    check=_check,
)
