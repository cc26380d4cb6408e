"""The kinds of pipeline. A layer that treats kinds differently has one table, keyed by `Kind`."""

from __future__ import annotations

from enum import Enum

GENERATION = "text-generation"
"""Name of the task whose specs are `generation_fields.GenerationSpec`."""

TEXT2TEXT = "text2text-generation"
"""Name of the task whose specs are `generation_fields.Text2TextSpec`."""


class Kind(Enum):
    """Kind of a pipeline: how its model computes, and so how it is built, checked and served."""

    ENCODER = "encoder"
    TEXT_GENERATION = "text generation"
    TEXT2TEXT = "text2text"


_BY_TASK = {GENERATION: Kind.TEXT_GENERATION, TEXT2TEXT: Kind.TEXT2TEXT}

GENERATING = tuple(_BY_TASK)
"""Names of the tasks that generate text."""


def kind_of_task(task: str) -> Kind:
    """Return the kind of the pipelines with a task; every other task is one of an encoder."""
    return _BY_TASK.get(task, Kind.ENCODER)
