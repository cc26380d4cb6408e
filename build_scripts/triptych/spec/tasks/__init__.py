"""The tasks, one frozen value each, with their metrics; it never runs a model or a server."""

from triptych.base.errors import UserError
from triptych.spec.tasks.fill_mask import FILL_MASK
from triptych.spec.tasks.image_classification import IMAGE_CLASSIFICATION
from triptych.spec.tasks.question_answering import QUESTION_ANSWERING
from triptych.spec.tasks.reranking import RERANKING
from triptych.spec.tasks.task import Core, Rule, Task, View
from triptych.spec.tasks.text_classification import TEXT_CLASSIFICATION
from triptych.spec.tasks.text_embedding import TEXT_EMBEDDING
from triptych.spec.tasks.token_classification import TOKEN_CLASSIFICATION
from triptych.spec.tasks.zero_shot_classification import ZERO_SHOT_CLASSIFICATION

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        TEXT_EMBEDDING,
        TEXT_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        QUESTION_ANSWERING,
        RERANKING,
        FILL_MASK,
        ZERO_SHOT_CLASSIFICATION,
        IMAGE_CLASSIFICATION,
    )
}


def find_task(name: str) -> Task:
    """The task called `name`.

    Raises:
        UserError: there is none.
    """
    if name not in TASKS:
        raise UserError(
            "task", "must be a known task", given=name, remedy=f"Choose one of: {', '.join(TASKS)}"
        )
    return TASKS[name]


__all__ = ["TASKS", "Core", "Rule", "Task", "View", "find_task"]
