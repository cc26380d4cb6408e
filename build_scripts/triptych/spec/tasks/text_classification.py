"""text-classification: the best labels of a text, by softmax or, for several at once, sigmoid."""

from __future__ import annotations

from triptych.spec.tasks.compare import LABEL_METRICS, compare_labels
from triptych.spec.tasks.metrics_labeled import LABEL_ACCURACY
from triptych.spec.tasks.task import (
    BEST_CHOICES,
    CHOICES,
    SEQUENCE_CLASSIFIER,
    TEXT,
    Task,
    choosing_core,
    has_labels,
    labels,
    top_k,
)

TEXT_CLASSIFICATION = Task(
    name="text-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.PlainTextRowMaker",
    decode="decode_rows.ClassDecoder",
    core=lambda facts, _: choosing_core(SEQUENCE_CLASSIFIER, "row", len(facts.labels)),
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda facts: top_k(len(facts.labels), default=1),
    settings=labels,
    view=BEST_CHOICES,
    check=has_labels,
)
