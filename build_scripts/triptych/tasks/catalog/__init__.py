"""The tasks that `task` in ``pipeline.yaml`` can name: the value `TASK` of each module."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from triptych.base.errors import UserError
from triptych.tasks.task import Task

_MODULES = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in _MODULES}


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
