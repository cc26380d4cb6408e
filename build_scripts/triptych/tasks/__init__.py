"""The tasks, one frozen value each: what goes in, what comes out, which runtime file decodes."""

from triptych.errors import UserError
from triptych.tasks.task import Task
from triptych.tasks.text_embedding import TEXT_EMBEDDING

TASKS: dict[str, Task] = {task.name: task for task in (TEXT_EMBEDDING,)}


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


__all__ = ["TASKS", "Task", "find_task"]
