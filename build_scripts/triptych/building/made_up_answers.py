"""Answers that no model made, in the form that a task's outputs are declared in."""

from __future__ import annotations

import json

import numpy as np

from triptych.runtime.hooking import NUMPY_TYPES, Row, RowForm
from triptych.spec.tasks.task import Task

VARIABLE = 2
"""Elements along an axis whose size varies."""

TEXT, NUMBER = "made up", 0.5


def make_up_answers(task: Task, form: RowForm, count: int) -> list[Row]:
    """`count` equal rows of the task's outputs, as `hooks.after` gets them.

    Args:
        task: whose outputs they are.
        form: of the same outputs.
        count: at least 1.
    """
    tensors = {}
    for output in task.outputs:
        dims = [VARIABLE if axis == -1 else axis for axis in output.config_dims]
        if output.dtype == "BYTES":
            example = (
                json.dumps(task.example.get(output.name)) if output.content == "json" else TEXT
            )
            tensors[output.name] = np.full((count, *dims), example.encode(), dtype=np.object_)
        else:
            tensors[output.name] = np.full((count, *dims), NUMBER).astype(NUMPY_TYPES[output.dtype])
    return form.rows(tensors)
