"""Task `text-classification`: labels of a text, or of a pair of texts."""

from __future__ import annotations

from dataclasses import replace

from triptych.tasks.classes import (
    BEST_CHOICES,
    CHOICES,
    CLASS_DECODER,
    SEQUENCE_CLASSIFIER,
    choosing_core,
    has_labels,
    labels,
    of_labels,
    top_k,
)
from triptych.tasks.compare import LABEL_METRICS, compare_labels
from triptych.tasks.labeled import LABEL_ACCURACY
from triptych.tasks.task import TEXT, TEXT_PAIR, Task

TASK = Task(
    name="text-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.PlainTextRowMaker",
    decode=CLASS_DECODER,
    core=lambda info, _: choosing_core(SEQUENCE_CLASSIFIER, "row", len(info.labels)),
    form=of_labels,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: top_k(len(info.labels), default=1),
    settings=labels,
    view=BEST_CHOICES,
    check=has_labels,
)


PAIR_CLASSIFICATION = replace(TASK, inputs=(TEXT, TEXT_PAIR), pairs=True)
"""Text classification of pipelines with ``pairs: true``: inference, paraphrases, similarity."""
