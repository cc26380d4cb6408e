"""Core, outputs and parameters of tasks that choose among classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.runtime.decode_classes import THRESHOLD
from triptych.tasks.compare import compare_labels
from triptych.tasks.task import Core, Parameters, Reads, Rule, Task, View

MAX_TOP_K = 64
"""Maximum number of choices that the core returns, and that a request may ask for."""


CHOICES = (Tensor("label", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",)))
BEST_CHOICES = View("choices", asks={"top_k": 5})
CLASS_DECODER = "decode_classes.ClassDecoder"
SEQUENCE_CLASSIFIER = "AutoModelForSequenceClassification"


def choosing_core(auto_class: str, reads: Reads, classes: int) -> Core:
    """Return a core that returns the best of `classes` with their scores, best first."""
    kept = min(classes, MAX_TOP_K)
    outputs = (Tensor("class_id", "INT32", (kept,)), Tensor("class_score", "FP32", (kept,)))
    return Core(auto_class=auto_class, reads=reads, returns="choices", outputs=outputs)


def top_k(classes: int, *, default: int) -> Mapping[str, Rule]:
    """Return the rule of the parameter `top_k` for a model with this number of classes."""
    kept = min(classes, MAX_TOP_K)
    return {"top_k": Rule("int", default=min(default, kept), min=1, max=kept)}


CLASS_SCORES = "scores"
"""Output with the scores of all labels, if `serving.class_scores` asks for it."""


LABELS_FILE = "labels.txt"
"""File in the folder of the ensemble with the labels of `CLASS_SCORES`, one a line."""


def with_class_scores(task: Task, info: ModelInfo) -> Task:
    """Return a classification task whose core returns all classes, and whose outputs have them.

    Raises:
        UserError: The task is no classification by the labels of a model.
    """
    if task.decode != CLASS_DECODER:
        raise UserError(
            "serving.class_scores",
            "is only supported for text-classification and image-classification",
            given=task.name,
            remedy="Remove it",
        )
    count = len(info.labels)

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        chosen = task.core(info, parameters)
        return replace(chosen, outputs=tuple(replace(t, dims=(count,)) for t in chosen.outputs))

    return replace(
        task,
        outputs=(*task.outputs, Tensor(CLASS_SCORES, "FP32", (count,))),
        core=core,
        settings=lambda info: {**task.settings(info), "class_scores": True},
    )


def of_labels(task: Task, info: ModelInfo, given: Parameters) -> Task:
    """Return the task, for a multi-label model with all labels above a threshold as its answer.

    With `top_k` among the parameters `given` in the spec, the best labels are the answer.
    """
    if info.activation != "sigmoid" or len(info.labels) < 2:
        return task
    rules = {name: replace(rule, default=None) for name, rule in task.parameters(info).items()}
    rules["threshold"] = Rule("float", min=0, max=1)
    task = replace(task, parameters=lambda info: rules)
    if "top_k" in given:
        return task
    limit = given.get("threshold", THRESHOLD)
    return replace(task, compare_outputs=partial(compare_labels, threshold=limit))


def labels(info: ModelInfo) -> Mapping[str, object]:
    """Return the settings of a task whose decoder names the classes."""
    return {"labels": list(info.labels)}


def has_labels(info: ModelInfo) -> None:
    """Raise a `UserError` if the model does not name its classes."""
    if not info.labels:
        raise UserError(
            "model.source",
            "must name its classes (id2label in config.json)",
            given=f"{info.architecture} without any",
            remedy="Choose a model fine-tuned for this task",
        )
