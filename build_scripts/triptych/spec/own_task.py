"""The task of a pipeline around the user's own model, and the comparison of its outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from triptych.base.arrays import Array
from triptych.base.errors import UserError
from triptych.models.info import ModelInfo, OwnInterface, OwnStage
from triptych.runtime.hooking import HOOKS_FILE, load_hooks
from triptych.spec.kind import MODEL
from triptych.spec.model_fields import ModelSpec, OutputField
from triptych.tasks.compare import TIE, Comparison, Outputs
from triptych.tasks.metric import OWN_METRICS, Metric
from triptych.tasks.task import Core, Parameters, Task, View

COMPARE_PREFIX = "compare_"
"""Prefix of the user's functions that compare an output."""


def own_task(spec: ModelSpec) -> Task:
    """Return the task that the spec declares; its core needs `ModelInfo.own`."""
    metrics = {
        name: OWN_METRICS[field.compared_by].of_output(name) for name, field in spec.outputs.items()
    }

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        return Core("", "graph", "arrays", _interface(info).outputs)

    def settings(info: ModelInfo) -> Mapping[str, object]:
        own = _interface(info)
        tensors = {"core_inputs": own.inputs, "past_core": own.past_core}
        name, axis = spec.model.axis
        padded = {} if axis is None else {"min": axis.min, "max": axis.max, "of": own.padded(name)}
        return {
            "padded_axis": padded,
            "own_inputs": {name: field.as_dict() for name, field in spec.inputs.items()},
            "own_outputs": {name: field.as_dict() for name, field in spec.outputs.items()},
            "required_inputs": sum(field.default is None for field in spec.inputs.values()),
            "has_counts": own.has_counts,
            "takes_rows": own.takes_rows,
            "ranges": own.ranges,
            **({"labels": own.labels} if own.labels else {}),
            **{
                kind: {t.name: {"dtype": t.dtype, "dims": t.config_dims} for t in each}
                for kind, each in tensors.items()
            },
        }

    return Task(
        name=MODEL,
        inputs=tuple(field.tensor(name) for name, field in spec.inputs.items()),
        outputs=tuple(field.tensor(name) for name, field in spec.outputs.items()),
        rows="own_model.OwnRowMaker",
        decode="own_step.StepDecoder" if len(spec.steps) > 1 else "own_model.OwnDecoder",
        core=core,
        metrics=tuple(metrics.values()),
        compare_outputs=partial(_compare, spec, metrics),
        labeled=None,
        parameters=lambda info: {name: field.rule for name, field in spec.parameters.items()},
        settings=settings,
        view=View("boxes" if _shows_boxes(spec) else "outputs"),
    )


def _shows_boxes(spec: ModelSpec) -> bool:
    """Return whether a row is one file, such as an image, and has boxes with labels."""
    types = [field.type for field in spec.outputs.values()]
    boxes = [field for field in spec.outputs.values() if field.compared_by == "iou"]
    files = [field for field in spec.inputs.values() if field.type == "bytes"]
    return len(files) == len(spec.inputs) == len(boxes) == 1 and "text" in types


def step_settings(spec: ModelSpec, info: ModelInfo, stage: OwnStage) -> dict[str, object]:
    """Return the settings of a step that calls a function between models."""
    settings = own_task(spec.with_model(spec.steps[stage.function][0])).settings(
        replace(info, own=stage.own)
    )
    return {
        **settings,
        "function": stage.function,
        "max_core_rows": spec.max_rows(stage.function),
    }


def _interface(info: ModelInfo) -> OwnInterface:
    if info.own is None:
        raise ValueError("the graph of the pipeline was not read")
    return info.own


def _compare(
    spec: ModelSpec,
    metrics: Mapping[str, Metric],
    got: Sequence[Outputs],
    wanted: Sequence[Outputs],
    queries: Sequence[str],
) -> Comparison:
    """Compare the outputs of requests of one row by the metrics that the spec declares.

    Raises:
        UserError: A function `compare_NAME` that the spec requires fails, or is missing.
    """
    values: dict[str, float] = {}
    badness = np.zeros(len(got))
    for name, metric in metrics.items():
        field = spec.outputs[name]
        pairs = [(own[name][0], right[name][0]) for own, right in zip(got, wanted, strict=True)]
        if field.compared_by == "max_difference":
            scale = max([1.0, *(float(np.abs(right).max(initial=0)) for _, right in pairs)])
            scores = [_difference(own, right) / scale for own, right in pairs]
            values[metric.name] = max(scores)
            badness = np.maximum(badness, scores)
            continue
        scores = [_score(spec, name, field, own, right) for own, right in pairs]
        worst = field.compared_by in ("cosine", "function")
        values[metric.name] = min(scores) if worst else float(np.mean(scores))
        badness = np.maximum(badness, 1.0 - np.array(scores))
    return Comparison(values, badness.tolist())


def _difference(own: Array, right: Array) -> float:
    if own.shape != right.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.subtract(own, right, dtype=np.float64))
    apart[(own == right) | (np.isnan(own) & np.isnan(right))] = 0.0
    largest = float(apart.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _score(spec: ModelSpec, name: str, field: OutputField, own: Array, right: Array) -> float:
    """Return how close a value is to the reference: 1 if they are equal."""
    kind = field.compared_by
    if kind == "function":
        function = COMPARE_PREFIX + name
        try:
            compare = getattr(load_hooks(spec.folder), function)
            return float(compare(actual=own, expected=right))
        except Exception as error:  # the user's own function
            raise UserError(
                str(spec.folder / HOOKS_FILE),
                f"must have a function `{function}` that compares two values of `{name}`",
                given=f"{type(error).__name__}: {error}",
                remedy=f"Write `def {function}(actual, expected)`, which returns a number",
            ) from error
    if kind == "iou":
        return _overlap(own.reshape(-1, 4), right.reshape(-1, 4))
    if own.shape != right.shape:
        return 0.0
    if kind == "exact":
        return float(np.array_equal(own, right, equal_nan=field.type == "float"))
    one, other = own.ravel().astype(np.float64), right.ravel().astype(np.float64)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return 0.0
    if kind == "top1":
        return float(not one.size or other[one.argmax()] >= other.max() - TIE)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    if not lengths:
        return float(np.array_equal(one, other))
    return float(one @ other) / lengths


def _overlap(own: Array, right: Array) -> float:
    """Return the sum of the overlaps of the best pairs of boxes, divided by the larger number.

    An overlap is intersection over union. Pairs are chosen greedily, the largest overlap first.
    """
    most = max(len(own), len(right))
    if not most:
        return 1.0
    if not (len(own) and len(right) and np.isfinite(own).all() and np.isfinite(right).all()):
        return 0.0
    low = np.maximum(own[:, None, :2], right[None, :, :2])
    high = np.minimum(own[:, None, 2:], right[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None, dtype=np.float64), axis=2)
    areas = [
        np.prod(boxes[:, 2:] - boxes[:, :2], axis=1, dtype=np.float64) for boxes in (own, right)
    ]
    union = areas[0][:, None] + areas[1][None, :] - shared
    overlaps = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    # Boxes without an area overlap if they are equal.
    overlaps[(own[:, None] == right[None]).all(axis=2)] = 1.0
    total = 0.0
    for _ in range(min(len(own), len(right))):
        row, column = np.unravel_index(overlaps.argmax(), overlaps.shape)
        total += float(overlaps[row, column])
        overlaps[row, :] = overlaps[:, column] = -1.0
    return total / most
