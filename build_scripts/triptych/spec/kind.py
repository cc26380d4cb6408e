"""The kinds of pipeline. A layer that treats kinds differently has one `match` of them."""

from __future__ import annotations

from enum import Enum

GENERATION = "text-generation"
"""Name of the task whose specs are `generation_fields.GenerationSpec`."""

TEXT2TEXT = "text2text-generation"
"""Name of the task whose specs are `generation_fields.Text2TextSpec`."""


MODEL = "model"
"""Name of the task whose specs are `model_fields.ModelSpec`."""


class Kind(Enum):
    """Kind of a pipeline: how its model computes, and so how it is built, checked and served."""

    ENCODER = "encoder"
    TEXT_GENERATION = "text generation"
    TEXT2TEXT = "text2text"
    MODEL = "own model"

    @property
    def is_compiled(self) -> bool:
        """Whether the core is a compiled graph, and a request is a batch of rows."""
        return self in (Kind.ENCODER, Kind.MODEL)


_BY_TASK = {
    GENERATION: Kind.TEXT_GENERATION,
    TEXT2TEXT: Kind.TEXT2TEXT,
    MODEL: Kind.MODEL,
}

GENERATING = (GENERATION, TEXT2TEXT)
"""Names of the tasks that generate text."""


def kind_of_task(task: str) -> Kind:
    """Return the kind of the pipelines with a task; every other task is one of an encoder."""
    return _BY_TASK.get(task, Kind.ENCODER)
