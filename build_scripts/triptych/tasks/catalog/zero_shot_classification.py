"""Task `zero-shot-classification`: labels of the request, by a model of inference."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.models.text import ENTAILMENT
from triptych.tasks.classes import CHOICES, SEQUENCE_CLASSIFIER
from triptych.tasks.compare import LABEL_METRICS, compare_labels
from triptych.tasks.labeled import LABEL_ACCURACY
from triptych.tasks.task import TEXT, Core, Parameters, Rule, Task, View


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    logits = Tensor("inference_logits", "FP32", (len(info.labels),))
    return Core(SEQUENCE_CLASSIFIER, reads="row", returns="logits", outputs=(logits,))


def _entailment(info: ModelInfo) -> int | None:
    named = (i for i, label in enumerate(info.labels) if label.lower().startswith(ENTAILMENT))
    return next(named, None)


def _settings(info: ModelInfo) -> Mapping[str, object]:
    entailment = _entailment(info)
    # As transformers takes it: the far end of the labels stands for contradiction.
    return {
        "entailment": entailment,
        "contradiction": len(info.labels) - 1 if entailment == 0 else 0,
    }


def _check(info: ModelInfo) -> None:
    if _entailment(info) is None or len(info.labels) < 2:
        raise UserError(
            "model.source",
            "must be a model of natural language inference (a label `entailment` in id2label)",
            given=", ".join(info.labels) or "no labels",
            remedy="Choose a model fine-tuned on NLI data",
        )
    if info.entailment not in (None, _entailment(info)):
        raise UserError(
            "label2id in config.json",
            "must have the label `entailment` at its index in id2label",
            given=f"transformers takes class {info.entailment} for entailment, and id2label names "
            f"{', '.join(info.labels)}",
            remedy="Correct the wrong one in a copy of the model's config.json",
        )


TASK = Task(
    name="zero-shot-classification",
    inputs=(TEXT,),
    outputs=CHOICES,
    rows="rows_hypothesis.HypothesisRowMaker",
    decode="decode_zero_shot.ZeroShotDecoder",
    pairs=True,
    core=_core,
    metrics=LABEL_METRICS,
    compare_outputs=compare_labels,
    labeled=LABEL_ACCURACY,
    parameters=lambda info: {
        "candidate_labels": Rule("list"),
        "multi_label": Rule("bool", default=False),
        "hypothesis_template": Rule("str", default="This example is {}."),
    },
    settings=_settings,
    view=View("choices"),
    check=_check,
)
