"""The tasks of this package: the value `TASK` of each module that has one."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import triptych.tasks
from triptych.base.errors import UserError
from triptych.tasks.task import Task


def _all_tasks() -> dict[str, Task]:
    """Return the tasks by name, in the order of their modules' names."""
    found: dict[str, Task] = {}
    for module in pkgutil.iter_modules(triptych.tasks.__path__):
        if f"{__package__}.{module.name}" != __name__:
            task = getattr(import_module(f"{__package__}.{module.name}"), "TASK", None)
            if isinstance(task, Task):
                found[task.name] = task
    return found


TASKS = _all_tasks()


def find_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UserError: No task has that name.
    """
    if name not in TASKS:
        raise UserError(
            "task", "is not a known task", given=name, remedy=f"Choose one of: {', '.join(TASKS)}"
        )
    return TASKS[name]
