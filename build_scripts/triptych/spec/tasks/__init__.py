"""Tasks and their metrics. Nothing here runs a model or a server."""

from triptych.spec.tasks.catalog import TASKS, find_task
from triptych.spec.tasks.task import Core, Rule, Task, View

__all__ = ["TASKS", "Core", "Rule", "Task", "View", "find_task"]
