"""zero-shot-classification: labels named by the request, each tried as a hypothesis."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import LABEL_METRICS, compare_labels
from triptych.spec.tasks.metrics_labeled import LABEL_ACCURACY
from triptych.spec.tasks.task import (
    CHOICES,
    SEQUENCE_CLASSIFIER,
    TEXT,
    Core,
    Parameters,
    Rule,
    Task,
    View,
)


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    logits = Tensor("inference_logits", "FP32", (len(facts.labels),))
    return Core(SEQUENCE_CLASSIFIER, reads="row", returns="logits", outputs=(logits,))


def _entailment(facts: ModelFacts) -> int | None:
    named = (i for i, label in enumerate(facts.labels) if label.lower().startswith("entail"))
    return next(named, None)


def _settings(facts: ModelFacts) -> Mapping[str, object]:
    entailment = _entailment(facts)
    # As transformers takes it: the far end of the labels stands for contradiction.
    return {
        "entailment": entailment,
        "contradiction": len(facts.labels) - 1 if entailment == 0 else 0,
    }


def _check(facts: ModelFacts) -> None:
    if _entailment(facts) is None or len(facts.labels) < 2:
        raise UserError(
            "model.source",
            "must be a model of natural language inference (a label `entailment` in id2label)",
            given=", ".join(facts.labels) or "no labels",
            remedy="Choose a model fine-tuned on NLI data",
        )


ZERO_SHOT_CLASSIFICATION = Task(
    name="zero-shot-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_text.HypothesisRowMaker",
    decode="decode_rows.ZeroShotDecoder",
    pairs=True,
    core=_core,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda facts: {
        "labels": Rule("list"),
        "multi_label": Rule("bool", default=False),
        "hypothesis_template": Rule("str", default="This example is {}."),
    },
    settings=_settings,
    view=View("choices"),
    check=_check,
)
